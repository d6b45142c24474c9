"""Adaptive depth for an engine's requests: what their steps cost and what they kept, and whether the next one drafts.

A seeded request drafts in every step: a device may round in another way in another shape, and what such a request gets
is to depend on nothing but itself. The others draft beside it then, as the step is a wide one anyhow.

Knows requests and shapes. Decides by `speculative.depth`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from neuronserve.speculative.depth import Depth

if TYPE_CHECKING:
    from neuronserve.neuron_worker.look_ahead import Call
    from neuronserve.neuron_worker.state import LiveRequest


class Pace:
    def __init__(self, rows_of: Callable[[int], int]) -> None:
        """`rows_of`: how many rows a step of so many requests is compiled for."""
        self._rows_of = rows_of
        self._depth = Depth()
        self.draft_seconds = 0.0
        """Of the look ahead from which the next step's drafts come. Set by the runner."""

    def pays(self, requests: Sequence[LiveRequest], counts: Mapping[str, int]) -> bool:
        """Whether to draft so many tokens of these requests, which are the next step's."""
        if not any(counts.values()):
            return True  # and nothing is drafted
        if any(request.params.seed is not None and counts.get(request.id) for request in requests):
            return True
        expected = []
        for request in requests:
            if request.kept is None:
                request.kept = self._depth.new_row()
            expected.append(request.kept.share * counts.get(request.id, 0))
        return self._depth.pays(self._rows_of(len(requests)), expected)

    def saw(self, call: Call, num_tokens: Mapping[str, int]) -> None:
        """A step of one call, and the tokens that each of its requests got."""
        shape, seconds = call.batch.shape, call.seconds + self.draft_seconds
        self.draft_seconds = 0.0
        for owner in call.owners:
            if owner.drafts and owner.request.kept is not None:
                self._depth.kept(owner.request.kept, len(owner.drafts), num_tokens[owner.request.id] - 1)
        if shape.prefill_tokens == 0:
            has_drafts, tokens = shape.decode_width > 1, sum(num_tokens.values())
            self._depth.ran(shape.decode_rows, tokens, seconds, real_rows=len(call.owners), has_drafts=has_drafts)
