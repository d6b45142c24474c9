"""Greedy tokens equal transformers' with drafts in every step, however a request arrived; seeded ones equal plain ones.

Drafts are looked up in the prompt, or come from a model beside the model: a random one, which is never right, or the
model itself, which always is, as long as its own part of the cache is in step; or from the EAGLE head that is shipped,
or an EAGLE-3 head with random weights. However a request came to its text, a draft on the device says the same after
it. Without `--full`: ten prompts, 24 tokens each; with it, all forty and 64, on two engines more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from neuronserve import speculative
from neuronserve.speculative.proposer import ASK_DEVICE, Context, LookupFirst, Proposal

from ..tools.prompts import Prompt, read_prompts, subset
from ..tools.random_model import random_eagle3_head, random_llama
from .conftest import greedy
from .test_smollm2 import check, test_alone, test_eight_at_once  # noqa: F401  (collected here, on this module's engine)

if TYPE_CHECKING:
    from vllm import SamplingParams

    from neuronserve.neuron_worker.drafter import Drafter

    from ..tools.engine import Engine
    from ..tools.reference import Reference

NUM_DRAFTS = 4

SHIPPED = Path(speculative.__file__).parent / "heads" / "SmolLM2-135M-Instruct"

# Chunks of 32 cut every prompt above that. 1280 tokens hold one long sequence and not eight, so some are preempted.
# Drafts in every step: no clock decides what a test sees.
ALWAYS = {"adaptive_depth": False}
CHUNKS: dict[str, Any] = {"block_size": 8, "options": {"chunk_tokens": 32, **ALWAYS}}
TINY_CACHE: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 80, "options": ALWAYS}
BOTH: dict[str, Any] = {**CHUNKS, "num_gpu_blocks_override": 160}

ENGINES: dict[str, dict[str, Any]] = {
    "lookup-chunks_32": CHUNKS,
    "lookup-tiny_cache": TINY_CACHE,
    "random-tiny_cache": TINY_CACHE,
    "itself-chunks_32": CHUNKS,
    "eagle-both": BOTH,
    "eagle3-both": BOTH,
}


class SameAsBefore:
    """A draft on the device that may not contradict itself."""

    def __init__(self) -> None:
        self._said: dict[bytes, list[int]] = {}
        self.num_repeats = 0

    def propose(self, context: Context) -> Proposal:
        if context.drafted is None:
            return ASK_DEVICE
        drafts = list(context.drafted)[: context.most]
        self.num_repeats += context.tokens.tobytes() in self._said
        before = self._said.setdefault(context.tokens.tobytes(), drafts)
        shared = min(len(before), len(drafts))
        assert drafts[:shared] == before[:shared], f"after {len(context.tokens)} tokens"
        return Proposal(drafts)


class InTurns(SameAsBefore):
    """As where text is looked up first: every second step's drafts are somebody else's, and the head reads later."""

    def propose(self, context: Context) -> Proposal:
        return super().propose(context) if len(context.tokens) % 2 == 0 else Proposal([5] * context.most)


@pytest.fixture(scope="module")
def drafts(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Who drafts -> `speculative_model`."""
    small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    random = random_llama(tmp_path_factory.mktemp("eagle-random"), tokenizer_from=smollm2, **small)
    head3 = random_eagle3_head(tmp_path_factory.mktemp("head3"), smollm2, draft_vocab=4096, layers=(2, 15, 27))
    heads = {"eagle": str(SHIPPED), "eagle3": str(head3)}
    return {"lookup": "ngram", "random": str(random), "itself": str(smollm2), **heads}


NOT_ALONE = ("lookup-tiny_cache",)
QUICK = ("lookup-chunks_32", "itself-chunks_32", "eagle-both", "eagle3-both")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in ENGINES]
)
def engine(request: pytest.FixtureRequest, running: Callable[..., Any], drafts: dict[str, str]) -> Iterator[Engine]:
    name = request.param.split("-")[0]
    model = drafts[name]
    with running(speculative_model=model, num_speculative_tokens=NUM_DRAFTS, **ENGINES[request.param]) as engine:
        config = engine.core.vllm_config.speculative_config
        assert config is not None
        assert config.method == {"lookup": "ngram", "random": "draft_model", "itself": "draft_model"}.get(name, name)
        if model != "ngram":
            drafter = drafter_of(engine)
            assert isinstance(drafter._proposer, LookupFirst) == (name in ("eagle", "eagle3"))
            drafter._proposer = InTurns() if name == "eagle" else SameAsBefore()
        yield engine


