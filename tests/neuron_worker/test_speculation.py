"""Drafts through real vLLM on the arithmetic device: whatever is drafted, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import StructuredOutputsParams

from neuronserve.speculative.proposer import PromptLookup, Proposer

from .engine import Engine, expected, greedy
from .proposers import DRAFTS, NUM_DRAFTS, InStep, Oracle, drafter_of

Make = Callable[..., Engine]
Asked = Callable[[str], dict[str, Any]]

PROMPTS = [[3, 4], [50, 60, 20], list(range(3, 63)), [7] * 40, [9, 9]]

PROPOSERS: dict[str, Proposer] = {
    "right": Oracle(lambda length: NUM_DRAFTS),
    "wrong": Oracle(lambda length: 0),
    "mixed": Oracle(lambda length: length % (NUM_DRAFTS + 1)),
    "lookup": PromptLookup(1, 3),
    "draft_model": InStep(),
    "eagle": InStep(),
}


@pytest.fixture(scope="module")
def plain(make_engine: Make) -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def drafting(make_engine: Make, asked: Asked) -> dict[str, Engine]:
    return {name: make_engine(**asked(name)) for name in DRAFTS}


@pytest.fixture(scope="module")
def engine(make_engine: Make) -> Engine:
    figures = {"disable_log_stats": False, "per_request_spec_decode_metrics": "summary"}
    return make_engine(speculative_model="ngram", num_speculative_tokens=NUM_DRAFTS, **figures)


@pytest.fixture(params=PROPOSERS)
def fast(request: pytest.FixtureRequest, engine: Engine, drafting: dict[str, Engine]) -> Iterator[Engine]:
    """An engine with each proposer in turn, nothing cached."""
    engine = drafting.get(request.param, engine)
    drafter = drafter_of(engine)
    usual, drafter._proposer = drafter._proposer, PROPOSERS[request.param]
    engine.llm.reset_prefix_cache()
    yield engine
    drafter._proposer = usual


def use(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(drafter_of(engine), "_proposer", PROPOSERS[name])


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_each_of_a_batch_as_if_alone(fast: Engine) -> None:
    assert tokens_of(fast.generate(PROMPTS, greedy(30))) == [expected(prompt, 30) for prompt in PROMPTS]


def test_right_drafts_take_fewer_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(engine, monkeypatch, "right")
    engine.add("one", [3, 4], greedy(1 + 3 * 5))
    # The prompt's step gives the first token; each step after it four drafts and the token behind them.
    assert engine.schedules(4) == [{"one": 2}, {"one": 5}, {"one": 5}, {"one": 5}]
    assert engine.tokens["one"] == expected([3, 4], 16)
    engine.finish()


def test_no_more_is_drafted_than_the_request_may_still_say(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(engine, monkeypatch, "right")
    engine.add("one", [3, 4], greedy(4))
    assert engine.schedules(2) == [{"one": 2}, {"one": 3}]
    assert engine.reasons["one"] == "length"


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_joined_late(fast: Engine, steps: int) -> None:
    fast.add("first", [50, 51, 52], greedy(30))
    fast.step(steps)
    fast.add("late", [3, 4], greedy(12))
    fast.finish()
    assert fast.tokens["first"] == expected([50, 51, 52], 30)
    assert fast.tokens["late"] == expected([3, 4], 12)


def test_a_chunked_prompt_beside_drafts(fast: Engine) -> None:
    fast.add("decodes", [5, 6], greedy(40))
    fast.step(2)
    long = [(5 * i) % 60 + 3 for i in range(80)]
    fast.add("long", long, greedy(20))
    fast.finish()
    assert fast.tokens["decodes"] == expected([5, 6], 40)
    assert fast.tokens["long"] == expected(long, 20)


@pytest.mark.parametrize("proposer", ["lookup", *DRAFTS])
def test_drafts_take_nothing_from_a_chunk(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, asked: Asked, proposer: str
) -> None:
    engine = make_engine(**asked(proposer), options={"chunk_tokens": 16})
    use(engine, monkeypatch, "right")
    engine.add("decodes", [5, 6], greedy(30))
    engine.step(1)
    engine.add("long", list(range(3, 43)), greedy(2))
    assert engine.schedules(3) == [{"decodes": 5, "long": 16}, {"decodes": 5, "long": 16}, {"decodes": 5, "long": 8}]
    engine.finish()


def test_a_prefix_hit_on_drafted_text(fast: Engine) -> None:
    """The second request reads blocks in which rejected drafts once stood."""
    prompt = [(7 * i) % 60 + 3 for i in range(30)]
    first = fast.one(prompt, greedy(40))
    text = prompt + list(first.outputs[0].token_ids)
    again = fast.one([*text, 9], greedy(20))
    # Of 71 tokens, the last of them new; for EAGLE vLLM has the last block read again.
    assert again.num_cached_tokens == (48 if drafter_of(fast)._proposer is PROPOSERS["eagle"] else 64)
    assert tokens_of([again]) == [expected([*text, 9], 20)]


def test_up_to_the_last_position(fast: Engine) -> None:
    prompt = [(3 * i) % 60 + 3 for i in range(100)]
    output = fast.one(prompt, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert tokens_of([output]) == [expected(prompt, 28)]


def test_an_abort_between_draft_and_verification(fast: Engine) -> None:
    fast.add("stays", [5, 6, 7], greedy(30))
    fast.add("leaves", [8, 9], greedy(50))
    fast.step(3)
    fast.core.abort_request(["leaves"])
    fast.finish()
    assert fast.tokens["stays"] == expected([5, 6, 7], 30)
    fast.tokens_of([3], greedy(1))
    assert fast.worker.runner.state.num_requests == 1


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_preempted_with_drafts(make_engine: Make, monkeypatch: pytest.MonkeyPatch, asked: Asked, proposer: str) -> None:
    engine = make_engine(num_gpu_blocks_override=12, options={"chunk_tokens": 32}, **asked(proposer))
    use(engine, monkeypatch, proposer)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, greedy(40))
    most = 0
    while engine.core.has_unfinished_requests():
        engine.step()
        most = max([most, *(request.num_preemptions for request in engine.scheduler.requests.values())])
    assert most > 0, "the cache was large enough; the test tests nothing"
    assert [engine.tokens[str(index)] for index in range(len(PROMPTS))] == [expected(p, 40) for p in PROMPTS]


def test_prompts_and_decodes_apart(make_engine: Make) -> None:
    engine = make_engine(options={"backend": "arithmetic-slots"}, speculative_model="ngram", num_speculative_tokens=3)
    assert tokens_of(engine.generate(PROMPTS, greedy(20))) == [expected(prompt, 20) for prompt in PROMPTS]


def test_waves_of_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(engine, monkeypatch, "mixed")
    random = Random(5)
    waiting = [[random.randrange(3, 64) for _ in range(random.randint(1, 70))] for _ in range(25)]
    lengths = [random.randint(1, 40) for _ in waiting]
    for index, (prompt, length) in enumerate(zip(waiting, lengths, strict=True)):
        engine.add(f"wave {index}", prompt, greedy(length))
        engine.step(random.randint(0, 3))
    engine.finish()
    for index, (prompt, length) in enumerate(zip(waiting, lengths, strict=True)):
        assert engine.tokens[f"wave {index}"] == expected(prompt, length)


# -- the same tokens as the plain engine, where the tokens have no rule to work out


HOW: dict[str, dict[str, Any]] = {
    "on_device": {"temperature": 0.9, "seed": 5},
    "limits": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "seed": 6},
    "logprobs": {"temperature": 0.9, "seed": 7, "logprobs": 3},
    "greedy_logprobs": {"temperature": 0, "logprobs": 2},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    "seeded_penalties": {"temperature": 1.0, "seed": 8, "frequency_penalty": 0.9},
    "min_tokens": {"temperature": 0, "min_tokens": 12, "stop_token_ids": [20, 21, 22, 23, 24, 25], "ignore_eos": False},
    "allowed": {"temperature": 0.7, "seed": 9, "allowed_token_ids": list(range(10, 30))},
    "bad_words": {"temperature": 0, "bad_words": ["w20", "w21 w22"]},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2, "logprobs": 1},
    "tgi": {"temperature": 0.8, "seed": 10, "logprobs": 2, "extra_args": {"tgi": {"frequency_penalty": 0.5}}},
}


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """Everything of an answer but when it came."""
    return [
        (
            output.prompt_token_ids,
            list(output.outputs[0].token_ids),
            output.outputs[0].text,
            output.outputs[0].finish_reason,
            logprobs_of(output.outputs[0].logprobs),
            logprobs_of(output.prompt_logprobs),
        )
        for output in outputs
    ]


def logprobs_of(positions: Any) -> Any:
    return positions and [
        position and {token: (round(found.logprob, 5), found.rank) for token, found in position.items()}
        for position in positions
    ]


@pytest.mark.parametrize("how", HOW)
def test_the_answer_is_that_of_plain_decoding(fast: Engine, plain: Engine, how: str) -> None:
    params = SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **HOW[how]})
    assert seen(fast.generate(PROMPTS[:3], params)) == seen(plain.generate(PROMPTS[:3], params))


def test_all_ways_of_sampling_in_one_batch(fast: Engine, plain: Engine) -> None:
    params = [SamplingParams(**{"max_tokens": 25, "ignore_eos": True, **how}) for how in HOW.values()]
    prompts = [[3 + index, 4, 5] for index in range(len(params))]
    assert seen(fast.generate(prompts, params)) == seen(plain.generate(prompts, params))


@pytest.mark.parametrize("regex", ["(w20|w21)(w22|w23)(w24|w25)(w26|w27)(w20|w21)(w22|w23)", "(w14|w15)+w16"])
def test_a_grammar_holds_inside_a_draft(fast: Engine, plain: Engine, regex: str) -> None:
    grammar = StructuredOutputsParams(regex=regex)
    params = [greedy(12, structured_outputs=grammar, ignore_eos=False), greedy(12), greedy(12, logprobs=2)]
    assert seen(fast.generate(PROMPTS[:3], params)) == seen(plain.generate(PROMPTS[:3], params))


def test_drafts_that_the_grammar_allows_are_accepted(engine: Engine, plain: Engine) -> None:
    # The prompt holds the sentence, so looking it up drafts what the grammar wants.
    sentence = [20, 21, 22, 23, 24, 25]
    grammar = StructuredOutputsParams(regex="w20w21w22w23w24w25")
    params = greedy(12, structured_outputs=grammar, ignore_eos=False)
    before = sum(engine.worker.runner.counters.accepted_drafts.values())
    outputs = engine.generate([[*sentence, 9, 3]], params)
    assert seen(outputs) == seen(plain.generate([[*sentence, 9, 3]], params))
    assert list(outputs[0].outputs[0].token_ids)[:6] == sentence
    assert sum(engine.worker.runner.counters.accepted_drafts.values()) > before


def test_a_stop_string_inside_a_draft_ends_the_answer_there(fast: Engine, plain: Engine) -> None:
    words = [f"w{token}" for token in expected([3, 4], 30)]
    for position in (7, 8, 9, 10):
        params = greedy(30, stop=[words[position]])
        assert seen(fast.generate([[3, 4]], params)) == seen(plain.generate([[3, 4]], params))


@pytest.mark.parametrize("position", [6, 7, 8, 9])
def test_a_stop_token_inside_a_draft_ends_the_answer_there(fast: Engine, position: int) -> None:
    tokens = expected([50, 60, 20], 30)
    output = fast.one([50, 60, 20], greedy(30, stop_token_ids=[tokens[position]]))
    assert tokens_of([output]) == [tokens[: tokens.index(tokens[position]) + 1]]


# -- what is counted


def counted(engine: Engine) -> tuple[int, int, int, list[int]]:
    """(drafts, drafted tokens, accepted tokens, accepted by position), as vLLM publishes them."""
    found: dict[str, Any] = {metric.name: metric for metric in engine.llm.get_metrics()}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    values = [found[f"vllm:spec_decode_{name}"].value for name in names]
    return (*values, found["vllm:spec_decode_num_accepted_tokens_per_pos"].values)


def difference(after: tuple[Any, ...], before: tuple[Any, ...]) -> tuple[Any, ...]:
    *numbers, positions = (
        [x - y for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a - b
        for a, b in zip(after, before, strict=True)
    )
    return (*numbers, positions)


@pytest.mark.parametrize(
    ("proposer", "num_tokens", "counts"),
    [
        ("right", 11, (2, 8, 8, [2, 2, 2, 2])),
        # Each step after the prompt's gives one token. The last three can use 2, 1 and 0 drafts.
        ("wrong", 6, (4, 4 + 3 + 2 + 1, 0, [0, 0, 0, 0])),
    ],
)
def test_drafted_and_accepted_are_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, proposer: str, num_tokens: int, counts: tuple[Any, ...]
) -> None:
    use(engine, monkeypatch, proposer)
    before = counted(engine)
    engine.one([3, 4], greedy(num_tokens))
    assert difference(counted(engine), before) == counts


def test_placeholders_are_not_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with one token to compute joins a running one: vLLM pads it with a -1 for each draft it could have."""
    engine.llm.reset_prefix_cache()
    prompt = [(7 * i) % 60 + 3 for i in range(49)]
    engine.one(prompt, greedy(1))
    monkeypatch.setattr(drafter_of(engine), "_proposer", PROPOSERS["right"])
    monkeypatch.setattr(drafter_of(engine), "_num_tokens", 0)  # nobody drafts
    engine.add("runs", [3, 4], greedy(20))
    engine.step(3)
    before = counted(engine)
    engine.add("joins", prompt, greedy(6))
    assert engine.schedules(1) == [{"runs": 1, "joins": 1 + NUM_DRAFTS}]
    figures = [request.spec_decode_metrics for request in engine.scheduler.requests.values()]
    assert [each.histogram for each in figures if each is not None] == [[0] * (1 + NUM_DRAFTS)] * 2
    engine.finish()
    assert difference(counted(engine), before) == (0, 0, 0, [0, 0, 0, 0])
    assert engine.tokens["runs"] == expected([3, 4], 20)
    assert engine.tokens["joins"] == expected(prompt, 6)


