"""This machine's own floor: `python benchmarks/floor.py` measures it by a small C program, on all cores.

A step can be no faster than its bytes at the read bandwidth, nor than its operations at the peak; every table of
speeds prints both, measured in the same run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

NATIVE, AVX2 = ("-march=native",), ("-mavx2", "-mfma")
SOURCE = Path(__file__).resolve().with_suffix(".c")


@dataclass(frozen=True)
class Floor:
    bytes_per_second: float
    float_ops: float  # per second; a multiply-add is two
    int8_ops: float  # the same of 8-bit dot products; 0: this processor has none that are measured

    def __str__(self) -> str:
        int8 = f"{self.int8_ops / 1e9:.0f} G operations/s in 8-bit dot products" if self.int8_ops else "no 8-bit dots"
        return (
            f"floor: reads {self.bytes_per_second / 1e9:.1f} GB/s, "
            f"{self.float_ops / 1e9:.0f} G operations/s in float32, {int8}"
        )

    def compute_seconds(self, operations: float, *, is_int8: bool) -> float:
        """The least so many operations take."""
        return operations / (self.int8_ops if is_int8 and self.int8_ops else self.float_ops)


def measure(options: Sequence[str] = NATIVE) -> Floor | None:
    """None: there is no C compiler. `options`: the compiler's, for the instructions of the machine."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "floor")
        command = [compiler, "-O3", *options, "-pthread", str(SOURCE), "-o", program]
        subprocess.run(command, check=True)
        cores = len(os.sched_getaffinity(0))
        text = subprocess.run([program, str(cores)], check=True, stdout=subprocess.PIPE, text=True).stdout
    return Floor(*map(float, text.split()))


def slower(before: Floor | None, after: Floor | None) -> Floor | None:
    """Of each figure what the machine did in the slower of two measurements: it changes its speed by the minute."""
    if before is None or after is None:
        return None
    return Floor(*map(min, astuple(before), astuple(after)))


if __name__ == "__main__":
    print(measure() or "floor: no C compiler found")
