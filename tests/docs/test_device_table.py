"""The README's table of devices says what their capabilities say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_table", ROOT / "scripts" / "device_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_todays_table(script: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == script.written(readme), "run: python scripts/device_table.py --write"


def test_another_table_in_the_readme_would_be_replaced(script: ModuleType) -> None:
    old = f"before\n{script.BEGIN}| old |\n{script.END}after\n"
    assert script.written(old) == f"before\n{script.BEGIN}{script.table()}{script.END}after\n"


def test_every_device_that_is_built_is_in_it(script: ModuleType) -> None:
    head = script.table().splitlines()[0]
    assert all(f"`{name}`" in head for name in ("cpu", "transformers-neuronx"))
