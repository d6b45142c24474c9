"""ONNX Runtime's products on a model's linear layers, for `linear.py`: a number of rows in, least seconds out.

Runs in a peer's environment, so it imports nothing of ours. Its argument is a list of (outputs, inputs), as JSON; a
line with a number of rows is answered by an object of seconds by form. One thread; of each product the first column
leaves the graph, so that none is pruned and none is written out. No two layers have the same weights, which would be
kept once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

BLOCK = 64
SECONDS = 3.0
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy level

Maker = Callable[[int, int, int], tuple[list[Any], list[Any]]]
"""(number, outputs, inputs) of a layer -> its nodes, from `x{inputs}` to `y{number}`, and its weights."""


def constant(name: str, values: Any) -> Any:
    return numpy_helper.from_array(values, name)


def random_bytes(number: int, shape: tuple[int, ...], kind: type) -> Any:
    return numpy.random.default_rng(number).integers(1, 127, shape).astype(kind)


def float32(number: int, outputs: int, inputs: int) -> tuple[list[Any], list[Any]]:
    weight = numpy.random.default_rng(number).standard_normal((inputs, outputs), dtype=numpy.float32)
    node = helper.make_node("MatMul", [f"x{inputs}", f"w{number}"], [f"y{number}"])
    return [node], [constant(f"w{number}", weight)]


def blocks(number: int, outputs: int, inputs: int) -> tuple[list[Any], list[Any]]:
    """8-bit weights with a scale for each block of inputs; activations rounded likewise."""
    names = [f"w{number}", f"s{number}"]
    settings = {"K": inputs, "N": outputs, "bits": 8, "block_size": BLOCK, "accuracy_level": INT8_ACTIVATIONS}
    domain = "com.microsoft"
    node = helper.make_node("MatMulNBits", [f"x{inputs}", *names], [f"y{number}"], domain=domain, **settings)
    scales = numpy.full(outputs * (inputs // BLOCK), 0.01, dtype=numpy.float32)
    weight = random_bytes(number, (outputs, inputs // BLOCK, BLOCK), numpy.uint8)
    return [node], [constant(names[0], weight), constant(names[1], scales)]


def one_scale(number: int, outputs: int, inputs: int) -> tuple[list[Any], list[Any]]:
    """8-bit weights, and one scale for all activations of the call: a row's result depends on the others."""
    rounded = [f"{part}{number}" for part in ("q", "qs", "qz")]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", [f"x{inputs}"], rounded),
        helper.make_node("MatMulInteger", [rounded[0], f"w{number}", rounded[2]], [f"i{number}"]),
        helper.make_node("Cast", [f"i{number}"], [f"f{number}"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"f{number}", rounded[1]], [f"y{number}"]),
    ]
    return nodes, [constant(f"w{number}", random_bytes(number, (inputs, outputs), numpy.int8))]


FORMS: dict[str, Maker] = {
    "ONNX Runtime float32": float32,
    "ONNX Runtime int8 in blocks": blocks,
    "ONNX Runtime int8, one scale": one_scale,
}


def session(maker: Maker, sizes: list[tuple[int, int]]) -> Any:
    nodes, weights = [], [constant("from", numpy.array([0])), constant("to", numpy.array([1]))]
    weights.append(constant("axis", numpy.array([1])))
    for number, (outputs, inputs) in enumerate(sizes):
        more, own = maker(number, outputs, inputs)
        nodes += [*more, helper.make_node("Slice", [f"y{number}", "from", "to", "axis"], [f"z{number}"])]
        weights += own
    results = [helper.make_tensor_value_info(f"z{n}", TensorProto.FLOAT, ["rows", 1]) for n in range(len(sizes))]
    widths = sorted({inputs for _, inputs in sizes})
    inputs_of = [helper.make_tensor_value_info(f"x{width}", TensorProto.FLOAT, ["rows", width]) for width in widths]
    graph = helper.make_graph(nodes, "layers", inputs_of, results, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def least_seconds(made: Any, rows: int) -> float:
    chance = numpy.random.default_rng(1)
    feed = {one.name: chance.standard_normal((rows, one.shape[1]), dtype=numpy.float32) for one in made.get_inputs()}
    made.run(None, feed)
    least, ends = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < ends:
        began = time.thread_time()
        made.run(None, feed)
        least = min(least, time.thread_time() - began)
    return least


def main() -> None:
    sizes = [(outputs, inputs) for outputs, inputs in json.loads(sys.argv[1])]
    made = {name: session(maker, sizes) for name, maker in FORMS.items()}
    for line in sys.stdin:
        print(json.dumps({name: least_seconds(one, int(line)) for name, one in made.items()}), flush=True)


if __name__ == "__main__":
    main()
