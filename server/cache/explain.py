"""A miss in words: how many entries there are, and by which fields of the key the nearest one differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .key import ArtifactKey, Difference
from .manifest import Manifest


@dataclass(frozen=True)
class Nearest:
    manifest: Manifest
    differences: tuple[Difference, ...]


def nearest(key: ArtifactKey, manifests: Sequence[Manifest]) -> Nearest | None:
    """The entry with the fewest differing fields, counted at the key's top level first; the newest of several."""
    found = [Nearest(each, key.differences(each.key)) for each in manifests]
    # A list of differing fields is short only if it is about the same model: that counts before everything.
    return min(
        found,
        key=lambda each: (
            len({difference.field.partition(".")[0] for difference in each.differences}),
            len(each.differences),
            -each.manifest.made.timestamp(),
            each.manifest.name,
        ),
        default=None,
    )


def miss(key: ArtifactKey, where: str, manifests: Sequence[Manifest], damages: Sequence[str] = ()) -> str:
    """One line. `damages`: what is wrong with the key's own entry, where there is one."""
    if damages:
        return f"no compiled graphs for this configuration ({key.name}) in {where}: its entry is damaged ({damages[0]})"
    closest = nearest(key, manifests)
    if closest is None:
        return f"no compiled graphs for this configuration ({key.name}): {where} holds no entry"
    model = closest.manifest.about.get("model", "a model of no name")
    said = "; ".join(str(difference) for difference in closest.differences)
    return (
        f"no compiled graphs for this configuration ({key.name}) among {_count(manifests)} in {where}; the nearest, "
        f"{closest.manifest.name} of {model}, differs: {said}"
    )


def _count(manifests: Sequence[Manifest]) -> str:
    return f"{len(manifests)} entries" if len(manifests) != 1 else "1 entry"
