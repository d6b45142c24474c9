"""Drafts that a device makes and verifies inside its own step, through real vLLM on the classic library's stand-in.

A slot that is one token off, or that a step left out, answers something else from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.sampling import HostSampler

from ..tools.bare_python import python_that_finds
from .conftest import FAKES, LIBRARY
from .engine import Engine, greedy, note_pauses
from .test_speculation import counted, difference
from .test_transformers_neuronx import PROMPTS, start
from .tiny_model import VOCAB_SIZE, tiny_model

NUM_DRAFTS = 3
LONGEST = 128

DRAFTS: dict[str, dict[str, Any]] = {
    "itself": {},
    "half": {"num_hidden_layers": 1, "fake_disagrees_every": 2},
    "wrong": {"num_hidden_layers": 1, "fake_disagrees_every": 1},
    "eagle": {"num_hidden_layers": 1, "is_eagle": True},
}
"""What their config.json has. The target itself is always right, one by chance, one never."""


def start_with(draft: str, directory: Path, options: dict[str, Any] | None = None, **arguments: Any) -> Engine:
    model = directory if draft == "itself" else directory / "draft"
    if draft != "itself":
        write(model, **DRAFTS[draft])
    # Where tokens are drawn is not said: a draft leaves no choice.
    asked = {"speculative_model": str(model), "num_speculative_tokens": NUM_DRAFTS, "disable_log_stats": False}
    return start(directory, {"sampling": "auto", **(options or {})}, **{**asked, **arguments})


def write(directory: Path, **form: Any) -> Path:
    tiny_model(directory, **form)
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return directory


@pytest.fixture(scope="module", params=DRAFTS)
def drafting(request: pytest.FixtureRequest, answers: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, start_with(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def engine(drafting: tuple[str, Engine]) -> Engine:
    return drafting[1]


@pytest.fixture
def plain(answers: Any) -> Callable[[list[int], int], list[int]]:
    """Tokens of a request that is alone and has no drafts."""
    return lambda prompt, num_tokens: answers.greedy(prompt, num_tokens, VOCAB_SIZE)


Plain = Callable[[list[int], int], list[int]]


def test_each_of_a_batch_as_if_alone(engine: Engine, plain: Plain) -> None:
    """Each accepts what it accepts; those that are over leave their slots to others."""
    lengths = [20, 7, 33, 1, 12, 2, 28, 5, 16, 40]
    outputs = engine.generate(PROMPTS * 2, [greedy(length) for length in lengths])
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [plain(prompt, length) for prompt, length in zip(PROMPTS * 2, lengths, strict=True)]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_joined_late_with_a_prompt_of_one_token(engine: Engine, plain: Plain, steps: int) -> None:
    engine.add("first", [50, 51, 52], greedy(30))
    engine.step(steps)
    engine.add("late", [9], greedy(18))
    engine.finish()
    assert engine.tokens["first"] == plain([50, 51, 52], 30)
    assert engine.tokens["late"] == plain([9], 18)


def test_an_aborted_request_leaves_its_neighbour_alone(engine: Engine, plain: Plain) -> None:
    engine.add("stays", [5, 6, 7], greedy(40))
    engine.add("leaves", [8, 9], greedy(80))
    engine.step(4)
    engine.core.abort_request(["leaves"])
    engine.add("joins", [3, 3], greedy(16))
    engine.finish()
    assert engine.tokens["stays"] == plain([5, 6, 7], 40)
    assert engine.tokens["joins"] == plain([3, 3], 16)


@pytest.mark.parametrize("number", range(3))
def test_random_arrivals_lengths_and_aborts(engine: Engine, plain: Plain, number: int) -> None:
    random = Random(number)
    prompts = {f"{number}-{name}": random.choices(range(3, VOCAB_SIZE), k=random.randint(1, 60)) for name in range(14)}
    lengths = {name: random.randint(1, LONGEST - len(prompt)) for name, prompt in prompts.items()}
    leaves = {name for name in prompts if random.random() < 0.2}
    for name, prompt in prompts.items():
        engine.add(name, prompt, greedy(lengths[name]))
        engine.step(random.randint(0, 4))
        if leaves and random.random() < 0.3:
            engine.core.abort_request([leaves.pop()])
    engine.finish()
    ended = [name for name in prompts if engine.reasons.get(name) == "length"]
    assert len(ended) > 8
    for name in ended:
        assert engine.tokens[name] == plain(prompts[name], lengths[name])


@pytest.mark.parametrize("left", range(1, NUM_DRAFTS + 4))
def test_up_to_the_model_s_length(engine: Engine, plain: Plain, left: int) -> None:
    """And not beyond it, however many tokens the last step gave, with a neighbour that goes on."""
    prompt = [7] * (LONGEST - left)
    engine.add("goes on", [5, 6], greedy(30))
    engine.add("full", prompt, greedy(50))
    engine.finish()
    assert engine.tokens["full"] == plain(prompt, left)
    assert engine.reasons["full"] == "length"
    assert engine.tokens["goes on"] == plain([5, 6], 30)


def test_a_stop_token_inside_a_step_ends_the_answer(engine: Engine, plain: Plain) -> None:
    whole = plain([3, 4], 30)
    for token in dict.fromkeys(whole[1:10]):
        output = engine.one([3, 4], greedy(30, stop_token_ids=[token])).outputs[0]
        assert list(output.token_ids) == whole[: whole.index(token) + 1]
        assert output.finish_reason == "stop"


def test_a_stop_string_inside_a_step_ends_the_answer(engine: Engine, plain: Plain) -> None:
    whole = plain([3, 4], 30)
    usual = engine.one([3, 4], greedy(30)).outputs[0].text
    for token in dict.fromkeys(whole[1:8]):
        output = engine.one([3, 4], greedy(30, stop=[f"w{token}"])).outputs[0]
        assert output.finish_reason == "stop"
        assert output.text == usual[: usual.index(f"w{token}")]


def test_sampled_tokens_are_drawn_in_the_device(engine: Engine, plain: Plain) -> None:
    outputs = engine.generate(PROMPTS, greedy(15, temperature=0.7, top_k=1))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [plain(prompt, 15) for prompt in PROMPTS]
    [output] = engine.generate([[3, 4]], SamplingParams(temperature=1.0, top_p=0.9, max_tokens=15, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 15
    assert engine.worker.runner.counters.rows_sampled_on_host == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"seed": 5, "temperature": 1.0},
        {"logprobs": 1},
        {"min_tokens": 3},
        {"presence_penalty": 1.0},
        {"structured_outputs": StructuredOutputsParams(regex="w3")},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_needs_logits_is_refused_by_name(drafting: tuple[str, Engine], asked: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match=f"{next(iter(asked))}=.* needs logits on the host"):
        drafting[1].one([3, 4], greedy(6, **asked))


# -- what is counted


def drafted_and_kept(
    answers: Any,
    prompt: list[int],
    num_tokens: int,
    disagrees_every: int,
) -> tuple[int, int, int, list[int]]:
    """(rows with drafts, drafts, accepted, accepted by position), worked out on paper: a draft is wrong where the
    digest of what it has read is a multiple. Counted are those that the request could use."""
    text = [*prompt, *answers.greedy(prompt, num_tokens + NUM_DRAFTS, VOCAB_SIZE)]
    digest, agrees = 0, []
    for position, token in enumerate(text):
        digest = answers.extend(digest, answers.make_cell(token, position, digest), position)
        agrees.append(disagrees_every == 0 or digest % disagrees_every != 0)
    length, given, kept = len(prompt) + 1, [], []
    while length < len(prompt) + num_tokens:
        most = min(NUM_DRAFTS, len(prompt) + num_tokens - length - 1)
        same = next((index for index in range(most) if not agrees[length - 1 + index]), most)
        length += same + 1
        given.append(most)
        kept.append(same)
    by_position = [sum(count > position for count in kept) for position in range(NUM_DRAFTS)]
    return (sum(count > 0 for count in given), sum(given), sum(kept), by_position)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6, 40])
def test_drafted_and_accepted_are_counted(drafting: tuple[str, Engine], answers: Any, num_tokens: int) -> None:
    draft, engine = drafting
    counters = engine.worker.runner.counters
    before, ours = counted(engine), counters.drafted_tokens
    kept = sum(count * times for count, times in counters.accepted_drafts.items())
    engine.one([3, 4], greedy(num_tokens))
    wanted = drafted_and_kept(answers, [3, 4], num_tokens, DRAFTS[draft].get("fake_disagrees_every", 0))
    assert difference(counted(engine), before) == wanted
    assert counters.drafted_tokens - ours == wanted[1]
    assert sum(count * times for count, times in counters.accepted_drafts.items()) - kept == wanted[2]


def test_a_draft_that_is_right_takes_a_quarter_of_the_steps(drafting: tuple[str, Engine], plain: Plain) -> None:
    """In company too: a draft whose own cache lost a position would be wrong from there on."""
    draft, engine = drafting
    if draft not in ("itself", "eagle"):
        pytest.skip("it is not always right")
    steps = engine.worker.runner.counters.steps
    for number in range(4):
        engine.add(f"{draft} {number}", [5 + number, 6], greedy(41))
    engine.finish()
    assert all(engine.tokens[f"{draft} {number}"] == plain([5 + number, 6], 41) for number in range(4))
    assert engine.worker.runner.counters.steps - steps <= 40 // (NUM_DRAFTS + 1) + 4


# -- shapes, failures, places


def test_the_arguments_of_the_classic_guide(answers: Any, plain: Plain, tmp_path: Path) -> None:
    """Its script, but for the models and the number of cores."""
    engine = start_with(
        "half",
        tmp_path,
        max_model_len=LONGEST,
        block_size=LONGEST,
        speculative_max_model_len=LONGEST,
        dtype="bfloat16",
        max_num_seqs=4,
        device="neuron",
        tensor_parallel_size=2,
        use_v2_block_manager=True,
    )
    outputs = engine.generate(PROMPTS[:4], SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [16] * 4
    assert engine.tokens_of([3, 4], greedy(20)) == plain([3, 4], 20)


def test_processors_of_ones_own_are_refused(answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostSampler, "has_custom_processors", True)
    with pytest.raises(ConfigError, match=r"^logits processors of your own need logits on the host, but sampling is"):
        start_with("half", tmp_path)


def test_every_decode_is_as_wide_as_a_row_may_grow(engine: Engine) -> None:
    shapes = engine.worker.config.plan.shapes
    assert {shape.decode_width for shape in shapes if shape.decode_rows} == {NUM_DRAFTS + 1}


def test_a_runtime_that_fails_ends_the_running_requests_and_the_model_is_loaded_again(
    engine: Engine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_pauses(engine)
    chip = import_module(f"{LIBRARY}.chip")
    engine.add("runs", [5, 6], greedy(40))
    engine.step(3)

    def fail(*args: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("nrt_execute failed: status 5")

    monkeypatch.setattr(chip.Chip, "write_tokens", fail)
    engine.finish()
    assert engine.reasons["runs"] == "error"
    assert engine.tokens_of([5, 6], greedy(40)) == plain([5, 6], 40)


@pytest.fixture
def remote(answers: Any, tmp_path: Path) -> Iterator[Engine]:
    """In another interpreter, which finds the stand-in where the SDK would be installed."""
    python = python_that_finds(FAKES, tmp_path)
    engine = start_with("half", tmp_path / "model", {"device_python": python})
    yield engine
    engine.worker.shutdown()


def test_in_another_interpreter(remote: Engine, plain: Plain) -> None:
    outputs = remote.generate(PROMPTS, greedy(20))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [plain(prompt, 20) for prompt in PROMPTS]
