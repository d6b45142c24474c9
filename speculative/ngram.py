"""Prompt lookup: what followed the last time the text ended like this.

The longest suffix of at most `longest` and at least `shortest` tokens that occurs earlier in prompt and output is
looked for, its latest occurrence is taken, and the tokens that followed it there are the drafts. Where they run into
the end of the text they go on with the drafts themselves, so a loop is drafted as a loop. Summaries, translations,
edits and code repeat their prompts; there it needs no second model (prompt lookup decoding, Saxena 2023).

Pure: an array of tokens in, a list of tokens out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

_SIZE = np.dtype(np.int32).itemsize


@dataclass(frozen=True, slots=True)
class Match:
    start: int  # where the text went on
    length: int  # tokens of its ending that stand before that, too

    def continued(self, tokens: Tokens, count: int) -> list[int]:
        """`count` tokens that may follow `tokens`, in which it was found."""
        period = len(tokens) - self.start
        found: list[int] = tokens[self.start : self.start + count].tolist()
        return [found[index % period] for index in range(count)]


def match(tokens: Tokens, shortest: int, longest: int) -> Match | None:
    """The latest earlier occurrence of the longest ending, of at most `longest` tokens; None: of fewer than
    `shortest`."""
    text = tokens.tobytes()
    earlier, best = text[:-_SIZE], None
    for length in range(max(shortest, 1), min(longest, len(tokens) - 1) + 1):
        start = _last(earlier, text[-length * _SIZE :])
        if start is None:
            break
        best = Match(start + length, length)
    return best


def _last(text: bytes, part: bytes) -> int | None:
    """The token at which `part` begins for the last time. In bytes, as the search for those is C."""
    at = text.rfind(part)
    while at > 0 and at % _SIZE:
        at = text.rfind(part, 0, at + len(part) - 1)
    return None if at < 0 else at // _SIZE
