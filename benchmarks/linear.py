"""All linear layers of a model and its head, without the rest: `python benchmarks/linear.py [--model DIR]`.

One thread, random weights of the model's sizes, steps of 1 to 512 rows; float32 also with weights kept in the
narrower types that could hold a checkpoint's. The columns take turns, and what counts is the least processor time of
a step in all rounds: others on the machine can only add to it. Rounding activations to int8 is counted. Columns of
another instruction set than the best are asked for by `--sets`. Beside them what torch has for linear layers: its
own, oneDNN's on weights laid out once, FBGEMM's in int8, and its 8-bit weights with float32 activations. ONNX
Runtime, a peer in an environment of its own, is measured after the others of a row, by the same count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from bench import conditions, demo_model
from numpy.typing import NDArray
from peers import PEERS, Unavailable, interpreter

from neuronserve.bucketing.pack import StepPacker
from neuronserve.bucketing.row import Row, int32
from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape, Want
from neuronserve.neuron_worker.device.cpu.library import Session
from neuronserve.neuron_worker.device.cpu.native_ops import NativeOps
from neuronserve.neuron_worker.device.cpu.packer import NativePacker, Table
from neuronserve.neuron_worker.device.cpu.program import BoundProgram, Results
from neuronserve.neuron_worker.device.graph.ops import FloatType, LinearWeight
from neuronserve.neuron_worker.device.graph.spec import ModelSpec, read_spec

ROWS = (1, 2, 4, 5, 8, 12, 16, 32, 128, 512)
BLOCK = 16
GATED = 2
NARROW = ("bfloat16", "float16", "float24")


@dataclass(frozen=True)
class Numbers:
    """A `Matrix` of random numbers."""

    shape: tuple[int, int]
    source: NDArray[np.float32]
    dtype: FloatType = "float32"
    name: str = "random"

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        rows = len(range(*slice(start, stop).indices(self.shape[0])))
        return self.source[: rows * self.shape[1]].reshape(rows, self.shape[1])

    def mapped(self) -> None:
        return None


def layer_sizes(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """(outputs, inputs, parts) in the order of a layer; two parts: a gate."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [(spec.qkv_size, hidden, 1), (hidden, spec.query_size, 1), (inner, hidden, GATED), (hidden, inner, 1)]


