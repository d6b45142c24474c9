"""Counters of the worker, read by `collective_rpc("neuronserve_metrics")`. Plain numbers, only ever growing."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Written by the runner, one step at a time. Seconds are wall-clock time."""

    steps: int = 0
    failed_steps: int = 0
    device_calls: int = 0
    step_seconds: float = 0.0  # from the scheduler's output to the worker's answer
    device_seconds: float = 0.0  # of these, inside device calls
    rows_sampled_on_device: int = 0
    rows_sampled_on_host: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    num_shapes: int = 0
    warmup_seconds: float = 0.0

    @property
    def host_seconds(self) -> float:
        """Time of the steps spent outside the device."""
        return self.step_seconds - self.device_seconds

    def snapshot(self) -> dict[str, float]:
        return {**asdict(self), "host_seconds": self.host_seconds}
