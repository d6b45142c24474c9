"""The same tokens with the device in another process: by this interpreter, and by one that has no server.

The tests of `test_smollm2`, every one and unchanged. By default they run on one engine by this interpreter; with
`--full` on all engines of that module by this interpreter, and on one by the bare interpreter, which has numpy, torch
and what torch imports, and differs in no shape. One request at a time, the longest of them, goes through the one engine
in both: such steps differ between engines in their blocks' numbers alone, which the other tests take across. What the
bare one lacks is looked at either way, and it answers three short prompts for each of the CPU's two backends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..tools.bare_python import MUST_BE_ABSENT, NEEDED, bare_python, importable
from ..tools.prompts import Prompt
from . import test_smollm2
from .conftest import greedy
from .test_smollm2 import (  # noqa: F401  (collected here, on this module's engine)
    ENGINES,
    cold,
    test_a_longer_prompt_continues_a_cached_one,
    test_alone,
    test_chunks_are_cut,
    test_eight_at_once,
    test_joined_late,
    test_prefix_hit,
)

if TYPE_CHECKING:
    from ..tools.engine import Engine
    from ..tools.reference import Reference

SHORT = "block_16_tiny_cache"
NOT_ALONE = tuple(f"{name}-this" for name in ENGINES if name != SHORT)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    return bare_python(tmp_path_factory.mktemp("bare"))


def places() -> Iterator[Any]:
    for name, which in [*((name, "this") for name in ENGINES), (SHORT, "bare")]:
        is_short = (name, which) == (SHORT, "this")
        yield pytest.param((name, which), id=f"{name}-{which}", marks=() if is_short else pytest.mark.full)


@pytest.fixture(scope="module", params=places())
def engine(request: pytest.FixtureRequest, running: Callable[..., Any], bare: str) -> Iterator[Engine]:
    name, which = request.param
    arguments = dict(ENGINES[name])
    python = sys.executable if which == "this" else bare
    options = {**arguments.pop("options", {}), "device_python": python}
    with running(**arguments, options=options) as engine:
        yield engine


def test_no_test_of_the_other_module_is_missing_here() -> None:
    assert {name for name in vars(test_smollm2) if name.startswith("test_")} <= globals().keys()


def test_the_bare_interpreter_has_no_server(bare: str) -> None:
    assert importable(bare, NEEDED) == list(NEEDED)
    assert importable(bare, MUST_BE_ABSENT) == []
    assert set(importable(sys.executable, MUST_BE_ABSENT)) >= {"vllm", "transformers", "neuronserve"}


@pytest.mark.parametrize("backend", ["cpu", "cpu-torch"])
def test_numpy_and_torch_are_all_a_device_needs(
    bare: str, backend: str, running: Callable[..., Any], prompts: list[Prompt], reference: Reference
) -> None:
    asked = [prompt.tokens for prompt in sorted(prompts, key=lambda prompt: len(prompt.tokens))[:3]]
    with running(options={"backend": backend, "device_python": bare}, max_num_seqs=4, max_model_len=256) as engine:
        answers = engine.run(asked, greedy(8), at_once=3)
        assert Path(engine.llm.collective_rpc(lambda worker: worker.backend.device_python)[0]) == Path(bare)
    assert all(len(answer) == 8 for answer in answers)
    reference.check(zip(asked, answers, strict=True))
