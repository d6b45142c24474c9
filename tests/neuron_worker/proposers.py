"""Proposers for tests on the arithmetic device: some that know the answers, and one that watches the device's draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from neuronserve.neuron_worker.device.arithmetic import answer
from neuronserve.neuron_worker.device.arithmetic_cache import ArithmeticDraft
from neuronserve.neuron_worker.drafter import Drafter
from neuronserve.speculative.proposer import ASK_DEVICE, Context, DeviceDraft, Proposal

from .engine import Engine, expected
from .tiny_model import VOCAB_SIZE

NUM_DRAFTS = 4

DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": {"num_hidden_layers": 1},
    "eagle": {"is_eagle": True, "num_hidden_layers": 1},
}
"""What their config.json has."""


class Oracle:
    """Drafts of which the first `num_right(context)` are what greedy decoding will say."""

    def __init__(self, num_right: Callable[[int], int]) -> None:
        self._num_right = num_right

    def propose(self, context: Context) -> Proposal:
        drafts = expected(context.tokens.tolist(), context.most)
        right = self._num_right(len(context.tokens))
        return Proposal(drafts[:right] + [3 + (draft - 2) % 61 for draft in drafts[right:]])


class InStep:
    """A draft on the device, whose every word must be what it would say had it read nothing but the request itself:
    after a prefix hit, a chunk or a preemption, and whatever was rejected before."""

    def __init__(self, *, may_be_silent: bool = False) -> None:
        self._may_be_silent = may_be_silent
        self._unanswered: set[bytes] = set()

    def propose(self, context: Context) -> Proposal:
        text = context.tokens.tobytes()
        if context.drafted is None:
            assert self._may_be_silent or text not in self._unanswered, "the device was not asked"
            self._unanswered.add(text)
            return ASK_DEVICE
        self._unanswered.discard(text)
        assert list(context.drafted)[: context.most] == guesses(context.tokens.tolist(), context.most)
        return DeviceDraft().propose(context)


class InTurns(InStep):
    """Asks the device for every second step's drafts alone; its own for the others are wrong."""

    def propose(self, context: Context) -> Proposal:
        if len(context.tokens) % 2 == 0:
            return super().propose(context)
        assert context.drafted is None, "the device was asked"
        return Oracle(lambda _: 0).propose(context)


def guesses(tokens: list[int], count: int) -> list[int]:
    draft = ArithmeticDraft(lambda context: answer(context, VOCAB_SIZE), VOCAB_SIZE, count)
    known = list(tokens)
    for _ in range(count):
        known.append(draft.guess(np.array(known, dtype=np.int64)))
    return known[len(tokens) :]


def drafter_of(engine: Engine) -> Drafter:
    drafter = engine.worker.runner._drafter
    assert drafter is not None
    return drafter
