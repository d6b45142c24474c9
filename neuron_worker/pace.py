"""Adaptive depth for an engine's requests: what their steps cost, what they kept, and how much the next one drafts.

A request that asked for a seed drafts in every step: a device may round in another way in another shape, and what such
a request gets is to depend on nothing but itself.

Knows requests and shapes. Decides by `speculative.depth`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingType

from neuronserve.neuron_worker.tgi_rules import DRAWN_SEED
from neuronserve.speculative.depth import Depth, Offer
from neuronserve.speculative.proposer import NOTHING

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from neuronserve.neuron_worker.look_ahead import Call
    from neuronserve.neuron_worker.state import LiveRequest, ScheduledRow


APART = 16
"""Steps of up to so many requests have costs of their own, as a device may skip the padding of a shape; above, those
compiled for as many rows."""


class Pace:
    def __init__(self, compiled_rows_of: Callable[[int], int]) -> None:
        """`compiled_rows_of`: how many rows a step of so many requests is compiled for."""
        self._compiled_rows_of = compiled_rows_of
        self._depth = Depth()
        self._num_requests = 0  # of the step before the draft was asked
        self._asking = 0.0  # seconds, for the next step's drafts
        self._asks = True  # the latest choice, a draft on the device

    def choose(self, requests: Sequence[LiveRequest], counts: Mapping[str, int]) -> Mapping[str, int]:
        """Of so many drafts that each request may have, all that it gets."""
        self._num_requests, self._asking = len(requests), 0.0
        offering = [request for request in requests if counts[request.id]]
        if not offering:
            return {}
        offers = [
            Offer(request.proposed.source, counts[request.id], _asked_for_a_seed(request.params))
            for request in offering
        ]
        chosen = self._depth.choose(self._rows_of(len(requests)), len(requests), offers)
        self._asks = any(count and offer.asks_device for offer, count in zip(offers, chosen, strict=True))
        return {request.id: count for request, count in zip(offering, chosen, strict=True) if count}

    def may_ask(self, request: LiveRequest) -> bool:
        """Whether the draft on the device is to look ahead for a request before a step is over, when nothing can be
        chosen yet: where the step before asked it for anything."""
        return self._asks or _asked_for_a_seed(request.params)

    def asked(self, num_asked: int, seconds: float) -> None:
        """The draft on the device looked ahead for so many of the requests."""
        if num_asked:
            self._asking = seconds
            self._depth.asked(self._rows_of(self._num_requests), num_asked, seconds)

    def saw(self, call: Call, num_tokens: Mapping[str, int], host_seconds: float = 0.0) -> None:
        """A step of one call, the tokens that each of its requests got, and how long rows took that the host samples:
        position by position, so drafts cost there too."""
        num_rows = self._rows_of(len(call.owners))
        for owner in call.owners:
            self._learn(owner, num_tokens.get(owner.request.id, 0))
        if call.batch.shape.prefill_tokens == 0:
            num_drafts = sum(len(owner.drafts) for owner in call.owners)
            self._depth.ran(num_rows, num_drafts, call.seconds + host_seconds, self._asking)
        self._asking = 0.0

    def _rows_of(self, num_requests: int) -> int:
        return num_requests if num_requests <= APART else self._compiled_rows_of(num_requests)

    def _learn(self, owner: ScheduledRow, num_tokens: int) -> None:
        """From drafts that were verified, and from those that were looked up for nothing: the first is right or wrong
        whether it was asked or not."""
        request = owner.request
        proposed, request.proposed = request.proposed, NOTHING
        if not num_tokens:
            return
        if owner.drafts:
            self._depth.chances.kept(proposed.source, len(owner.drafts), num_tokens - 1)
        elif proposed.tokens:
            self._depth.chances.kept(proposed.source, 1, int(request.output[-num_tokens] == proposed.tokens[0]))


def _asked_for_a_seed(params: SamplingParams) -> bool:
    is_drawn = (params.extra_args or {}).get(DRAWN_SEED, False)
    return params.sampling_type == SamplingType.RANDOM_SEED and not is_drawn
