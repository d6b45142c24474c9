"""Counters of the worker, read by `collective_rpc("neuronserve_metrics")`. Plain numbers, only ever growing.

`Counters` are totals; its `steps_by_kind` also hold how long the stages of a step took, as histograms. A step is
`prefill` (prompts alone), `decode` or `mixed`. Knows no names of metrics: those are the server's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


def _durations() -> tuple[float, ...]:
    """0.00015 s to 145.6 s, each half as long again as the one before: TGI's buckets, bit by bit."""
    bounds, bound = [], 0.0001
    for _ in range(35):
        bound *= 1.5
        bounds.append(bound)
    return tuple(bounds)


DURATION_BUCKETS = _durations()
BATCH_SIZE_BUCKETS = tuple(map(float, range(1, 1025)))


class Tally:
    """A histogram: how many values fell in each bucket, the last one without an upper bound."""

    def __init__(self, bounds: Sequence[float] = DURATION_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def snapshot(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "sum": self.sum}


@dataclass
class KindOfStep:
    """All steps of one kind, the failed ones included."""

    steps: int = 0
    failed: int = 0
    extended: int = 0  # steps in which requests joined others that were running
    seconds: Tally = field(default_factory=Tally)  # of a whole step; of these:
    apply_seconds: Tally = field(default_factory=Tally)  # requests leave and join
    device_seconds: Tally = field(default_factory=Tally)
    sample_seconds: Tally = field(default_factory=Tally)  # tokens drawn and reported
    join_seconds: Tally = field(default_factory=Tally)  # `apply_seconds` of the extended steps alone

    def snapshot(self) -> dict[str, Any]:
        return {name: value.snapshot() if isinstance(value, Tally) else value for name, value in vars(self).items()}


KINDS = ("prefill", "decode", "mixed")


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
    device_restarts: int = 0
    drafted_tokens: int = 0  # that were verified
    draft_calls: int = 0  # of a draft on the device
    draft_seconds: float = 0.0  # of the device's, in these

    def __post_init__(self) -> None:
        self.kinds = {kind: KindOfStep() for kind in KINDS}
        self.joined = Tally(BATCH_SIZE_BUCKETS)  # requests that joined, per step in which any did
        self.accepted_drafts: dict[int, int] = {}  # how many rows kept so many drafted tokens; 0 is not counted here
        self._step: _Step | None = None

    @property
    def host_seconds(self) -> float:
        """Time of the steps spent outside the device."""
        return self.step_seconds - self.device_seconds

    def step_applied(self, began: float, num_decodes: int, *, num_rows: int, num_joined: int) -> None:
        """A step is under way: how many of its rows decode, and of how many the requests are new."""
        kind = "decode" if num_decodes == num_rows else "mixed" if num_decodes else "prefill"
        self._step = _Step(self.kinds[kind], began, self.device_seconds)
        applied = time.perf_counter() - began
        self._step.kind.apply_seconds.add(applied)
        if num_joined:
            self.joined.add(num_joined)
            if num_joined < num_rows:
                self._step.kind.extended += 1
                self._step.kind.join_seconds.add(applied)

    def step_computed(self) -> None:
        """The device is done with it."""
        if self._step is not None:
            self._step.computed = time.perf_counter()

    def step_ended(self, *, failed: bool = False) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        step.kind.steps += 1
        step.kind.failed += failed
        now = time.perf_counter()
        if not failed:
            step.kind.seconds.add(now - step.began)
            step.kind.device_seconds.add(self.device_seconds - step.device_seconds)
            step.kind.sample_seconds.add(now - step.computed)

    def snapshot(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "host_seconds": self.host_seconds,
            "kinds": {name: kind.snapshot() for name, kind in self.kinds.items()},
            "joined": self.joined.snapshot(),
            "accepted_drafts": sorted(self.accepted_drafts.items()),
        }


@dataclass
class _Step:
    """The step that is under way."""

    kind: KindOfStep
    began: float
    device_seconds: float  # of all steps before it
    computed: float = 0.0
