"""A draft on the arithmetic device through real vLLM: it reads everything, drafts where it is of use, and may fail.

`InStep` looks at every draft: one token that the device's draft did not read, or read at a wrong place, shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, repeat
from typing import Any

import pytest
from vllm import SamplingParams

from neuronserve.bucketing.plan import Plan
from neuronserve.bucketing.split import Part
from neuronserve.neuron_worker import runner
from neuronserve.neuron_worker.device.arithmetic import ArithmeticDevice
from neuronserve.neuron_worker.device.errors import DeviceError, DeviceLost
from neuronserve.neuron_worker.look_ahead import Call
from neuronserve.speculative.depth import Offer
from neuronserve.speculative.proposer import DeviceDraft, LookupFirst, PromptLookup

from .engine import Engine, expected, greedy, note_pauses
from .proposers import NUM_DRAFTS, InStep, InTurns, Oracle, drafter_of, guesses
from .test_speculation import counted, difference

Make = Callable[..., Engine]
Asked = Callable[[str], dict[str, Any]]

LONG = [(7 * i) % 60 + 3 for i in range(200)]


@pytest.fixture(scope="module", params=["draft_model", "eagle"])
def shared(request: pytest.FixtureRequest, make_engine: Make, asked: Asked) -> Engine:
    """Chunks of 32 tokens; contexts of 128, 256 and 512."""
    engine = make_engine(**asked(request.param), max_model_len=512, options={"chunk_tokens": 32})
    drafter_of(engine)._proposer = InStep()
    return engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.llm.reset_prefix_cache()
    return shared


@pytest.fixture
def fresh(make_engine: Make, asked: Asked) -> Engine:
    """For a test that breaks it, or counts."""
    return make_engine(**asked("draft_model"), disable_log_stats=False)


# -- what it reads


def test_a_prompt_in_chunks_with_nobody_beside_it(engine: Engine) -> None:
    assert engine.tokens_of(LONG, greedy(20)) == expected(LONG, 20)


@pytest.mark.parametrize("length", [120, 126, 127, 128, 250, 255])
def test_a_draft_that_reaches_into_the_next_context(engine: Engine, length: int) -> None:
    prompt = (LONG * 2)[:length]
    assert engine.tokens_of(prompt, greedy(20)) == expected(prompt, 20)


def test_rows_that_the_device_is_not_asked_for_are_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others that it is asked for, and alone."""
    monkeypatch.setattr(drafter_of(engine), "_proposer", InTurns())
    prompts = [LONG[:40], LONG[1:40], [3, 4]]
    for asked in (prompts, prompts[:1]):
        outputs = engine.generate(asked, greedy(20))
        assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(one, 20) for one in asked]


def test_prompts_that_were_only_read(engine: Engine) -> None:
    """No draft is of use to a request for one token; its blocks are, to the next request."""
    engine.tokens_of(LONG, greedy(1))
    again = engine.one([*LONG, 5, 6], greedy(20))
    assert again.num_cached_tokens is not None
    assert again.num_cached_tokens >= 176
    assert list(again.outputs[0].token_ids) == expected([*LONG, 5, 6], 20)


def test_a_conversation(engine: Engine) -> None:
    """Each turn reads the answer before it from the cache, up to the tokens of its last step."""
    text = LONG[:20]
    for turn in range(6):
        text = [*text, *engine.tokens_of(text, greedy(16 + 3 * turn)), 30 + turn]
    assert engine.one(text, greedy(5)).num_cached_tokens > 100  # type: ignore[operator]


def one_by_one(whole: Part, plan: Plan) -> list[Part]:
    return [Part.of([row]) for row in whole.rows]


def test_a_step_in_several_calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "split", one_by_one)
    prompts = [LONG[:40], [3, 4], [9, 9, 9]]
    outputs = engine.generate(prompts, greedy(20))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(prompt, 20) for prompt in prompts]


