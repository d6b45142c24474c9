"""Decode time per step against context and streams, explained by bytes and operations: with the fit and a plot.

    python benchmarks/scaling.py [--quantization int8 none] [--rounds 5] [--plot FILE.svg] [--model DIR]

The device alone, no scheduler: steps of 1 to 32 rows with 128 to 4096 positions behind each. The fit is
max(bytes / bandwidth, operations / peak) + constant with the three numbers that make its worst point best; the floor
that the machine itself shows in the same run is printed beside them. Bytes: all weights once and every row's keys and
values. Operations: two for each weight and row, and attention's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import floor
import numpy as np
import plot
from bars import ROUNDS, verdict
from bench import conditions, demo_model
from work import Step, Work

from neuronserve.bucketing.pack import StepPacker
from neuronserve.bucketing.row import Row, int32
from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import Device, DeviceOptions, StepShape, Want

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
STREAMS = (1, 2, 4, 8, 16, 32)
BLOCK = 32
BAR = 1.5
STEPS = 3
"""Of each point in a round, one after the other; the first is not counted."""


@dataclass(frozen=True)
class Point:
    streams: int
    context: int

    @property
    def shape(self) -> StepShape:
        return StepShape(self.streams, 1, 0, self.context)

    @property
    def positions(self) -> int:
        return self.streams * self.context

    @property
    def step(self) -> Step:
        return Step.of_decoding(self.streams, self.context)


@dataclass(frozen=True)
class Fit:
    bandwidth: float
    peak: float
    constant: float
    worst: float  # of predicted / measured and its inverse, over all points

    def seconds(self, num_bytes: float, operations: float) -> float:
        return max(num_bytes / self.bandwidth, operations / self.peak) + self.constant


def fit(num_bytes: Sequence[float], operations: Sequence[float], seconds: Sequence[float]) -> Fit:
    """By search on a grid that closes in: three numbers, and the worst of all points to be made best."""
    data, work, measured = (np.array(values, dtype=np.float64) for values in (num_bytes, operations, seconds))
    # Everything by bytes, everything by operations, all constant: the answer lies between.
    centre = np.log([np.max(data / measured), np.max(work / measured), np.min(measured) / 4])
    width = np.log([8.0, 8.0, 64.0])
    for _ in range(12):
        axes = [np.linspace(middle - reach, middle + reach, 17) for middle, reach in zip(centre, width, strict=True)]
        bandwidth, peak, constant = np.exp(np.meshgrid(*axes, indexing="ij"))
        predicted = np.maximum(data / bandwidth[..., None], work / peak[..., None]) + constant[..., None]
        worst = np.abs(np.log(predicted / measured)).max(axis=-1)
        best = np.unravel_index(worst.argmin(), worst.shape)
        centre = np.array([axis[index] for axis, index in zip(axes, best, strict=True)])
        width = width * 0.5
    bandwidth, peak, constant = np.exp(centre)
    return Fit(float(bandwidth), float(peak), float(constant), float(np.exp(worst.min())))


def affordable(points: Sequence[Point], kv_bytes: int, available: float) -> list[Point]:
    """Those whose cache takes at most half of the memory that is free; the others are named."""
    kept = [point for point in points if point.positions * kv_bytes <= available / 2]
    for point in points:
        if point not in kept:
            size = point.positions * kv_bytes / 1e9
            print(f"not measured: {point.streams} streams at {point.context}: {size:.1f} GB of cache")
    return kept


def available_bytes() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


class Bench:
    """A device whose cache holds something everywhere."""

    def __init__(self, model: str, quantization: str | None, points: Sequence[Point]) -> None:
        self.device: Device = registry.create("cpu", None)
        self.packer = StepPacker(BLOCK, 1)
        most, longest = max(point.streams for point in points), max(point.context for point in points)
        is_int8 = quantization is not None
        how = {"quantization": quantization, "quantize_head": is_int8, "activations": "int8" if is_int8 else "float32"}
        options = DeviceOptions(most, longest, BLOCK, 1, **how)  # type: ignore[arg-type]
        facts = self.device.load(model, options)
        self.work = Work.of(model, 1 if is_int8 else 4)
        self.points = affordable(points, facts.bytes_per_kv_token, available_bytes())
        num_blocks = 1 + max(-(-point.context // BLOCK) * point.streams for point in self.points)
        self.device.allocate(num_blocks)
        self._prepare(StepShape(0, 1, BLOCK, BLOCK), *(point.shape for point in self.points))
        self._fill(num_blocks)
        # Blocks of a row lie apart, as they do once requests came and went.
        self.order = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))

    def _prepare(self, *shapes: StepShape) -> None:
        for shape in shapes:
            self.packer.prepare(shape)
            self.device.compile(shape)
        self.device.seal()

    def _fill(self, num_blocks: int) -> None:
        shape = StepShape(0, 1, BLOCK, BLOCK)
        prompt = Row(int32(list(range(1000, 1000 + BLOCK))), 0, int32([1]), is_decode=False, want=Want.TOKEN)
        self.device.run(self.packer.pack([prompt], shape))
        self.device.copy_blocks([(1, block) for block in range(2, num_blocks)])

    def seconds(self, point: Point) -> list[float]:
        per_row = -(-point.context // BLOCK)
        rows = [
            Row(
                int32([1000 + i]),
                point.context - 1,
                self.order[i * per_row : (i + 1) * per_row],
                is_decode=True,
                want=Want.TOKEN,
            )
            for i in range(point.streams)
        ]
        batch, found = self.packer.pack(rows, point.shape), []
        for _ in range(STEPS):
            began = time.perf_counter()
            self.device.run(batch)
            found.append(time.perf_counter() - began)
        return found[1:]


def measure(bench: Bench, rounds: int) -> dict[Point, float]:
    """Median seconds of a step; the rounds go over all points."""
    found: dict[Point, list[float]] = {point: [] for point in bench.points}
    for _ in range(rounds):
        for point in bench.points:
            found[point] += bench.seconds(point)
    return {point: statistics.median(values) for point, values in found.items()}


def table(found: dict[Point, float], predicted: dict[Point, float]) -> None:
    contexts = sorted({point.context for point in found})
    print("\nmilliseconds of a step, measured (fit)\n")
    print("| streams | " + " | ".join(f"context {context}" for context in contexts) + " |")
    print("| --- " * (len(contexts) + 1) + "|")
    for streams in sorted({point.streams for point in found}):
        points = [Point(streams, context) for context in contexts]
        cells = [f"{1e3 * found[p]:.1f} ({1e3 * predicted[p]:.1f})" if p in found else "" for p in points]
        print(f"| {streams} | " + " | ".join(cells) + " |")


def judge(label: str, worst: float, num_points: int, rounds: int) -> str:
    asked = len(STREAMS) * len(CONTEXTS)
    said = verdict(worst <= BAR, is_whole=num_points == asked and rounds >= ROUNDS)
    return (
        f"{said} bar 10, {label}: worst of {num_points} of {asked} points {worst:.2f} x from the fit, {rounds} rounds "
        f"(bar {BAR})"
    )


def report(label: str, work: Work, found: dict[Point, float], rounds: int, machine: floor.Floor | None) -> plot.Panel:
    points = list(found)
    num_bytes, operations = [work.num_bytes(p.step) for p in points], [work.operations(p.step) for p in points]
    fitted = fit(num_bytes, operations, list(found.values()))
    predicted = {p: fitted.seconds(*of) for p, *of in zip(points, num_bytes, operations, strict=True)}
    print(f"\n{label}")
    table(found, predicted)
    print(
        f"\nfit: max(bytes / {fitted.bandwidth / 1e9:.1f} GB/s, operations / {fitted.peak / 1e9:.0f} G/s) "
        f"+ {1e3 * fitted.constant:.2f} ms"
    )
    if machine:
        print(f"the machine's own {machine}")
    print(judge(label, fitted.worst, len(points), rounds))
    series = [
        plot.Series(
            f"{streams} streams",
            [(p.context, 1e3 * found[p]) for p in points if p.streams == streams],
            [(p.context, 1e3 * predicted[p]) for p in points if p.streams == streams],
        )
        for streams in sorted({p.streams for p in points})
    ]
    return plot.Panel(f"{label}: milliseconds of a decode step by context; dots measured, lines fitted", series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--quantization", nargs="*", default=["int8", "none"], choices=["int8", "none"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    parser.add_argument("--streams", type=int, nargs="*", default=list(STREAMS))
    parser.add_argument("--plot", type=Path, default=Path("build/decode-time.svg"))
    arguments = parser.parse_args()
    if not arguments.streams or not arguments.contexts:
        parser.error("--streams and --contexts take at least one number")
    model = arguments.model or demo_model()
    print(conditions())
    before = floor.measure()
    points = [Point(streams, context) for streams in arguments.streams for context in arguments.contexts]
    benches: dict[str, tuple[Work, dict[Point, float]]] = {}
    for quantization in arguments.quantization:
        bench = Bench(model, None if quantization == "none" else quantization, points)
        found = measure(bench, arguments.rounds)
        bench.device.close()
        benches["float32" if quantization == "none" else quantization] = bench.work, found
    machine = floor.slower(before, floor.measure())
    panels = [report(label, *bench, arguments.rounds, machine) for label, bench in benches.items()]
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    arguments.plot.write_text(plot.svg(panels))
    print(f"\nplot: {os.fspath(arguments.plot)}")


if __name__ == "__main__":
    main()
