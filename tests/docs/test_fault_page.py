"""The page of faults has the words of the script that writes it, and a row for every fault that is injected."""

from __future__ import annotations

from types import ModuleType

import pytest

from ..tools.faults import CASES
from .scripts import load


@pytest.fixture
def script() -> ModuleType:
    return load("fault_table")


def test_the_page_has_todays_words_and_a_row_for_every_case(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert page.startswith(script.INTRODUCTION), "run: python scripts/fault_table.py --write"
    assert page.endswith(script.REMARKS), "run: python scripts/fault_table.py --write"
    rows = page.removeprefix(script.INTRODUCTION).removesuffix(script.REMARKS).splitlines()
    named = [tuple(row.strip("| ").split(" | ")[:2]) for row in rows]
    assert named == [*((case.fault, case.phase) for case in CASES), ("kill -9, and no restart works", "decode")]
