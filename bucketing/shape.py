"""What a step needs, and when a static shape can hold it. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

from neuronserve.neuron_worker.device.base import StepShape

__all__ = ["StepDemand", "StepShape", "holds"]


@dataclass(frozen=True)
class StepDemand:
    """The rows a step has before padding. `context` is the furthest position of any row, plus one."""

    decode_rows: int
    decode_width: int
    prefill_tokens: int
    context: int


def holds(shape: StepShape, demand: StepDemand) -> bool:
    """Whether a call of `shape` can compute `demand`."""
    return (
        shape.decode_rows >= demand.decode_rows
        and (demand.decode_rows == 0 or shape.decode_width >= demand.decode_width)
        and shape.prefill_tokens >= demand.prefill_tokens
        and shape.context >= demand.context
    )
