"""What the whole suite shares: the `--full` switch, the demo model's directory, and the judge of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .tools.reference import Reference


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="full counts, and the tests marked `full`")
    parser.addoption("--cases", type=int, default=2000, help="requests that the TGI routes are tried with")


SERVERS = ("server", "tgi_server")
"""Fixtures of a whole session. Their tests run in one process, as each start costs half a minute."""

FIRST = ("servers", "test_lint.py", "test_faults.py", "test_smollm2.py", "test_start_and_stop.py")
"""Begun first, so that nothing long is left for the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _place(groups[item]))
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="runs with --full (make test-full)"))


def _group(item: pytest.Item) -> str:
    """Tests of one group share a process, and so what a module or a session sets up."""
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    if any(definitions[name][-1].scope == "session" for name in SERVERS if name in definitions):
        return "servers"
    return item.nodeid.split("::")[0].removeprefix("tests/")


def _place(group: str) -> int:
    name = group.rsplit("/")[-1]
    return FIRST.index(name) if name in FIRST else len(FIRST)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the full counts are asked for; a test with a fixed subset reads it."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def cases(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--cases"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's Hugging Face directory, converted once into the user's cache."""
    from neuronserve.server.demo_model import demo_model

    return demo_model()


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    """transformers' view of the demo model; what one test had it compute, the next one finds."""
    from .tools.reference import Reference

    return Reference(smollm2)
