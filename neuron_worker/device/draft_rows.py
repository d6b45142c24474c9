"""What a draft reads after a step, row by row: a `DraftRequest` beside its batch, checked.

For devices that draft in Python; the C kernels read the same arrays themselves. Imports numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .base import DeviceOptions, DraftRequest, Int32, PackedBatch, StepShape
from .errors import DeviceError, DoesNotFit, LoadError


@dataclass(frozen=True)
class DraftRow:
    blocks: Int32
    position: int  # of the first token
    tokens: Int32  # those of this step that stand
    newest: int  # the token after them, or -1

    @property
    def end(self) -> int:
        """Where `newest` stands."""
        return self.position + len(self.tokens)


def draft_rows(batch: PackedBatch, request: DraftRequest, vocab_size: int) -> list[DraftRow]:
    """[N], padding rows too; `DoesNotFit` where the request does not belong to the batch."""
    _check_sizes(batch, request)
    newest = request.newest.tolist()
    rows = [
        DraftRow(blocks, position, tokens, newest[place])
        for place, (blocks, position, tokens) in enumerate(_standing(batch, request))
    ]
    for place, row in enumerate(rows):
        if row.newest < 0:
            continue
        if not len(row.tokens):
            raise DoesNotFit(f"row {place}: newest token {row.newest}, but no token of the row stands")
        if row.newest >= vocab_size:
            raise DoesNotFit(f"row {place}: newest token {row.newest}, the vocabulary has 0 to {vocab_size - 1}")
    return rows


def check_draft_options(draft_dir: str, options: DeviceOptions) -> None:
    if options.num_drafts < 1:
        raise LoadError(f"draft={draft_dir!r} with num_drafts={options.num_drafts}; give at least 1")


def no_draft() -> DeviceError:
    return DeviceError("draft: no draft is loaded; give load a draft_dir, and num_drafts in its options")


def not_the_last(shape: StepShape) -> DeviceError:
    return DeviceError(f"draft after a step of {shape}, which is not the last one that was run")


def _standing(batch: PackedBatch, request: DraftRequest) -> Iterator[tuple[Int32, int, Int32]]:
    if (decode := batch.decode) is not None:
        counts = zip(request.lengths.tolist(), decode.lengths.tolist(), decode.positions.tolist(), strict=True)
        for row, (length, computed, position) in enumerate(counts):
            if not 0 <= length <= computed:
                raise DoesNotFit(f"decode row {row}: {length} tokens stand, the step had {computed}")
            yield decode.blocks[row], position, decode.tokens[row, :length]
    if (prefill := batch.prefill) is not None:
        places = zip(prefill.starts.tolist(), prefill.positions.tolist(), prefill.lengths.tolist(), strict=True)
        for row, (begin, position, length) in enumerate(places):
            yield prefill.blocks[row], position, prefill.tokens[begin : begin + length]


def _check_sizes(batch: PackedBatch, request: DraftRequest) -> None:
    wanted = {"lengths": batch.shape.decode_rows, "newest": len(batch.sampling.want)}
    for name, count in wanted.items():
        values = getattr(request, name)
        if values.shape != (count,) or values.dtype != np.int32:
            raise DoesNotFit(f"draft.{name} is {values.dtype} {values.shape}, the step needs int32 ({count},)")