@pytest.fixture
def cold(engine: Engine, drafts: dict[str, str]) -> Iterator[Engine]:
    """The engine as if just started; a test without drafts, or with none that was right, would test little."""
    engine.forget()
    engine.num_preemptions = engine.num_steps = 0
    before = drafted_and_kept(engine)
    yield engine
    drafted, kept = (now - then for now, then in zip(drafted_and_kept(engine), before, strict=True))
    config = engine.core.vllm_config.speculative_config
    assert config is not None
    assert drafted > 0
    if config.model == drafts["itself"]:
        assert kept == drafted
    assert kept > 0 or config.model in (drafts["random"], drafts["eagle3"])


def drafter_of(engine: Engine) -> Drafter:
    return engine.llm.collective_rpc(lambda worker: worker)[0].runner._drafter


def drafted_and_kept(engine: Engine) -> tuple[int, int]:
    counters = engine.llm.collective_rpc(lambda worker: worker)[0].runner.counters
    return counters.drafted_tokens, sum(kept * times for kept, times in counters.accepted_drafts.items())


def test_joined_late_and_left_early(cold: Engine, prompts: list[Prompt], num_tokens: int, reference: Reference) -> None:
    """One after the other, three steps apart; every third is aborted while drafts of it are waiting."""
    staying = [prompt for index, prompt in enumerate(prompts) if index % 3 != 2]
    for prompt in prompts:
        cold.add(prompt.id, prompt.tokens, greedy(num_tokens))
        cold.step(3)
        if prompt not in staying:
            cold.core.abort_request([prompt.id])
    cold.finish()
    check(reference, staying, [cold.tokens[prompt.id] for prompt in staying])


def test_prefix_hit(cold: Engine, prompts: list[Prompt], num_tokens: int, reference: Reference) -> None:
    """The second time, blocks are read in which rejected drafts stood before."""
    for prompt in prompts[::4]:
        cold.add("first", prompt.tokens, greedy(num_tokens))
        cold.finish()
        answered = [*prompt.tokens, *cold.tokens["first"]]
        cold.add("again", answered, greedy(num_tokens))
        cold.finish()
        reference.check([(prompt.tokens, cold.tokens["first"]), (answered, cold.tokens["again"])])
        # Whole blocks; those that the last step filled are not kept when the request ends in it.
        block, most = cold.config.block_size, len(answered) - 1
        first = (most - NUM_DRAFTS - 1) // block * block
        if cold.core.vllm_config.speculative_config.use_eagle_block_drop():
            first -= block  # vLLM has the last one read again
        kept = range(first, most + 1, block)
        assert cold.cached_tokens["again"] in kept


def test_logprobs_are_those_of_plain_decoding(cold: Engine, prompts: list[Prompt], reference: Reference) -> None:
    """Sampled on the host, round by round: the same tokens."""
    params = greedy(16)
    params.logprobs = 2
    some = prompts[::2]
    check(reference, some, cold.run([prompt.tokens for prompt in some], params, at_once=4))


def seeded(num_tokens: int) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="session")
def ten(smollm2: Path) -> list[Prompt]:
    """With `--full` too: of what is not counted by the forty."""
    return subset(read_prompts(smollm2))


@pytest.fixture(scope="session")
def plainly(running: Callable[..., Any], ten: list[Prompt], num_tokens: int) -> list[list[int]]:
    """Seeded answers without drafts."""
    with running(block_size=16) as engine:
        return engine.run([prompt.tokens for prompt in ten[::2]], seeded(num_tokens), at_once=5)


def test_a_seed_gives_the_tokens_of_plain_sampling(
    engine: Engine, ten: list[Prompt], num_tokens: int, plainly: list[list[int]]
) -> None:
    engine.forget()
    assert engine.run([prompt.tokens for prompt in ten[::2]], seeded(num_tokens), at_once=3) == plainly


# -- the head that is shipped


@pytest.mark.parametrize("options", [ALWAYS, {}], ids=["always", "as_it_is_served"])
def test_the_shipped_head(
    options: dict[str, Any],
    running: Callable[..., Any],
    prompts: list[Prompt],
    num_tokens: int,
    reference: Reference,
) -> None:
    """With text looked up first; whether that pays is for a clock to say, and changes no token."""
    with running(speculative_model=str(SHIPPED), num_speculative_tokens=NUM_DRAFTS, options=options) as engine:
        assert isinstance(drafter_of(engine)._proposer, LookupFirst)
        answers = engine.run([prompt.tokens for prompt in prompts], greedy(num_tokens), at_once=8)
        drafted, kept = drafted_and_kept(engine)
    check(reference, prompts, answers)
    if options:
        assert kept > 0.2 * drafted > 0


