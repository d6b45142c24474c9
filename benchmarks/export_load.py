"""How long the device takes to load an export, beside the checkpoint it was made from.

    python benchmarks/export_load.py [--rounds 5] [--model DIR]

The load alone, on the cpu device: from the directory to weights the kernels can read, the export's checksums included.
A process of its own for every load; A B A B, medians. Both read from the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import conditions, demo_model

BAR = 2.0
FORMS = (("float32", None), ("bfloat16", None), ("float32", "int8"))

LOAD = """
import sys, time
from neuronserve.neuron_worker.device.base import DeviceOptions
from neuronserve.neuron_worker.device.cpu.device import CpuDevice
from neuronserve.neuron_worker.device.cpu.library import load
directory, dtype, quantization = sys.argv[1:]
load()  # the library itself is the same for both
options = DeviceOptions(4, 1024, 16, 4, dtype=dtype, quantization=quantization or None, activations="int8")
begin = time.perf_counter()
CpuDevice().load(directory, options)
print(time.perf_counter() - begin)
"""

CASTS = {"float32": "fp32", "bfloat16": "bf16"}


def seconds(directory: str, dtype: str, quantization: str | None) -> float:
    command = [sys.executable, "-c", LOAD, directory, dtype, quantization or ""]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def export(model: str, output: Path, dtype: str, quantization: str | None) -> None:
    command = [sys.executable, "-m", "neuronserve.server.cli", "export", model, str(output), "--batch-size", "4"]
    command += ["--sequence-length", "1024", "--auto-cast-type", CASTS[dtype]]
    subprocess.run([*command, *(["--quant", "s8"] if quantization else [])], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = str(arguments.model or demo_model())
    print(conditions())
    for dtype, quantization in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "export"
            export(model, output, dtype, quantization)
            found: dict[str, list[float]] = {"checkpoint": [], "export": []}
            for _ in range(arguments.rounds):
                found["checkpoint"].append(seconds(model, dtype, quantization))
                found["export"].append(seconds(str(output), dtype, quantization))
        median = {name: statistics.median(values) for name, values in found.items()}
        ratio = median["checkpoint"] / median["export"]
        spread = ", ".join(f"{name} {median[name]:.2f} s ({min(v):.2f}-{max(v):.2f})" for name, v in found.items())
        form = f"{dtype}{f', {quantization}' if quantization else ''}"
        print(f"{'ok  ' if ratio >= BAR else 'MISS'} {form}: {spread}: {ratio:.1f} x (bar {BAR})")


if __name__ == "__main__":
    main()
