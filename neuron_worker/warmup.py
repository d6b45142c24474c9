"""Prepares every shape of the plan before the server reports ready, counting aloud, then seals the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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
    device: Device,
    shapes: Sequence[StepShape],
    say: Callable[[str], None],
    seconds_between_lines: float = 0.5,
    seconds_between_signs: float = 60.0,
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
    # Where the backend compiles all graphs together, this is where: minutes to hours.
    started = time.perf_counter()
    with _signs_of_life(say, f"sealing {len(shapes)} shapes", seconds_between_signs):
        device.seal()
    now = time.perf_counter()
    if now - started >= seconds_between_lines:
        say(f"sealed, {now - started:.1f} s")
    return now - began


@contextmanager
def _signs_of_life(say: Callable[[str], None], what: str, seconds: float) -> Iterator[None]:
    began, done = time.perf_counter(), threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            say(f"{what}, {time.perf_counter() - began:.0f} s so far")

    thread = threading.Thread(target=repeat, daemon=True, name="signs-of-life")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