def test_rows_that_wait_for_the_host_in_such_a_step_get_no_drafts(
    fresh: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "split", one_by_one)
    prompts = [LONG[:40], [3, 4], [9, 9, 9]]
    outputs = fresh.generate(prompts, greedy(20, logprobs=1))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(prompt, 20) for prompt in prompts]


# -- what it drafts


def drafted_and_kept(prompt: list[int], num_tokens: int, limit: int = 10**9) -> tuple[int, int, int, list[int]]:
    """(rows with drafts, drafts, accepted, accepted by position): the arithmetic draft worked out on paper."""
    text, given, kept = [*prompt, *expected(prompt, 1)], [], []
    while len(text) < len(prompt) + num_tokens:
        most = max(0, min(NUM_DRAFTS, len(prompt) + num_tokens - len(text) - 1, limit - len(text)))
        drafts, right = guesses(text, most), expected(text, most)
        same = next((index for index in range(most) if drafts[index] != right[index]), most)
        text += expected(text, same + 1)
        given.append(most)
        kept.append(same)
    by_position = [sum(count > position for count in kept) for position in range(NUM_DRAFTS)]
    return (sum(count > 0 for count in given), sum(given), sum(kept), by_position)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
def test_drafted_and_accepted_are_counted(fresh: Engine, num_tokens: int) -> None:
    before = counted(fresh)
    fresh.one([3, 4], greedy(num_tokens))
    assert difference(counted(fresh), before) == drafted_and_kept([3, 4], num_tokens)


def test_no_drafts_above_the_drafts_own_length(make_engine: Make, asked: Asked) -> None:
    arguments = {**asked("draft_model"), "speculative_max_model_len": 40, "disable_log_stats": False}
    engine = make_engine(**arguments)
    drafter_of(engine)._proposer = InStep()
    before = counted(engine)
    assert engine.tokens_of([3, 4], greedy(80)) == expected([3, 4], 80)
    assert difference(counted(engine), before) == drafted_and_kept([3, 4], 80, limit=40)

    calls = engine.worker.runner.counters.draft_calls
    assert engine.tokens_of(LONG[:60], greedy(20)) == expected(LONG[:60], 20)
    assert engine.worker.runner.counters.draft_calls == calls + 1  # the prompt's, which begins below it


def test_rows_sampled_on_the_host_get_drafts(fresh: Engine) -> None:
    before = counted(fresh)
    fresh.one([3, 4], greedy(40, logprobs=2))
    assert difference(counted(fresh), before) == drafted_and_kept([3, 4], 40)


# -- adaptive depth


@pytest.fixture(scope="module", params=["ngram", "draft_model", "eagle"])
def adaptive(request: pytest.FixtureRequest, make_engine: Make, asked: Asked) -> Engine:
    engine = make_engine(**asked(request.param), options={"adaptive_depth": True})
    if request.param != "ngram":
        drafter_of(engine)._proposer = InStep(may_be_silent=True)
    return engine


def decide(engine: Engine, monkeypatch: pytest.MonkeyPatch, answers: Iterator[bool]) -> None:
    pace = drafter_of(engine).pace
    assert pace is not None

    def choose(num_rows: int, real_rows: int, offers: Sequence[Offer]) -> Sequence[int]:
        pays = next(answers)
        return [offer.most if pays or offer.is_forced else 0 for offer in offers]

    monkeypatch.setattr(pace._depth, "choose", choose)


@pytest.mark.parametrize("pattern", [[False], [True, False], [False, False, False, True], [True, True, False]])
def test_a_draft_reads_on_while_nothing_is_drafted(
    adaptive: Engine, monkeypatch: pytest.MonkeyPatch, pattern: list[bool]
) -> None:
    decide(adaptive, monkeypatch, cycle(pattern))
    prompts = [LONG[:40], [3, 4], [9, 9, 9], [8] * 20]
    outputs = adaptive.generate(prompts, greedy(30))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(prompt, 30) for prompt in prompts]


