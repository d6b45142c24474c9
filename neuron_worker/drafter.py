"""Between two steps: asks the proposer for drafts of the requests that go on, and hands them to vLLM's scheduler.

Knows requests and their tokens. Knows no device, and not how drafts are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.outputs import DraftTokenIds

from neuronserve.speculative.proposer import Context, Proposer

if TYPE_CHECKING:
    from neuronserve.neuron_worker.state import LiveRequest, RequestState


class Drafter:
    def __init__(self, proposer: Proposer, num_tokens: int, state: RequestState) -> None:
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._state = state
        self.requests: Sequence[LiveRequest] = ()
        """Those that got tokens in the last step. Set by the runner."""

    def take(self) -> DraftTokenIds | None:
        requests, self.requests = self.requests, ()
        drafts = {request.id: found for request in requests if (found := self._propose(request))}
        return DraftTokenIds(list(drafts), list(drafts.values())) if drafts else None

    def _propose(self, request: LiveRequest) -> list[int]:
        most = min(self._num_tokens, self._num_wanted(request))
        return self._proposer.propose(Context(self._state.known_tokens(request), most)) if most > 0 else []

    def _num_wanted(self, request: LiveRequest) -> int:
        """Drafts that may still be of use: the next step gives a token without any."""
        if request.params.max_tokens is None:
            return self._num_tokens
        return request.params.max_tokens - len(request.output) - 1
