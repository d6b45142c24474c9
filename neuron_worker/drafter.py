"""Between two steps: asks the proposer for drafts of the requests that go on, and hands them to vLLM's scheduler.

Knows requests and their tokens. Knows no device, and not how drafts are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.outputs import DraftTokenIds

from neuronserve.speculative.proposer import Context, Proposer

if TYPE_CHECKING:
    from neuronserve.neuron_worker.pace import Pace
    from neuronserve.neuron_worker.state import LiveRequest, RequestState

Drafted = Mapping[str, Sequence[int]]
"""What a draft on the device has said, by request id."""


class Drafter:
    def __init__(
        self,
        proposer: Proposer,
        num_tokens: int,
        state: RequestState,
        max_length: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`max_length`: of a sequence with its drafts; None: the model's own limit. `pace`: whether drafts pay; None:
        they are always made."""
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._state = state
        self._max_length = max_length
        self.pace = pace
        self.requests: Sequence[LiveRequest] = ()
        """Those that got tokens in the last step. Set by the runner."""

    def take(self, drafted: Drafted | None = None) -> DraftTokenIds | None:
        requests, self.requests = self.requests, ()
        said = drafted or {}
        drafts = {request.id: found for request in requests if (found := self._propose(request, said.get(request.id)))}
        if not drafts or (drafted is None and not self._pays(requests, {id: len(own) for id, own in drafts.items()})):
            return None
        return DraftTokenIds(list(drafts), list(drafts.values()))

    def is_worth_looking_ahead(self) -> bool:
        """Asked before a draft on the device is. Where not, nothing is drafted by anyone."""
        pays = self._pays(self.requests, {request.id: self.most(request) for request in self.requests})
        if not pays:
            self.requests = ()
        return pays

    def needs_device(self, request: LiveRequest) -> bool:
        """Whether a draft on the device is to look ahead for the request."""
        most = self.most(request)
        return bool(most) and self._proposer.asks_device(Context(self._state.known_tokens(request), most))

    def most(self, request: LiveRequest) -> int:
        """Drafts that may be of use in the request's next step, which gives a token without any."""
        most = min(self._num_tokens, self._state.max_model_len - request.num_tokens - 1)
        if request.params.max_tokens is not None:
            most = min(most, request.params.max_tokens - len(request.output) - 1)
        if self._max_length is not None:
            most = min(most, self._max_length - request.num_tokens)
        return max(most, 0)

    def is_within(self, position: int) -> bool:
        """Whether a draft need know what stands there."""
        return self._max_length is None or position < self._max_length

    def _pays(self, requests: Sequence[LiveRequest], counts: Mapping[str, int]) -> bool:
        return self.pace is None or self.pace.pays(requests, counts)

    def _propose(self, request: LiveRequest, drafted: Sequence[int] | None) -> list[int]:
        most = self.most(request)
        return self._proposer.propose(Context(self._state.known_tokens(request), most, drafted)) if most else []
