"""What the whole suite shares: the `--full` switch, the demo model's directory, and the judge of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from .tools.reference import Reference


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="full counts, and the tests marked `full`")
    parser.addoption("--cases", type=int, help="requests that the TGI routes are tried with; 500, with --full 2000")


OWN_SERVERS = (
    "test_classic_guide.py",
    "test_faults.py",
    "test_launcher.py",
    "test_speculation.py",
    "test_start_errors.py",
    "test_tgi_launched.py",
)
"""Of `e2e`: they start servers of their own. The others share those of the session and so run in one process, as each
start costs half a minute."""

FIRST = ("e2e", "test_lint.py", "test_faults.py", "test_smollm2.py", "test_start_and_stop.py", "test_verify.py")
"""Begun first, so that nothing long is left for the end."""


BY_ENGINE = ("test_remote.py", "test_smollm2.py", "test_speculation.py")
"""Of `exactness`: a test is of one engine, which its parameters name, and engines need not wait for each other."""


def _group(nodeid: str) -> str:
    """Tests of one group run in one process, and share what a module or a session sets up."""
    path, _, test = nodeid.partition("::")
    folder, _, name = path.rpartition("/")
    if folder.endswith("/e2e") and name not in OWN_SERVERS:
        return "e2e"
    _, bracket, engine = test.partition("[")
    return path + bracket + engine if folder.endswith("/exactness") and name in BY_ENGINE else path


def _place(item: pytest.Item) -> int:
    name = _group(item.nodeid).partition("[")[0].rsplit("/")[-1]
    return FIRST.index(name) if name in FIRST else len(FIRST)


class ByGroup(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByGroup:
    return ByGroup(config, log)  # type: ignore[arg-type]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
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
def cases(request: pytest.FixtureRequest, full: bool) -> int:
    return int(request.config.getoption("--cases") or (2000 if full else 500))


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