class Kernels:
    """The layers on the device's kernels; each reads what the one before wrote, as far as sizes allow."""

    def __init__(
        self,
        spec: ModelSpec,
        isa: str,
        *,
        quantize: bool = False,
        activations: str = "float32",
        stored: str = "float32",
    ) -> None:
        self._spec, self._quantize = spec, quantize
        self._dtype = cast(FloatType, "float32" if stored == "float24" else stored)
        self._source = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32)
        if stored == "float24":
            self._source.view(np.uint32)[:] &= 0xFFFFFF00
        self.session = Session(1, isa)
        self._packer = NativePacker(self.session, "float32", activations)
        self._table = Table(self._source[: 1024 * spec.hidden_size].reshape(1024, -1), "float32", spec.hidden_size)
        self._results = Results()
        self._weights: list[LinearWeight] = []  # kept alive: the recording has addresses alone
        self._recorder = NativeOps()
        self._record(self._recorder)
        self.session.cache(1, 2, BLOCK, 1, 8)

    def _record(self, ops: NativeOps) -> None:
        x = ops.embed(self._table)
        for _ in range(self._spec.num_layers):
            qkv, output, up, down = (self._weight(*size) for size in layer_sizes(self._spec))
            ops.linear(x, qkv)
            attended = ops.linear(x, output) if output.in_features == x.width else x
            x = ops.linear(ops.linear(attended, up, activation="silu_gate"), down, residual=attended)
        ops.recording.logits = ops.linear(x, self._weight(self._spec.vocab_size, self._spec.hidden_size, 1))
        ops.recording.slice_start = len(ops.recording.ops)

    def _weight(self, outputs: int, inputs: int, parts: int) -> LinearWeight:
        matrix = Numbers((outputs, inputs), self._source, self._dtype)
        weight = self._packer.linear([matrix] * parts, quantize=self._quantize, gate=parts == GATED)
        self._weights.append(weight)
        return weight

    def prepare(self, rows: int) -> Callable[[], None]:
        """A step of `rows`."""
        shape = StepShape(0, 1, rows, max(rows, BLOCK))
        bound = self._recorder.recording.bind(shape, 1)
        options = DeviceOptions(1, shape.context, BLOCK, 1)
        program = BoundProgram(shape, bound, options, 1024, self.session)
        self._results.reserve(program.num_rows, shape, 0)
        packer = StepPacker(BLOCK, 1)
        packer.prepare(shape)
        blocks = int32([1] * (shape.context // BLOCK))
        batch = packer.pack([Row(int32(list(range(rows))), 0, blocks, is_decode=False, want=Want.NOTHING)], shape)
        return lambda: program.run(batch, self._results)


def all_sizes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(outputs, inputs) of every layer, the head last."""
    sizes = [(outputs * parts, inputs) for outputs, inputs, parts in layer_sizes(spec)] * spec.num_layers
    return [*sizes, (spec.vocab_size, spec.hidden_size)]


Prepared = tuple[Any, ...]
"""A weight as a library wants it."""


def packed_by_fbgemm(weight: torch.Tensor, rows: int) -> Prepared:
    scales, zeros = weight.abs().amax(dim=1) / 127, torch.zeros(len(weight), dtype=torch.int64)
    quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    return (torch.ops.quantized.linear_prepack(quantized, None),)


@dataclass(frozen=True)
class Library:
    """What torch has for a linear layer: how it lays out a weight for so many rows, and multiplies by it."""

    prepare_weight: Callable[[torch.Tensor, int], Prepared]
    multiply: Callable[..., torch.Tensor]


LIBRARIES = {
    "torch `F.linear` (MKL)": Library(lambda weight, rows: (weight,), torch.nn.functional.linear),
    # As inductor calls it when it freezes a model.
    "oneDNN, weights laid out": Library(
        lambda weight, rows: (torch.ops.mkldnn._reorder_linear_weight(weight, rows),),
        lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
    ),
    # One scale for the activations of all rows: a row depends on the others. Without VNNI its sums saturate.
    "torch int8, FBGEMM": Library(packed_by_fbgemm, torch.ops.quantized.linear_dynamic),
    "torch int8 weights": Library(
        lambda weight, rows: ((weight * 30).clamp(-127, 127).to(torch.int8), torch.ones(len(weight))),
        torch._weight_int8pack_mm,
    ),
}


class Torch:
    """One of the libraries on the same layers."""

    def __init__(self, spec: ModelSpec, library: Library) -> None:
        torch.set_num_threads(1)
        self._library = library
        self._sizes = all_sizes(spec)

    def prepare(self, rows: int) -> Callable[[], None]:
        weights = [(size[1], self._library.prepare_weight(torch.randn(*size), rows)) for size in self._sizes]
        inputs = {width: torch.randn(rows, width) for width, _ in weights}
        multiply = self._library.multiply

        def step() -> None:
            with torch.inference_mode():
                for width, weight in weights:
                    multiply(inputs[width], *weight)

        return step


class OnnxRuntime:
    """The same layers in a process of the peer's."""

    def __init__(self, spec: ModelSpec) -> None:
        script = Path(__file__).with_name("onnx_linear.py")
        command = [str(interpreter(PEERS["onnxruntime"])), str(script), json.dumps(all_sizes(spec))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def least(self, rows: int) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(rows, file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise Unavailable("onnxruntime: its process ended")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def onnx_runtime(spec: ModelSpec) -> OnnxRuntime | None:
    try:
        return OnnxRuntime(spec)
    except Unavailable as missing:
        print(f"not measured: {missing}")
        return None


def seconds(step: Callable[[], None]) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began


def columns(spec: ModelSpec, sets: Sequence[str]) -> dict[str, Kernels | Torch]:
    made: dict[str, Kernels | Torch] = {}
    for isa in sets or [""]:
        suffix = f", {isa}" if isa else ""
        made[f"float32{suffix}"] = Kernels(spec, isa)
        for stored in NARROW:
            made[f"float32, kept in {stored}{suffix}"] = Kernels(spec, isa, stored=stored)
        made[f"int8 weights{suffix}"] = Kernels(spec, isa, quantize=True)
        made[f"int8{suffix}"] = Kernels(spec, isa, quantize=True, activations="int8")
    return made | {name: Torch(spec, library) for name, library in LIBRARIES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="directory with config.json; by default the demo model")
    parser.add_argument("--sets", nargs="*", default=[], help="instruction sets; by default the best alone")
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long each cell is measured")
    parser.add_argument("--no-peer", action="store_true", help="without ONNX Runtime")
    arguments = parser.parse_args()
    spec = read_spec(arguments.model or demo_model())
    print(conditions())
    entries = columns(spec, arguments.sets)
    operations = 2.0 * (sum(o * i * p for o, i, p in layer_sizes(spec)) * spec.num_layers + spec.num_head_parameters)
    print(f"{operations / 2e6:.1f} M weights, one thread; milliseconds (G operations a second)\n")
    onnx = None if arguments.no_peer else onnx_runtime(spec)
    for number, rows in enumerate(arguments.rows):
        steps = [entry.prepare(rows) for entry in entries.values()]
        least = [seconds(step) for step in steps]
        ends = time.perf_counter() + arguments.seconds * len(steps)
        while time.perf_counter() < ends:
            least = [min(best, seconds(step)) for best, step in zip(least, steps, strict=True)]
        found = dict(zip(entries, least, strict=True)) | (onnx.least(rows) if onnx else {})
        if not number:
            print("| rows | " + " | ".join(found) + " |\n" + "| --- " * (len(found) + 1) + "|")
        cells = [f"{1e3 * best:.1f} ({rows * operations / best / 1e9:.0f})" for best in found.values()]
        print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)
    if onnx:
        onnx.close()


if __name__ == "__main__":
    main()
