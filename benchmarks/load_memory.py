"""Anonymous memory that loading adds, int8 beside float32: `python benchmarks/load_memory.py`.

Each load is a process of its own, and the cache of keys and values is not reserved: what is counted is the weights and
what the device keeps beside them. The checkpoint's own pages are the file's, not anonymous: those that stay mapped are
told apart, as a tied head's look-up table is read from there, row by row. The peak is looked at every two milliseconds
of the load.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bars import verdict
from bench import cell, conditions, demo_model

BAR = 0.45
LOADS = 3  # of each form, which differ by less than 1 %
LABELS = {
    "float32": {},
    "int8": {"quantization": "int8", "activations": "int8"},
    "int8, head too": {"quantization": "int8", "activations": "int8", "quantize_head": True},
}


def anonymous_mib() -> float:
    return resident_mib("Anonymous")


def resident_mib(kind: str) -> float:
    """`Anonymous`, or `Rss` for all of it."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(rf"^{kind}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found, f"smaps_rollup names no {kind}"
    return int(found[1]) / 1024


def file_mib() -> float:
    return resident_mib("Rss") - anonymous_mib()


def load(model: str, how: Mapping[str, Any]) -> dict[str, float]:
    """In this process: MiB added when the load is done, and at its peak; and of files, when it is done."""
    from neuronserve.neuron_worker.device import registry
    from neuronserve.neuron_worker.device.base import DeviceOptions

    device = registry.create("cpu", None)
    options = DeviceOptions(16, 2048, 32, 16, **how)
    before, file_before = anonymous_mib(), file_mib()
    peak, is_loaded = [before], threading.Event()

    def watch() -> None:
        while not is_loaded.is_set():
            peak[0] = max(peak[0], anonymous_mib())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    device.load(model, options)
    is_loaded.set()
    watcher.join()
    after, file_after = anonymous_mib(), file_mib()
    device.close()
    return {"after": after - before, "peak": max(peak[0], after) - before, "file": file_after - file_before}


def in_a_process(model: str, label: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", model, "--load", label]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def judge(what: str, ratio: float, rounds: int) -> str:
    return f"{verdict(ratio <= BAR, is_whole=rounds >= LOADS)} bar 6, {what} / float32 {ratio:.2f} (bar {BAR})"


def num_weights(model: str) -> int:
    """Of the products, which the device packs; rows to look up stay in the file."""
    from neuronserve.neuron_worker.device.graph.spec import read_spec

    spec = read_spec(model)
    return spec.num_linear_parameters + spec.num_head_parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=LOADS)
    parser.add_argument("--load", choices=list(LABELS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    if arguments.load:
        print(json.dumps(load(model, LABELS[arguments.load])))
        return
    print(conditions())
    found: dict[str, list[dict[str, float]]] = {label: [] for label in LABELS}
    for _ in range(arguments.rounds):
        for label in LABELS:
            found[label].append(in_a_process(model, label))
    for label, loads in found.items():
        after, peak, file = (cell([one[name] for one in loads]) for name in ("after", "peak", "file"))
        print(f"{label}: {after} MiB anonymous after loading, {peak} at the peak; {file} of files")
    for label in list(LABELS)[1:]:
        for name in ("after", "peak"):
            mine, theirs = (statistics.median(one[name] for one in found[which]) for which in (label, "float32"))
            print(judge(f"{name}: {label}", mine / theirs, arguments.rounds))
            wide = num_weights(model) * 4 / 2**20
            print(f"     beside {wide:.0f} MiB, which is float32 in four bytes a weight: {mine / wide:.2f}")


if __name__ == "__main__":
    main()
