"""What a draft runs after a step of one shape: all its rounds as one program, in one call into the library.

It reads the step's own arrays where the step found them. A call makes no array.
"""

from __future__ import annotations

import numpy as np

from ..base import DeviceOptions, DraftRequest, Int32, PackedBatch
from .library import Draft, Session, address
from .native_ops import Bound, draft_tokens
from .program import BoundProgram, checked, native_program


class DraftProgram:
    """A draft's recording bound to the shape of `step`, with the session's memory reserved for it."""

    def __init__(self, step: BoundProgram, bound: Bound, options: DeviceOptions, vocab: int, session: Session) -> None:
        shape = step.shape
        self._step = step
        self._bound = bound  # its operations are what the program points at
        self._session = session
        self._request: DraftRequest | None = None
        self._drafts: Int32 = np.zeros((step.num_rows, options.num_drafts), dtype=np.int32)
        self._draft = Draft(drafts=address(self._drafts), num_drafts=options.num_drafts)
        self._program = native_program(shape, step.num_prompts, bound, options, vocab, cache="draft")
        num_tokens = draft_tokens(shape, step.num_prompts)
        session.reserve(bound.workspace_bytes, bound.scratch_bytes, len(bound.ops), num_tokens, max(step.num_rows, 1))

    def run(self, batch: PackedBatch, request: DraftRequest) -> Int32:
        """[N, k], valid until the next run."""
        self._step.point(batch)
        if request is not self._request:
            self._request = None
            rows, places = self._step.shape.decode_rows, self._step.num_rows
            self._draft.lengths = checked(request.lengths, "draft.lengths", (rows,), np.int32)
            self._draft.newest = checked(request.newest, "draft.newest", (places,), np.int32)
            self._request = request
        self._session.draft(self._program, self._step.native_batch, self._draft)
        return self._drafts

    def warm(self, batch: PackedBatch) -> None:
        """A run over nothing but padding."""
        nothing = np.zeros(self._step.shape.decode_rows, np.int32)
        self.run(batch, DraftRequest(nothing, np.full(self._step.num_rows, -1, np.int32)))
