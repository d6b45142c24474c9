"""What a device in another process costs per step: `python benchmarks/remote_overhead.py [--python PATH]`.

Times a step of 16 decode rows twice, once asking for tokens and once for 16 x 49,152 float32 logits, in this process
and through the remote device, turn by turn. The device's own time is taken out of both, so what is left is the
caller's side: for the remote one the copying of arrays, two bells and two changes of process. What it costs more
than the same backend in this process is its overhead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bars import verdict
from bench import cell, conditions

from neuronserve.bucketing.pack import StepPacker
from neuronserve.bucketing.row import Row, int32
from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import Device, DeviceOptions, PackedBatch, StepShape, Want

ROWS, VOCABULARY, CONTEXT, BLOCK = 16, 49_152, 1024, 16
HERE, THERE = "in this process", "in another process"
BARS = {"tokens": 200, "logits": 1000}
ASKED = (("tokens", Want.TOKEN, 300), ("logits", Want.LOGITS, 75))
SHAPE = StepShape(decode_rows=ROWS, decode_width=1, prefill_tokens=0, context=CONTEXT)
OPTIONS = DeviceOptions(max_num_seqs=ROWS, max_model_len=CONTEXT, block_size=BLOCK, prompts_per_call=ROWS)


def ready(device: Device, model_dir: str) -> Device:
    device.load(model_dir, OPTIONS)
    device.allocate(1 + ROWS)
    device.compile(SHAPE)
    device.seal()
    return device


def batch(want: Want) -> PackedBatch:
    packer = StepPacker(BLOCK, ROWS)
    packer.prepare(SHAPE)
    rows = [Row(int32([5 + i]), 0, int32([1 + i]), is_decode=True, want=want) for i in range(ROWS)]
    return packer.pack(rows, SHAPE)


def overheads(device: Device, step: PackedBatch, count: int) -> list[float]:
    """Microseconds of a call that were not the device's own, one per call."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        output = device.run(step)
        found.append(1e6 * (time.perf_counter() - began - output.device_seconds))
        assert output.tokens.shape == (ROWS, 1)
    return found[count // 10 :]


def report(found: dict[tuple[str, str], list[float]]) -> None:
    """Medians of the rounds' medians, lowest and highest."""
    for what, bar in BARS.items():
        here, there = found[HERE, what], found[THERE, what]
        more = statistics.median(b - a for a, b in zip(here, there, strict=True))
        for where, values in ((HERE, here), (THERE, there)):
            print(f"{where:18}  {what}  {cell(values)} us")
        print(f"{verdict(more <= bar)} {what}: {more:.0f} us more in another process (bar {bar})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the device's process")
    parser.add_argument("--backend", default="arithmetic")
    parser.add_argument("--model", help="model directory; by default a configuration alone, for the arithmetic device")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(conditions(), flush=True)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as empty:
        Path(empty, "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
        for _ in range(given.rounds):
            for where, python in ((HERE, None), (THERE, given.python)):
                device = ready(registry.create(given.backend, python), given.model or empty)
                for what, want, count in ASKED:
                    found[where, what].append(statistics.median(overheads(device, batch(want), count)))
                device.close()
    report(found)


if __name__ == "__main__":
    main()
