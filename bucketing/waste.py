"""How much of what was computed was padding. Counted per step, read for metrics and benchmarks."""

from __future__ import annotations

from typing import Any

from neuronserve.neuron_worker.device.base import StepShape

from .shape import StepDemand


class PaddingCounters:
    """Two additions per step; sums are made when somebody reads. A verify row counts as full width."""

    def __init__(self) -> None:
        self._steps: dict[StepShape, list[int]] = {}  # shape -> [steps, real decode rows, real prompt tokens]

    def add(self, shape: StepShape, demand: StepDemand) -> None:
        counts = self._steps.setdefault(shape, [0, 0, 0])
        counts[0] += 1
        counts[1] += demand.decode_rows
        counts[2] += demand.prefill_tokens

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers: {"steps", "total": tally, "parts": {part: tally}, "kinds": {kind of step: tally}}.

        A tally counts tokens: "real", "padded" (computed in excess of real) and "share", padded of all computed.
        """
        parts = {"decode": [0, 0], "prefill": [0, 0]}  # [real, computed]
        kinds: dict[str, list[int]] = {}
        for shape, (steps, rows, prompt_tokens) in self._steps.items():
            real = (rows * shape.decode_width, prompt_tokens)
            computed = (steps * shape.decode_rows * shape.decode_width, steps * shape.prefill_tokens)
            for tally, index in ((parts["decode"], 0), (parts["prefill"], 1)):
                tally[0] += real[index]
                tally[1] += computed[index]
            kind = kinds.setdefault(shape.kind, [0, 0])
            kind[0] += sum(real)
            kind[1] += sum(computed)
        return {
            "steps": sum(counts[0] for counts in self._steps.values()),
            "total": _tally(*map(sum, zip(*parts.values(), strict=True))),
            "parts": {name: _tally(*numbers) for name, numbers in parts.items()},
            "kinds": {name: _tally(*numbers) for name, numbers in sorted(kinds.items())},
        }


def _tally(real: int, computed: int) -> dict[str, float]:
    return {"real": real, "padded": computed - real, "share": (computed - real) / computed if computed else 0.0}