def test_the_shipped_head_is_as_often_right_after_a_hit_and_after_chunks(
    running: Callable[..., Any], ten: list[Prompt], num_tokens: int
) -> None:
    said, found = SameAsBefore(), []
    asked = [prompt.tokens for prompt in ten[::2]]
    for where in ({"block_size": 16, "options": ALWAYS}, CHUNKS):
        with running(speculative_model=str(SHIPPED), num_speculative_tokens=NUM_DRAFTS, **where) as engine:
            drafter_of(engine)._proposer = said
            before = 0, 0
            for _ in ("whole", "from what is cached"):
                engine.run(asked, greedy(num_tokens), at_once=1)
                now = drafted_and_kept(engine)
                found.append((now[0] - before[0], now[1] - before[1]))
                before = now
            assert sum(engine.cached_tokens.values()) > 0
    assert len(set(found)) == 1, found
    drafted, kept = found[0]
    assert kept > 0.1 * drafted > 0
    assert said.num_repeats == 3 * len(said._said) > 0


# -- preempted while drafts of it are accepted


@pytest.mark.parametrize("who", ["itself", "shipped"])
def test_preempted_between_drafts_that_are_right(
    who: str, running: Callable[..., Any], prompts: list[Prompt], drafts: dict[str, str], reference: Reference
) -> None:
    """Two requests that both fit until they are answered; what is read again has the draft's part too."""
    text = max(prompts, key=lambda prompt: len(prompt.tokens)).tokens
    asked = [text[:120], text[200:331]]
    cache = {"max_model_len": 256, "block_size": 8, "num_gpu_blocks_override": 40}
    model = str(SHIPPED) if who == "shipped" else drafts["itself"]
    with running(speculative_model=model, num_speculative_tokens=NUM_DRAFTS, options=ALWAYS, **cache) as engine:
        answers = engine.run(asked, greedy(64), at_once=2)
        drafted, kept = drafted_and_kept(engine)
        assert engine.num_preemptions > 0
    reference.check(zip(asked, answers, strict=True))
    assert kept == drafted if who == "itself" else kept > 0


# -- another type


def test_in_bfloat16_too(
    running: Callable[..., Any], ten: list[Prompt], num_tokens: int, drafts: dict[str, str]
) -> None:
    """In which the guide's scripts are served, and ties are common: plain decoding's tokens, whoever drafts."""
    asked = [prompt.tokens for prompt in ten[::2]]
    found, kept = {}, {}
    for who in (None, drafts["lookup"], drafts["itself"], str(SHIPPED)):
        drafting = {} if who is None else {"speculative_model": who, "num_speculative_tokens": NUM_DRAFTS}
        with running(dtype="bfloat16", block_size=16, options=ALWAYS, **drafting) as engine:
            found[who] = engine.run(asked, greedy(num_tokens), at_once=3)
            kept[who] = drafted_and_kept(engine)[1] if drafting else 1
    assert [answers == found[None] for answers in found.values()] == [True] * 4
    assert min(kept.values()) > 0


# -- what is counted


def test_tokens_per_target_step_can_be_told_offline(running: Callable[..., Any], prompts: list[Prompt]) -> None:
    shortest = min(prompts, key=lambda prompt: len(prompt.tokens))
    arguments = {"disable_log_stats": False, "per_request_spec_decode_metrics": "summary", "options": ALWAYS}
    with running(speculative_model="ngram", num_speculative_tokens=NUM_DRAFTS, **arguments) as engine:
        before = counted(engine)
        engine.run([shortest.tokens], greedy(48), at_once=1)
        generated, accepted = (now - then for now, then in zip(counted(engine), before, strict=True))
        [output] = engine.llm.generate({"prompt_token_ids": list(shortest.tokens)}, greedy(48), use_tqdm=False)
        assert output.outputs[0].spec_decode_metrics is not None
    assert generated == 48
    assert accepted > 0
    assert engine.num_steps == generated - accepted  # the prompt's among them


def counted(engine: Engine) -> list[int]:
    names = ("vllm:generation_tokens", "vllm:spec_decode_num_accepted_tokens")
    values = {metric.name: metric.value for metric in engine.llm.get_metrics() if metric.name in names}
    return [int(values[name]) for name in names]


# -- processors of the user's


FAVOURITE = 5

PROCESSOR = f"""
from vllm.v1.sample.logits_processor import LogitsProcessor


class Favourite(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        logits[:, {FAVOURITE}] += 1e4
        return logits
"""


def test_a_processor_that_is_installed_sees_every_token(
    running: Callable[..., Any], prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would leave it out without a word where there are drafts."""
    (tmp_path / "favourite.py").write_text(PROCESSOR)
    metadata = tmp_path / "favourite-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: favourite\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.logits_processors]\nfavourite = favourite:Favourite\n")
    monkeypatch.syspath_prepend(tmp_path)
    with running(speculative_model="ngram", num_speculative_tokens=NUM_DRAFTS, options=ALWAYS) as engine:
        answers = engine.run([prompt.tokens for prompt in prompts[:3]], greedy(6), at_once=3)
        assert drafted_and_kept(engine) == (0, 0)
    assert answers == [[FAVOURITE] * 6] * 3
