"""A TGI request that passed validation -> what vLLM is asked: prompt token ids and `SamplingParams`. Pure.

The rules are TGI's reference backend's. Nothing of a model's generation_config leaks in: every parameter is set here.
Stop strings are not vLLM's affair either, because TGI looks for them at the end of each token (`stopping`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from .schemas import GenerateParameters

MARK = "tgi"
DRAWN_SEED = "tgi_drawn_seed"
"""Nobody asked for this seed: it is shown, and its request may be drafted for as those without one."""
"""Key of `SamplingParams.extra_args`: the row's log-probabilities are over the processed scores, and what it holds are
TGI's parameters that vLLM does not have."""

_SEED_BITS = 53  # every JSON reader has the number exactly


@dataclass(frozen=True)
class Job:
    """What is given to the engine. Made by `prepare`; the answer is made from it and the engine's tokens."""

    inputs: str  # as they came
    token_ids: tuple[int, ...]  # after truncation
    asked: GenerateParameters
    max_new_tokens: int
    grammar: dict[str, Any] | str | None
    streaming: bool

    @property
    def samples(self) -> bool:
        return sampling_is_on(self.asked)

    @property
    def num_answers(self) -> int:
        return max(self.asked.best_of or 1, 1)

    @property
    def shows_logprobs(self) -> bool:
        """Whether the answer has a place for them."""
        return self.streaming or self.asked.details or self.asked.decoder_input_details

    @property
    def needs_logprobs(self) -> bool:
        """Whether it would be another answer without them."""
        return bool(self.asked.top_n_tokens) or self.num_answers > 1


def truncated(token_ids: Sequence[int], truncate: int | None) -> tuple[int, ...]:
    """The last tokens, special ones included: a beginning-of-text token may fall off."""
    return tuple(token_ids if truncate is None else token_ids[-truncate:])


def sampling_is_on(asked: GenerateParameters) -> bool:
    """A temperature of 1 alone stays greedy."""
    return (
        asked.do_sample
        or asked.temperature not in (None, 1.0)
        or asked.top_k is not None
        or asked.top_p is not None
        or asked.typical_p is not None
    )


def draw_seed() -> int:
    return secrets.randbits(_SEED_BITS)


@dataclass(frozen=True)
class Offers:
    """What the engine has for answers that only show it: without, they say 0.0, null or []. What a request asks for by
    name is passed on all the same, for the engine to refuse."""

    logprobs: bool = True
    seeds: bool = True
    prefill_logprobs: bool = True
    max_logprobs: int = 20  # of a position


def seed_of(job: Job, offers: Offers) -> int | None:
    """Of one answer: the request's, else a new one; greedy decoding has none."""
    if not job.samples:
        return None
    if job.asked.seed is None:
        return draw_seed() if offers.seeds else None
    return job.asked.seed


def sampling_params(job: Job, seed: int | None, offers: Offers) -> SamplingParams:
    asked = job.asked
    return SamplingParams(
        temperature=_temperature(asked) if job.samples else 0.0,
        top_k=(asked.top_k or 0) if job.samples else 0,
        top_p=(asked.top_p or 1.0) if job.samples else 1.0,
        seed=seed,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        max_tokens=job.max_new_tokens,
        logprobs=_num_logprobs(job, offers),
        prompt_logprobs=0 if asked.decoder_input_details and offers.prefill_logprobs else None,
        structured_outputs=structured(job.grammar),
        extra_args={
            MARK: _extra(asked, samples=job.samples),
            **({DRAWN_SEED: True} if seed is not None and asked.seed is None else {}),
        },
        detokenize=False,  # texts are made per token, special ones included
        output_kind=RequestOutputKind.DELTA,
    )


def _num_logprobs(job: Job, offers: Offers) -> int | None:
    if job.asked.top_n_tokens:
        return max(job.asked.top_n_tokens, offers.max_logprobs)  # some may tie with the last one that was asked for
    if job.needs_logprobs or (job.shows_logprobs and offers.logprobs):
        return 0
    return None


def _temperature(asked: GenerateParameters) -> float:
    return 1.0 if asked.temperature is None else asked.temperature


def structured(grammar: dict[str, Any] | str | None) -> StructuredOutputsParams | None:
    if grammar is None:
        return None
    return StructuredOutputsParams(regex=grammar) if isinstance(grammar, str) else StructuredOutputsParams(json=grammar)


def _extra(asked: GenerateParameters, *, samples: bool) -> dict[str, float]:
    given = {"frequency_penalty": asked.frequency_penalty, "typical_p": asked.typical_p if samples else None}
    return {name: value for name, value in given.items() if value not in (None, 0.0)}
