"""When an answer ends: TGI's rule, token by token. Pure.

The tests come in the order length, end-of-text token, stop sequence, so at the last allowed token it is the length
that ended the answer. A stop sequence is looked for at the end of all token texts so far, one newline after it
allowed; it is never cut out, and one in the middle of a token's text does not match.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .schemas import FinishReason

_LONGEST, _KEPT = 300, 200  # characters looked at


class Stopping:
    def __init__(self, stop: Sequence[str], max_new_tokens: int) -> None:
        self._patterns = [re.compile(re.escape(text) + "$") for text in stop]
        self._max_new_tokens = max_new_tokens

    def __call__(self, num_tokens: int, text: str, *, is_end: bool) -> FinishReason | None:
        """`is_end`: the engine ended here, at an end-of-text token."""
        if num_tokens >= self._max_new_tokens:
            return "length"
        if is_end:
            return "eos_token"
        tail = text[-_KEPT:] if len(text) > _LONGEST else text
        return "stop_sequence" if any(pattern.search(tail) for pattern in self._patterns) else None
