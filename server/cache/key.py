"""What decides an artifact, as one value, and the name that follows from it.

    ArtifactKey ── name ──▶ 32 hexadecimal digits         the same key has the same name, on every machine
                ── differences(other) ──▶ which fields differ, and how

A field that changes what is compiled belongs here; one that does not would only cause misses. Knows no file system.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

KINDS = ("compiled graphs", "packed weights")
NAME_DIGITS = 32


ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One field of two keys, nested fields by their dotted name; ABSENT where one of them has none of that name."""

    field: str
    wanted: object
    found: object

    def __str__(self) -> str:
        return f"{self.field} is {_shown(self.wanted)} here and {_shown(self.found)} there"


@dataclass(frozen=True)
class ArtifactKey:
    """Everything that changes the artifact. Values are JSON; made by whoever knows the device."""

    backend: str
    model: Mapping[str, Any]  # config.json, without what no artifact depends on
    shapes: tuple[str, ...]  # the plan's, in words
    max_num_seqs: int
    max_model_len: int
    block_size: int
    dtype: str
    quantization: str | None
    quantize_head: bool
    sampling: str
    tensor_parallel_size: int
    neuron_config: Mapping[str, Any]  # overrides
    compiler: str  # name and version
    compiler_flags: tuple[str, ...]
    libraries: Mapping[str, str]  # distribution -> version
    kind: str = KINDS[0]
    weights: str | None = None  # digest or revision; None: other weights of the same configuration give the same
    draft: Mapping[str, Any] | None = None  # the draft's config.json, where graphs hold one
    isa: str | None = None  # instruction set that weights are packed for
    more: Mapping[str, Any] = field(default_factory=dict)  # of a backend, where the fields above say too little

    @property
    def name(self) -> str:
        return hashlib.sha256(canonical(asdict(self))).hexdigest()[:NAME_DIGITS]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(canonical(asdict(self)))
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ArtifactKey:
        """Raises TypeError where fields are missing or unknown."""
        lists = {name: tuple(values[name]) for name in ("shapes", "compiler_flags") if name in values}
        return cls(**{**values, **lists})

    def differences(self, other: ArtifactKey) -> tuple[Difference, ...]:
        """Between this key, which is wanted, and one that was found; in the order of the fields."""
        mine, theirs = dict(_flat(self.to_json())), dict(_flat(other.to_json()))
        order = {each.name: place for place, each in enumerate(fields(self))}
        names = sorted({*mine, *theirs}, key=lambda name: (order[name.partition(".")[0]], name))
        found = (Difference(name, mine.get(name, ABSENT), theirs.get(name, ABSENT)) for name in names)
        return tuple(each for each in found if _shown(each.wanted) != _shown(each.found))


def canonical(value: object) -> bytes:
    """One spelling of equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if value and isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _shown(value: object) -> str:
    if value is ABSENT:
        return "absent"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