@pytest.mark.parametrize("more", [{}, {"long_prefill_token_threshold": 3}], ids=["", "threshold"])
def test_the_smallest_chunk_lets_a_whole_prefix_hit_in(
    make_engine: Make, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Alone and behind another, with one token to compute: vLLM pads it to a row with all its drafts."""
    chunk = {"options": {"chunk_tokens": NUM_DRAFTS + 1}}
    engine = make_engine(speculative_model="ngram", num_speculative_tokens=NUM_DRAFTS, **chunk, **more)
    assert ("-threshold 3 holds no token and its drafts: raised to 5" in caplog.text) == bool(more)
    prompt = [(7 * i) % 60 + 3 for i in range(17)]
    for _ in range(2):
        engine.add("hit", prompt, greedy(6))
        engine.step(30)
        assert engine.tokens["hit"] == expected(prompt, 6)
    engine.add("runs", [3, 4], greedy(20))
    engine.step(3)
    engine.add("hit", prompt, greedy(6))
    engine.add("one", [5], greedy(6))
    engine.step(40)
    assert (engine.tokens["hit"], engine.tokens["one"]) == (expected(prompt, 6), expected([5], 6))


# -- what is not served


@pytest.mark.parametrize("parameter", [{"min_p": 0.1}, {"logit_bias": {5: 1.0}}])
def test_vllms_two_refusals_stand(engine: Engine, parameter: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="min_p and logit_bias sampling parameters are not yet supported"):
        engine.one([3, 4], SamplingParams(temperature=1.0, max_tokens=2, **parameter))


def test_without_speculation_nothing_drafts(plain: Engine) -> None:
    assert plain.worker.runner._drafter is None
    assert plain.worker.config.plan.decode_widths == (1,)
