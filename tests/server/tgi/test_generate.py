"""Answers out of an engine that says what the test tells it to; its outputs are vLLM's own classes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from neuronserve.server.tgi import answers
from neuronserve.server.tgi.errors import TgiError
from neuronserve.server.tgi.following import LOWEST, Step
from neuronserve.server.tgi.generate import Clock, Generator
from neuronserve.server.tgi.schemas import GenerateParameters
from neuronserve.server.tgi.tokens import Vocabulary
from neuronserve.server.tgi.translate import Job, Offers


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(smollm2))


def said(*ids: int, reason: str | None = None, logprob: float = -1.0) -> RequestOutput:
    scores = [{id: Logprob(logprob, 1)} for id in ids]
    part = CompletionOutput(0, "", list(ids), None, scores, finish_reason=reason)
    return RequestOutput("r", None, [1], None, [part], finished=reason is not None)


class Engine:
    """Each request gets the next of `scripts`: outputs, and perhaps an error. Notes who closed it early."""

    def __init__(self, *scripts: Sequence[RequestOutput | Exception]) -> None:
        self.scripts = list(scripts)
        self.closed = 0

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        try:
            for output in self.scripts.pop(0):
                await asyncio.sleep(0)
                if isinstance(output, Exception):
                    raise output
                yield output
        except (GeneratorExit, asyncio.CancelledError):
            self.closed += 1
            raise


def job(streaming: bool = True, max_new_tokens: int = 9, **asked: Any) -> Job:
    parameters = GenerateParameters.model_validate(asked)
    return Job("text", (1, 2, 3), parameters, max_new_tokens, grammar=None, streaming=streaming)


def steps(engine: Any, vocabulary: Vocabulary, asked: Job) -> list[Step]:
    async def run() -> list[Step]:
        generator = Generator(engine, vocabulary, Offers())
        async with aclosing(generator.steps(asked, Clock(), None)) as coming:
            return [step async for step in coming]

    return asyncio.run(run())


def ids(found: list[Step]) -> list[int]:
    return [step.token.id for step in found]


def test_several_tokens_at_once_are_several_steps(vocabulary: Vocabulary) -> None:
    found = steps(Engine([said(56), said(504, 1573, reason="length")]), vocabulary, job())
    assert ids(found) == [56, 504, 1573]
    assert [step.ending is None for step in found] == [True, True, False]


@pytest.mark.parametrize(
    ("asked", "expected", "reason"),
    [
        ({"stop": [" old"]}, [504, 1573], "stop_sequence"),
        ({"max_new_tokens": 1}, [504], "length"),
        ({}, [504, 1573, 504], "eos_token"),
        ({"max_new_tokens": 3}, [504, 1573, 504], "length"),  # before the end of text
    ],
)
def test_where_it_ends(vocabulary: Vocabulary, asked: dict[str, Any], expected: list[int], reason: str) -> None:
    """Nothing behind the end is shown, and an engine that would go on is told at once."""
    engine = Engine([said(504, 1573), said(504, reason="stop")])
    found = steps(engine, vocabulary, job(**asked))
    assert ids(found) == expected
    ending = found[-1].ending
    assert ending is not None
    assert ending.finish_reason == reason
    assert engine.closed == (len(expected) < 3)


@pytest.mark.parametrize(
    ("last", "status", "message"),
    [
        (VLLMValidationError("no", parameter="p"), 422, "Input validation error: no"),
        (ValueError("no"), 422, "Input validation error: no"),
        (QueueOverflowError(), 429, "Model is overloaded"),
        (EngineDeadError(), 424, "Request failed during generation: EngineCore encountered an issue."),
        (said(reason="error"), 424, "Request failed during generation: "),
        (said(reason="abort"), 500, "Incomplete generation"),
    ],
)
def test_what_goes_wrong(vocabulary: Vocabulary, last: Any, status: int, message: str) -> None:
    with pytest.raises(TgiError) as failed:
        steps(Engine([said(56), last]), vocabulary, job())
    assert failed.value.status == status
    assert str(failed.value).startswith(message)


def test_json_has_no_infinity(vocabulary: Vocabulary) -> None:
    (step,) = steps(Engine([said(56, reason="length", logprob=-math.inf)]), vocabulary, job(top_n_tokens=2))
    assert step.token.logprob == LOWEST
    assert step.top_tokens == []


def test_tokens_that_tie_with_the_last_are_top_tokens_too(vocabulary: Vocabulary) -> None:
    scores = {1: -0.5, 2: -1.0, 3: -1.0, 4: -1.0, 5: -2.0, 6: -math.inf}
    part = CompletionOutput(
        0, "", [5], None, [{id: Logprob(logprob, 1) for id, logprob in scores.items()}], finish_reason="length"
    )
    said_scores = RequestOutput("r", None, [1], None, [part], finished=True)
    num_tops = {}
    for num in (0, 1, 2, 5):
        (step,) = steps(Engine([said_scores]), vocabulary, job(top_n_tokens=num))
        num_tops[num] = [token.id for token in step.top_tokens]
    assert num_tops == {0: [], 1: [1], 2: [1, 2, 3, 4], 5: [1, 2, 3, 4, 5]}


def best(engine: Any, vocabulary: Vocabulary, asked: Job) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        found = await Generator(engine, vocabulary, Offers()).answers(asked, Clock(), None)
        return answers.whole(asked, found, full_text=False)

    return asyncio.run(run())


TWO = {"best_of": 2, "do_sample": True, "details": True}


def test_the_likeliest_of_several_is_the_answer(vocabulary: Vocabulary) -> None:
    """By the mean of its tokens' scores: a long answer is not worse for being long."""
    short, long = [said(56, reason="stop", logprob=-2.0)], [said(504), said(1573), said(504, reason="stop")]
    answer = best(Engine(short, long), vocabulary, job(streaming=False, **TWO))
    assert answer["generated_text"] == "The oldThe"
    assert [other["generated_text"] for other in answer["details"]["best_of_sequences"]] == ["H"]


@pytest.mark.parametrize("error", [VLLMValidationError("no"), EngineDeadError()])
def test_one_that_fails_ends_the_others(vocabulary: Vocabulary, error: Exception) -> None:
    engine = Engine([said(56), error], [said(56)] * 50)
    with pytest.raises(TgiError):
        best(engine, vocabulary, job(streaming=False, max_new_tokens=99, **TWO))
    assert engine.closed == 1
