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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="runs with --full (make test-full)"))


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
