"""Int8: not transformers' tokens, but the same tokens alone and in any company.

What int8 products must be, number for number: `tests/device/cpu/test_dot.py`, `tests/device/test_weight_types.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ..tools.prompts import Prompt
from .conftest import greedy
from .test_speculation import NUM_DRAFTS, SHIPPED, drafted_and_kept

if TYPE_CHECKING:
    from ..tools.engine import Engine
    from ..tools.reference import Reference


FULL = pytest.mark.full
FORMS: dict[str, dict[str, object]] = {
    "weights": {"activations": "float32"},
    "weights_and_activations": {},
    "all_and_head": {"quantize_head": True},
}


@pytest.fixture(scope="module", params=["weights", "all_and_head", pytest.param("weights_and_activations", marks=FULL)])
def engine(request: pytest.FixtureRequest, running: Callable[..., Any]) -> Iterator[Engine]:
    options = {"quantization": "int8", **FORMS[request.param]}
    with running(options=options, enable_prefix_caching=False) as engine:
        yield engine


def test_a_row_depends_on_no_other(engine: Engine, prompts: list[Prompt], num_tokens: int) -> None:
    prompts = prompts[:8]
    alone = engine.run([prompt.tokens for prompt in prompts], greedy(num_tokens), at_once=1)
    together = engine.run([prompt.tokens for prompt in prompts], greedy(num_tokens), at_once=8)
    for prompt in reversed(prompts):
        engine.add(prompt.id, prompt.tokens, greedy(num_tokens))
        engine.step(3)
    engine.finish()
    late = [engine.tokens[prompt.id] for prompt in prompts]

    assert together == alone
    assert late == alone


def test_it_is_still_the_model(engine: Engine, prompts: list[Prompt], reference: Reference) -> None:
    """Rounded weights move few greedy choices: of the first tokens most are transformers' own."""
    answers = engine.run([prompt.tokens for prompt in prompts], greedy(1), at_once=8)
    theirs = [reference.first_token(prompt.tokens) for prompt in prompts]
    same = sum(ours == [token] for ours, token in zip(answers, theirs, strict=True))
    assert same >= 0.8 * len(prompts)


@pytest.mark.parametrize("who", ["ngram", "head"])
def test_drafts_change_no_token(who: str, running: Callable[..., Any], prompts: list[Prompt], num_tokens: int) -> None:
    model = str(SHIPPED) if who == "head" else who
    options = {"quantization": "int8", "adaptive_depth": False}
    asked, answers = [prompt.tokens for prompt in prompts[:8]], []
    for drafts in ({}, {"speculative_model": model, "num_speculative_tokens": NUM_DRAFTS}):
        with running(options=options, **drafts) as engine:
            answers.append(engine.run(asked, greedy(num_tokens), at_once=8))
            assert (drafted_and_kept(engine)[1] > 0) == bool(drafts)
    assert answers[0] == answers[1]
