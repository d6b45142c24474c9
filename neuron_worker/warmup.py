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


def warm_up(device: Device, shapes: Sequence[StepShape], say: Callable[[str], None]) -> float:
    """Compile all shapes and seal; gives the seconds it took."""
    began = time.perf_counter()
    for number, shape in enumerate(shapes, start=1):
        started = time.perf_counter()
        device.compile(shape)
        say(f"{number}/{len(shapes)} {describe(shape)}, {time.perf_counter() - started:.1f} s")
    device.seal()
    return time.perf_counter() - began