def test_nothing_is_verified_where_it_does_not_pay(adaptive: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(adaptive, monkeypatch, repeat(False))
    before = adaptive.worker.runner.counters.drafted_tokens
    assert adaptive.tokens_of([7] * 30, greedy(30)) == expected([7] * 30, 30)
    assert adaptive.worker.runner.counters.drafted_tokens == before


LOOP = [20, 21, 22] * 10


@pytest.fixture
def looking_up(adaptive: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """As an EAGLE head is served: what repeats itself is looked up."""
    monkeypatch.setattr(drafter_of(adaptive), "_proposer", LookupFirst(PromptLookup(1, 8), DeviceDraft()))
    return adaptive


def test_nothing_is_looked_up_either_where_it_does_not_pay(looking_up: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = looking_up.worker.runner.counters.drafted_tokens
    decide(looking_up, monkeypatch, repeat(True))
    assert looking_up.tokens_of(LOOP, greedy(10)) == expected(LOOP, 10)
    between = looking_up.worker.runner.counters.drafted_tokens
    decide(looking_up, monkeypatch, repeat(False))
    assert looking_up.tokens_of(LOOP, greedy(10)) == expected(LOOP, 10)
    assert before < between == looking_up.worker.runner.counters.drafted_tokens


def test_a_seeded_request_drafts_in_every_step(adaptive: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever adaptive depth would choose; that it is told so is `test_pace`'s."""
    decide(adaptive, monkeypatch, repeat(False))
    prompt = [20, 21, 22, 20, 21, 22, 20, 21]
    seeded = SamplingParams(temperature=0.01, seed=5, max_tokens=20, ignore_eos=True)
    counters = adaptive.worker.runner.counters
    before = counters.drafted_tokens
    assert adaptive.tokens_of(prompt, seeded) == expected(prompt, 20)
    assert counters.drafted_tokens > before


def test_what_a_step_cost_and_what_was_kept_is_learned(adaptive: Engine) -> None:
    prompts = [LONG[:40], [3, 4], [9, 9, 9], [8] * 20]
    for output, prompt in zip(adaptive.generate(prompts, greedy(60)), prompts, strict=True):
        assert list(output.outputs[0].token_ids) == expected(prompt, 60)
    pace = drafter_of(adaptive).pace
    assert pace is not None
    costs = pace._depth._costs[4]
    assert costs.lines is not None
    assert costs.since_plain + costs.num_plain > 5
    assert pace._depth.chances._places  # of what was drafted, or looked up for nothing


@pytest.mark.parametrize(("how", "counts"), [({}, False), ({"logprobs": 1}, True)], ids=["on device", "on host"])
def test_what_sampling_on_the_host_takes_is_part_of_a_steps_cost(
    adaptive: Engine, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], counts: bool
) -> None:
    """It samples position by position, so drafts cost there too."""
    pace, told = drafter_of(adaptive).pace, list[float]()
    assert pace is not None

    def saw(call: Call, num_tokens: Mapping[str, int], host_seconds: float = 0.0) -> None:
        told.append(host_seconds)

    monkeypatch.setattr(pace, "saw", saw)
    assert adaptive.tokens_of([3, 4], greedy(10, **how)) == expected([3, 4], 10)
    assert told
    assert {seconds > 0 for seconds in told} == {counts}


def test_asking_between_the_calls_of_a_step_is_not_learned_from(
    adaptive: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waited for it that a choice could have spared; only what follows a step's last call was chosen."""
    pace, asked, counters = drafter_of(adaptive).pace, list[int](), adaptive.worker.runner.counters
    assert pace is not None
    monkeypatch.setattr(runner, "split", one_by_one)
    monkeypatch.setattr(pace, "asked", lambda num_asked, seconds: asked.append(num_asked))
    decide(adaptive, monkeypatch, repeat(True))
    steps, prompts = counters.steps, [LONG[:40], [3, 4], [9, 9, 9]]
    outputs = adaptive.generate(prompts, greedy(10))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(prompt, 10) for prompt in prompts]
    assert len(asked) <= counters.steps - steps
    assert set(asked) <= {0, 1}  # of a step's last call


# -- when it fails


@pytest.fixture
def fail_next_draft(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Exception], None]]:
    def fail(error: Exception) -> None:
        def draft(device: ArithmeticDevice, *arguments: Any) -> Any:
            monkeypatch.undo()
            raise error

        monkeypatch.setattr(ArithmeticDevice, "draft", draft)

    yield fail
    monkeypatch.undo()


FailNext = Callable[[Exception], None]

REQUESTS = {"a": LONG[:40], "b": [3, 4], "waits": [5, 6, 7], "waits too": [8]}


@pytest.mark.parametrize(
    ("error", "is_replaced"),
    [(DeviceError("out of order"), False), (DeviceLost("gone"), True), (ValueError("a register fell off"), True)],
    ids=["error", "lost", "defect"],
)
@pytest.mark.parametrize("how", [{}, {"logprobs": 1}], ids=["on device", "on host"])
def test_no_request_ends_for_it(
    make_engine: Make, asked: Asked, fail_next_draft: FailNext, error: Exception, is_replaced: bool, how: dict[str, Any]
) -> None:
    """Its tokens have been reported; those of a lost device read their texts again."""
    engine = make_engine(**asked("draft_model"), max_num_seqs=2)
    note_pauses(engine)
    before = engine.worker.runner.device
    for name, prompt in REQUESTS.items():
        engine.add(name, prompt, greedy(24, **how))
    engine.step(4)
    fail_next_draft(error)
    engine.finish()

    assert set(engine.reasons.values()) == {"length"}
    assert engine.tokens == {name: expected(prompt, 24) for name, prompt in REQUESTS.items()}
    assert engine.worker.neuronserve_metrics()["failed_steps"] == 0
    assert (engine.worker.runner.device is not before) == is_replaced


@pytest.mark.parametrize("error", [DeviceError("out of order"), DeviceLost("gone")], ids=["error", "lost"])
def test_a_failed_draft_leaves_the_next_step_none(fresh: Engine, fail_next_draft: FailNext, error: Exception) -> None:
    """Not even of what was looked up: the requests may have to read their texts again."""
    note_pauses(fresh)
    drafter_of(fresh)._proposer = Oracle(lambda _: 1)  # drafts, whether the device has any or not
    fresh.add("loop", LOOP, greedy(10))
    fail_next_draft(error)
    fresh.step(2)
    assert fresh.worker.runner.counters.drafted_tokens == 0
    fresh.finish()
    assert fresh.tokens["loop"] == expected(LOOP, 10)


def test_no_prefix_of_a_lost_device_is_used_again(fresh: Engine, fail_next_draft: FailNext) -> None:
    note_pauses(fresh)
    fail_next_draft(DeviceLost("gone"))
    assert fresh.tokens_of(LONG[:40], greedy(1)) == expected(LONG[:40], 1)

    again = fresh.one(LONG[:40], greedy(5))  # poison, were it read
    assert list(again.outputs[0].token_ids) == expected(LONG[:40], 5)


def test_a_draft_that_fails_in_every_step_stops_no_request(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def draft(device: ArithmeticDevice, *arguments: Any) -> Any:
        raise DeviceLost("gone again")

    note_pauses(fresh)
    monkeypatch.setattr(ArithmeticDevice, "draft", draft)
    assert fresh.tokens_of([3, 4], greedy(6)) == expected([3, 4], 6)
    assert fresh.worker.runner.counters.device_restarts == 6


def test_seeds_hold_whatever_is_lost(fresh: Engine, fail_next_draft: FailNext) -> None:
    note_pauses(fresh)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)
    usual = fresh.tokens_of([3, 4, 5], params)
    fresh.add("again", [3, 4, 5], params)
    fresh.step(3)
    fail_next_draft(DeviceLost("gone"))
    fresh.finish()
    assert fresh.tokens["again"] == usual
