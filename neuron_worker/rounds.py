"""The step's rows that are sampled on the host, those with drafts position by position.

The token at a position depends on the tokens before it: penalties count them, a grammar and a minimum length follow
them. So each round gives one token to every row whose drafts have been right so far, by the very sampler that plain
decoding uses; a row's tokens, log-probabilities and random numbers are those it would have had without drafts.

Knows requests and logits. Knows no device and no shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsLists

from neuronserve.neuron_worker.device.base import Float32
from neuronserve.speculative.verify import accept_in_rounds

if TYPE_CHECKING:
    from neuronserve.neuron_worker.sampling import HostSample, HostSampler
    from neuronserve.neuron_worker.state import LiveRequest


class HostRow(NamedTuple):
    request: LiveRequest
    logits: Float32  # [1 + drafts, vocabulary]
    drafts: Sequence[int]


class HostTokens(NamedTuple):
    """Requests in the sampler's order, and the tokens of each."""

    requests: Sequence[LiveRequest]
    tokens: Sequence[list[int]]
    logprobs: LogprobsLists | None


class Masks:
    """vLLM's mask of a step, [positions of all drafting requests, words], as one mask per round."""

    def __init__(self, whole: GrammarOutput | None, drafts: Mapping[str, Sequence[int]]) -> None:
        self._whole = whole
        self._first: dict[str, int] = {}  # a request's first row: it has one more than it has drafts
        end = 0
        for request_id in whole.structured_output_request_ids if whole is not None else ():
            self._first[request_id] = end
            end += 1 + len(drafts.get(request_id, ()))
        self._is_one_each = end == len(self._first)

    def at(self, position: int, requests: Sequence[LiveRequest]) -> GrammarOutput | None:
        if self._whole is None or (self._is_one_each and position == 0):
            return self._whole
        rows = {request.id: self._first[request.id] + position for request in requests if request.id in self._first}
        return GrammarOutput(list(rows), self._whole.grammar_bitmask[list(rows.values())]) if rows else None


def sample_in_rounds(
    rows: Sequence[HostRow], sampler: HostSampler, append: Callable[[LiveRequest, int], None], masks: Masks
) -> HostTokens:
    """`append` is called with each token before the next is drawn."""
    rounds: list[HostSample] = []

    def draw(position: int, chosen: list[int]) -> list[int]:
        requests = [rows[index].request for index in chosen]
        logits = [rows[index].logits[position] for index in chosen]
        sample = sampler.sample(requests, logits, masks.at(position, requests))
        for request, token in zip(sample.requests, sample.tokens, strict=True):
            append(request, token)
        rounds.append(sample)
        token_of = dict(zip((request.id for request in sample.requests), sample.tokens, strict=True))
        return [token_of[request.id] for request in requests]

    tokens = accept_in_rounds([row.drafts for row in rows], draw)
    tokens_of = {row.request.id: own for row, own in zip(rows, tokens, strict=True)}
    requests = rounds[0].requests
    return HostTokens(requests, [tokens_of[request.id] for request in requests], _logprobs(rounds))


def _logprobs(rounds: Sequence[HostSample]) -> LogprobsLists | None:
    """Of all rounds, request by request."""
    if len(rounds) == 1 or all(sample.logprobs is None for sample in rounds):
        return rounds[0].logprobs
    places: list[list[tuple[LogprobsLists | None, int]]] = []  # of each request its (round's table, row)
    rows = [{request.id: row for row, request in enumerate(sample.requests)} for sample in rounds]
    for request in rounds[0].requests:
        tables = zip(rounds, rows, strict=True)
        places.append([(sample.logprobs, own[request.id]) for sample, own in tables if request.id in own])
    ends = np.cumsum([0, *map(len, places)])
    width = max(sample.logprobs.logprobs.shape[1] for sample in rounds if sample.logprobs is not None)
    ids = np.zeros((ends[-1], width), dtype=np.int64)
    values = np.zeros((ends[-1], width), dtype=np.float32)
    ranks = np.zeros(ends[-1], dtype=np.int64)
    for at, (table, row) in enumerate(place for own in places for place in own):
        if table is not None:  # else nobody in that round asked
            ids[at] = _widened(table.logprob_token_ids[row], width)
            values[at] = _widened(table.logprobs[row], width)
            ranks[at] = table.sampled_token_ranks[row]
    return LogprobsLists(ids, values, ranks, ends.tolist())


def _widened(row: NDArray[np.generic], width: int) -> NDArray[np.generic]:
    """Its own token again in the columns that only other rows have."""
    return np.concatenate([row, np.repeat(row[:1], width - len(row))])
