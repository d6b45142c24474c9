"""After a step: the draft on the device reads what stands of it, and looks ahead from the newest token of each row.

    run ─▶ tokens drawn, drafts accepted ─▶ pack_draft ─▶ Device.draft ─▶ drafts by request

Everything that a step wrote is to be read, of prompts and of rows that get no drafts too: a later request may find
these blocks by their prefix, and the draft's part of them must be as good as the target's. So the device is told of
every step, and may read when it is asked.

Knows rows, calls and the device. Knows no policy: the drafter says for which rows drafts are of use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuronserve.bucketing.pack import NO_DRAFT, StepPacker, places
from neuronserve.neuron_worker.device.base import Device, PackedBatch

if TYPE_CHECKING:
    from neuronserve.neuron_worker.drafter import Drafted, Drafter
    from neuronserve.neuron_worker.state import LiveRequest, ScheduledRow


@dataclass(frozen=True)
class Call:
    """One call of the device that was made. Its arrays are good until the next."""

    owners: Sequence[ScheduledRow]
    batch: PackedBatch
    seconds: float


class LookAhead:
    def __init__(self, packer: StepPacker, drafter: Drafter) -> None:
        self._packer = packer
        self._drafter = drafter

    def has_to_read(self, call: Call) -> bool:
        """Whether any row begins where the draft still drafts."""
        return any(self._drafter.is_within(owner.row.position) for owner in call.owners)

    def __call__(self, device: Device, call: Call, num_tokens: Mapping[str, int], *, drafts: bool) -> Drafted:
        """`num_tokens`: that each request got in this step. A row that is not drawn yet is read as far as it stands
        whatever will be drawn, and gets no drafts. `drafts`: whether any are wanted."""
        rows = [owner.row for owner in call.owners]
        standing = [num_tokens.get(owner.request.id, 1) for owner in call.owners]  # of a prompt all its tokens do
        newest = [self._newest(owner.request, num_tokens) if drafts else NO_DRAFT for owner in call.owners]
        request = self._packer.pack_draft(rows, call.batch.shape, standing, newest)
        said = device.draft(call.batch, request).tolist()
        where = zip(call.owners, places(rows, call.batch.shape), newest, strict=True)
        return {owner.request.id: said[place] for owner, place, token in where if token != NO_DRAFT}

    def _newest(self, request: LiveRequest, num_tokens: Mapping[str, int]) -> int:
        wanted = num_tokens.get(request.id) and self._drafter.needs_device(request)
        return request.output[-1] if wanted else NO_DRAFT
