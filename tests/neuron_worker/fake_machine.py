"""Machines made of a few files: what the kernel shows of Neuron devices, below a directory of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def make_machine(
    root: Path,
    num_devices: int,
    *,
    driver: str | None = "2.21",
    instance: str | None = None,
    others: Sequence[str] = (),
    modules: Sequence[str] = ("loop",),
) -> Path:
    """A tree with what the kernel of such a machine shows. `others`: names in /dev; `modules`: the
    kernel's other modules."""
    for name in (*(f"neuron{number}" for number in range(num_devices)), *others):
        _write(root / "dev" / name)
    for name in modules:
        _write(root / "sys/module" / name / "version", "1")
    if driver is not None:
        _write(root / "sys/module/neuron/version", f"{driver}\n")
    if instance is not None:
        _write(root / "sys/devices/virtual/dmi/id/product_name", f"{instance}\n")
    return root


def _write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
