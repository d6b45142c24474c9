"""The device side keeps to what old interpreters and old libraries have: an SDK brings its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .old_enough import NEWER_PYTHON, NUMPY, OTHER_METHODS, TENSOR_METHODS, TORCH

DEVICE = Path(__file__).resolve().parents[2] / "neuron_worker" / "device"
SOURCES = sorted(DEVICE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(), feature_version=(3, 10)) for path in SOURCES}


def names(tree: ast.Module) -> Iterator[str]:
    """Full dotted names of what a file takes from imported modules; an alias counts as what it stands for."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                known[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.insert(0, inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in known:
                yield ".".join([known[inner.id], *parts])


def taken(library: str) -> dict[str, str]:
    """Name below `library` -> a file that uses it."""
    used = ((name, path.name) for path, tree in TREES.items() for name in names(tree))
    return {name.removeprefix(library + "."): file for name, file in used if name.startswith(library + ".")}


def tensor_methods() -> dict[str, str]:
    """Calls of a name that tensors have, in the files that import torch -> the file."""
    found: dict[str, str] = {}
    for path, tree in TREES.items():
        if not any(name.split(".")[0] == "torch" for name in names(tree)):
            continue
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        methods = [func for func in calls if isinstance(func, ast.Attribute) and hasattr(torch.Tensor, func.attr)]
        found |= {func.attr: path.name for func in methods if not isinstance(func.value, ast.Constant)}
    return found


@pytest.mark.parametrize(("library", "known"), [("torch", TORCH), ("numpy", NUMPY)])
def test_only_what_old_libraries_have(library: str, known: frozenset[str]) -> None:
    new = {name: file for name, file in taken(library).items() if name not in known}
    assert not new, f"not in tests/device/old_enough.py: look up the release that brought them: {new}"


@pytest.mark.parametrize(("library", "known"), [("torch", TORCH), ("numpy", NUMPY)])
def test_the_list_has_nothing_that_is_not_used(library: str, known: frozenset[str]) -> None:
    used = set(taken(library))
    used |= {name.rsplit(".", 1)[0] for name in used if "." in name}
    assert known <= used


def test_only_old_methods_of_tensors() -> None:
    new = {name: file for name, file in tensor_methods().items() if name not in TENSOR_METHODS | OTHER_METHODS | TORCH}
    assert not new, f"not in tests/device/old_enough.py: look up the release that brought them: {new}"


def test_nothing_of_the_standard_library_is_later_than_3_10() -> None:
    found = {name: path.name for path, tree in TREES.items() for name in names(tree) if name in NEWER_PYTHON}
    assert not found


def test_annotations_are_never_evaluated() -> None:
    """Python 3.10 cannot evaluate some that newer ones can."""
    for path, tree in TREES.items():
        if any(isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation for node in ast.walk(tree)):
            assert "__future__.annotations" in set(names(tree)), path


@pytest.mark.parametrize(
    "source", ["try:\n    pass\nexcept* ValueError:\n    pass\n", "def first[T](x: T) -> T:\n    return x\n"]
)
def test_newer_syntax_is_noticed(source: str) -> None:
    with pytest.raises(SyntaxError):
        ast.parse(source, feature_version=(3, 10))


def test_newer_names_are_noticed() -> None:
    tree = ast.parse(
        "import torch.nn.functional as F\nfrom enum import StrEnum\nimport numpy as np\nF.rms_norm(np.vecdot)"
    )
    assert {"torch.nn.functional.rms_norm", "enum.StrEnum", "numpy.vecdot"} <= set(names(tree))
