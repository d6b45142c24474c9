"""Between two steps: asks the proposer for drafts of the requests that go on, and hands them to vLLM's scheduler.

    propose ─▶ choose how many of each ─▶ (the draft on the device looks ahead) ─▶ take

Knows requests and their tokens. Knows no device, and not how drafts are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.outputs import DraftTokenIds

from neuronserve.speculative.proposer import NOTHING, Context, Proposal, Proposer

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
        """`max_length`: of a sequence with its drafts; None: the model's own limit. `pace`: how many drafts pay; None:
        all are taken."""
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._state = state
        self._max_length = max_length
        self.pace = pace
        self.requests: Sequence[LiveRequest] = ()
        """Those that got tokens in the last step. Set by the runner."""
        self._proposals: dict[str, tuple[int, Proposal]] = {}  # and how long the request was
        self._counts: Mapping[str, int] | None = None  # drafts of each request; None: not chosen yet

    def asks_device(self) -> bool:
        """Whether the draft on the device is to look ahead for any request of the step. Chooses what is drafted."""
        counts = self._chosen()
        return any(self._proposal(request).asks_device and counts.get(request.id) for request in self.requests)

    def needs_device(self, request: LiveRequest) -> bool:
        """Whether a draft on the device is to look ahead for the request; where the step is not over, now or never."""
        if self._counts is not None:
            is_wanted = bool(self._counts.get(request.id))
        else:
            is_wanted = self.pace is None or self.pace.may_ask(request)
        return is_wanted and self._proposal(request).asks_device

    def take(self, drafted: Drafted | None = None) -> DraftTokenIds | None:
        said = drafted or {}
        counts = self._chosen()
        found = {
            request.id: tokens
            for request in self.requests
            if (tokens := self._tokens(request, counts.get(request.id, 0), said.get(request.id)))
        }
        self.forget()
        return DraftTokenIds(list(found), list(found.values())) if found else None

    def forget(self) -> None:
        """Nothing is drafted for the requests of the last step."""
        self.requests, self._counts = (), None
        self._proposals.clear()

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

    def _chosen(self) -> Mapping[str, int]:
        if self._counts is None:
            offers = {request.id: self._offer(request) for request in self.requests}
            self._counts = offers if self.pace is None else self.pace.choose(self.requests, offers)
        return self._counts

    def _offer(self, request: LiveRequest) -> int:
        """How many drafts there may be. The request remembers what was proposed, as its pace learns from it."""
        request.proposed = proposal = self._proposal(request)
        return self.most(request) if proposal.asks_device else len(proposal.tokens)

    def _proposal(self, request: LiveRequest) -> Proposal:
        length, proposal = self._proposals.get(request.id, (0, NOTHING))
        if length != request.num_tokens:
            most = self.most(request)
            proposal = self._proposer.propose(Context(self._state.known_tokens(request), most)) if most else NOTHING
            self._proposals[request.id] = request.num_tokens, proposal
        return proposal

    def _tokens(self, request: LiveRequest, count: int, said: Sequence[int] | None) -> list[int]:
        """At most `count` drafts."""
        proposal = self._proposal(request)
        if count and proposal.asks_device:
            context = Context(self._state.known_tokens(request), self.most(request), said)
            request.proposed = proposal = self._proposer.propose(context)
        return list(proposal.tokens[:count])
