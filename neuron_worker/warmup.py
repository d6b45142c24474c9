"""Prepares every shape of the plan before the server reports ready, counting aloud, then seals the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from neuronserve.neuron_worker.device.base import Device, StepShape


def describe(shape: StepShape) -> str:
    parts = []
    if shape.decode_rows:
        width = f" x {shape.decode_width}" if shape.decode_width > 1 else ""
        parts.append(f"decode {shape.decode_rows}{width}")
    if shape.prefill_tokens:
        parts.append(f"prefill {shape.prefill_tokens}")
    return f"{' + '.join(parts)}, context {shape.context}"


def warm_up(
    device: Device, shapes: Sequence[StepShape], say: Callable[[str], None], seconds_between_lines: float = 0.5
) -> float:
    """Compile all shapes and seal; gives the seconds it took. Shapes that take no time share a line."""
    began = said = time.perf_counter()
    for number, shape in enumerate(shapes, start=1):
        started = time.perf_counter()
        device.compile(shape)
        now = time.perf_counter()
        if now - said >= seconds_between_lines or number == len(shapes):
            say(f"{number}/{len(shapes)} {describe(shape)}, {now - started:.1f} s")
            said = now
    device.seal()
    return time.perf_counter() - began
