"""One answer as it grows: the engine's outputs in, a `Step` for each token out. Knows no engine and no HTTP.

An output may hold several tokens (a verified draft, or a reader that fell behind); each becomes a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from .schemas import FinishReason, PrefillToken, Token
from .stopping import Stopping
from .tokens import Vocabulary
from .translate import Job

if TYPE_CHECKING:
    from vllm.logprobs import Logprob, PromptLogprobs
    from vllm.outputs import CompletionOutput

LOWEST = -3.4028234663852886e38
"""Stands for minus infinity, which JSON does not have: the lowest float32."""


@dataclass(frozen=True)
class Ending:
    """Comes with the last token."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None


@dataclass(frozen=True)
class Step:
    """One token."""

    token: Token
    top_tokens: list[Token]
    ending: Ending | None


class Following:
    def __init__(self, job: Job, seed: int | None, vocabulary: Vocabulary) -> None:
        self._job, self._seed, self._vocabulary = job, seed, vocabulary
        self._reader = vocabulary.reader(job.token_ids)
        self._stopping = Stopping(job.asked.stop, job.max_new_tokens)
        self._num_tokens = 0
        self._num_prefill = 0

    def read(self, part: CompletionOutput) -> Iterator[Step]:
        """Up to the step with the ending; tokens behind it were made in vain."""
        for place, id in enumerate(part.token_ids):
            is_last = place == len(part.token_ids) - 1
            scores = part.logprobs[place] if part.logprobs else {}
            step = self._step(id, scores, part.finish_reason if is_last else None)
            yield step
            if step.ending is not None:
                return

    def _step(self, id: int, scores: Mapping[int, Logprob], finish_reason: str | None) -> Step:
        self._num_tokens += 1
        text = self._reader.read(id)
        reason = self._stopping(self._num_tokens, self._reader.text, is_end=finish_reason == "stop")
        if finish_reason == "length":  # the engine's own limit may come first
            reason = "length"
        ending = reason and Ending(self._reader.generated_text(), reason, self._num_tokens, self._seed)
        return Step(self._token(id, text, scores[id].logprob if id in scores else 0.0), self._top(scores), ending)

    def _token(self, id: int, text: str, logprob: float) -> Token:
        value = logprob if isfinite(logprob) else LOWEST
        return Token(id=id, text=text, logprob=value, special=self._vocabulary.is_special(id))

    def _top(self, scores: Mapping[int, Logprob]) -> list[Token]:
        """The likeliest tokens of this position; those that a limit of the request ruled out are not among them."""
        best = _likeliest(scores, self._job.asked.top_n_tokens or 0)
        texts = self._vocabulary.alone([id for id, _ in best])
        return [self._token(id, text, logprob) for (id, logprob), text in zip(best, texts, strict=True)]

    def prefill(self, scores: PromptLogprobs) -> list[PrefillToken]:
        """The prompt's next tokens; the first of all has no score."""
        ids = self._job.token_ids[self._num_prefill : self._num_prefill + len(scores)]
        self._num_prefill += len(ids)
        return [
            PrefillToken(id=id, text=text, logprob=_of(position, id))
            for id, text, position in zip(ids, self._vocabulary.alone(ids), scores, strict=True)
        ]


def _likeliest(scores: Mapping[int, Logprob], num: int) -> list[tuple[int, float]]:
    """(id, log-probability) of `num` tokens and of those that tie with the last of them."""
    if not num:
        return []
    ranked = sorted(scores.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
    possible = [(id, score.logprob) for id, score in ranked if isfinite(score.logprob)]
    return [(id, logprob) for id, logprob in possible if logprob >= possible[:num][-1][1]]


def _of(position: Mapping[int, Logprob] | None, id: int) -> float | None:
    value = position[id].logprob if position else None
    return value if value is not None and isfinite(value) else None
