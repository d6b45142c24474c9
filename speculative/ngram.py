"""Prompt lookup: what followed the last time the text ended like this.

The longest suffix of at most `longest` and at least `shortest` tokens that occurs earlier in prompt and output is
looked for, its latest occurrence is taken, and the tokens that followed it there are the drafts. Where they run into
the end of the text they go on with the drafts themselves, so a loop is drafted as a loop. Summaries, translations,
edits and code repeat their prompts; there it needs no second model (prompt lookup decoding, Saxena 2023).

Pure: an array of tokens in, a list of tokens out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


def lookup(tokens: Tokens, shortest: int, longest: int, count: int) -> list[int]:
    """`count` tokens that may follow `tokens`; none where no suffix of `shortest` tokens occurs again."""
    start = _after_match(tokens, shortest, longest)
    if start is None or count < 1:
        return []
    period = len(tokens) - start
    found: list[int] = tokens[start : start + count].tolist()
    return [found[index % period] for index in range(count)]


def _after_match(tokens: Tokens, shortest: int, longest: int) -> int | None:
    """Where the text goes on after the latest earlier occurrence of its longest known suffix."""
    end = len(tokens) - 1
    best = None
    ends = np.arange(0)  # last positions of the occurrences of the suffix
    for length in range(1, min(longest, end) + 1):
        wanted = tokens[end - length + 1]
        if length == 1:
            ends = np.flatnonzero(tokens[:end] == wanted)
        else:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - length + 1] == wanted]
        if not len(ends):
            break
        if length >= shortest:
            best = int(ends[-1]) + 1
    return best
