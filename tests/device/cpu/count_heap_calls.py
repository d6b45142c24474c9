"""A process by itself: what the kernels ask of the heap while a session is made, and in the steps after.

python -m tests.device.cpu.count_heap_calls MODEL     with `heap_calls.c` preloaded; prints both counts
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from neuronserve.bucketing.pack import StepPacker
from neuronserve.bucketing.row import Row, int32
from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape, Want
from neuronserve.neuron_worker.device.cpu import library
from neuronserve.neuron_worker.device.cpu.device import CpuDevice

BLOCK, LENGTH, NUM_STEPS = 8, 96, 50
SHAPE = StepShape(4, 1, 8, LENGTH)


class HeapCalls:
    """By the kernels' library."""

    def __init__(self) -> None:
        preloaded = ctypes.CDLL(None)
        library.load()
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0] for line in maps if "neuronserve_cpu-" in line]
        ctypes.c_size_t.in_dll(preloaded, "counted_from").value = int(ranges[0].split("-")[0], 16)
        ctypes.c_size_t.in_dll(preloaded, "counted_to").value = int(ranges[-1].split("-")[1], 16)
        self._counted = ctypes.c_long.in_dll(preloaded, "counted")

    @property
    def count(self) -> int:
        return self._counted.value


def rows(position: int) -> list[Row]:
    """Decodes, one of them drawn on the device and one sampled on the host, beside a chunk of a prompt."""
    per_stream = LENGTH // BLOCK
    found = []
    for stream in range(4):
        is_decode, blocks = stream < 3, int32(list(range(1 + stream * per_stream, 1 + (stream + 1) * per_stream)))
        tokens = int32([7] if is_decode else [5, 6, 7, 8, 9])
        found.append(Row(tokens, position, blocks, is_decode=is_decode, want=Want.TOKEN))
    found[1] = found[1]._replace(temperature=0.8, top_k=20, top_p=0.95, uniforms=(0.3,))
    found[2] = found[2]._replace(want=Want.LOGITS)
    return found


def main() -> None:
    calls, device, packer = HeapCalls(), CpuDevice(), StepPacker(BLOCK, 1)
    device.load(sys.argv[1], DeviceOptions(4, LENGTH, BLOCK, 1, threads=2))
    device.allocate(1 + 4 * LENGTH // BLOCK)
    packer.prepare(SHAPE)
    device.compile(SHAPE)
    device.seal()
    at_start = calls.count
    for position in range(NUM_STEPS):
        device.run(packer.pack(rows(position), SHAPE))
    in_steps = calls.count - at_start
    device.close()
    print(at_start, in_steps)


if __name__ == "__main__":
    main()
