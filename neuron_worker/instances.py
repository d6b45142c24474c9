"""Which instances have Neuron chips, and what drives them: for `neuronserve doctor` and the README. Data alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Instances:
    """Instances of one family and the newest SDK with which a backend of ours drives them."""

    family: str
    cores: str  # instance sizes -> NeuronCores
    backend: str
    sdk: str
    torch: str
    python: str
    packages: str | None  # for pip, with the SDK's index; None: as the SDK's own guide installs it
    image: str | None


SDK_INDEX = "https://pip.repos.neuron.amazonaws.com"
"""Where the SDK's Python packages are."""

_IMAGES = "public.ecr.aws/neuron/pytorch-inference-neuronx"
_INF2 = "inf2.xlarge 2, .8xlarge 2, .24xlarge 12, .48xlarge 24"
_TRN1 = "trn1.2xlarge 2, .32xlarge 32, trn1n.32xlarge 32"

_TRN2 = "trn2.48xlarge 64, of two physical ones each (LNC 2)"
_TRN3 = "8 physical ones on a chip, grouped by LNC"

_CLASSIC = tuple(
    Instances(family, cores, backend, sdk, torch, python, packages, image)
    for family, cores in (("inf2", _INF2), ("trn1", _TRN1))
    for backend, sdk, torch, python, packages, image in (
        ("transformers-neuronx", "2.25", "2.7", "3.10", "transformers-neuronx", f"{_IMAGES}, a tag of sdk2.25"),
        ("torch-neuronx", "2.31", "2.9", "3.10+", "torch-neuronx==2.9.* neuronx-cc", f"{_IMAGES}, a tag of sdk2.31"),
    )
)
_TORCHNEURON = tuple(
    Instances(family, cores, "torch-neuronx", "2.33", "2.13", "3.12+", None, None)
    for family, cores in (("trn2", _TRN2), ("trn3", _TRN3))
)
TABLE = (*_CLASSIC, *_TORCHNEURON)


def install_line(packages: str) -> str:
    return f"pip install {packages} --extra-index-url {SDK_INDEX}"


def lines(built: Collection[str]) -> list[str]:
    """The table for a terminal, and the commands it comes down to. `built`: the backends of this version."""
    heads = ("family", "backend", "SDK", "torch", "Python", "instance and cores")
    rows = [heads, *(_cells(row, built) for row in TABLE)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    by_backend = {(row.backend, row.sdk): row for row in TABLE}.values()
    how = [f"{row.backend}, SDK {row.sdk}: {install_line(row.packages)}" for row in by_backend if row.packages]
    images = [f"{row.backend}, SDK {row.sdk}: image {row.image}" for row in by_backend if row.image]
    return [
        *table,
        "",
        "in an environment of its own (the SDK's torch is older than vLLM's), named in NEURONSERVE_DEVICE_PYTHON:",
        *how,
        *images,
        "on the host: the driver, aws-neuronx-dkms; in the environment: the runtime, aws-neuronx-runtime-lib",
        "Trn2, Trn3: torch-neuronx is TorchNeuron, installed as the SDK's own guide says; nothing of ours ran there,",
        "and one core is used. Inf1 is not served",
    ]


def _cells(row: Instances, built: Collection[str]) -> tuple[str, ...]:
    backend = row.backend if row.backend in built else f"{row.backend} (not in this version)"
    return (row.family, backend, row.sdk, row.torch, row.python, row.cores)
