"""Which drafted tokens stand, and what follows them. Pure: tokens in, tokens out.

The rule of speculative sampling (Leviathan et al. 2023, Chen et al. 2023): a draft d, proposed with probability q(d),
is accepted with probability min(1, p(d) / q(d)), p being the target's distribution there; what replaces a rejected
draft is drawn from max(0, p - q), normalised. Our drafts are greedy, so q is 1 at d and 0 elsewhere: d is accepted with
probability p(d), and its replacement is drawn from p without d.

One draw does both. Let x be drawn from p, as plain sampling would draw it. x is d with probability p(d): the draft is
accepted. Else x is distributed as p without d: x is the replacement. So *draw at every position as if nothing had been
drafted, and keep the tokens up to the first that is not its draft*, that one included. Temperature, limits, penalties
and grammars change p, and nothing here; greedy decoding is the case where p has one token.

It follows that speculation changes no random number: a draw keyed by (seed, position) gives a seeded request the very
tokens it would have got without drafts, whatever was drafted and whoever shares the batch.

Knows no engine, no device, no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PLACEHOLDER = -1
"""Where a scheduler wants a draft and nobody had one. Never accepted, never computed, not counted as drafted."""


def real_drafts(drafts: Sequence[int]) -> Sequence[int]:
    """Those before the first placeholder; what lies behind it could not be accepted."""
    return drafts[: drafts.index(PLACEHOLDER)] if PLACEHOLDER in drafts else drafts


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens of a row. `drawn[i]`: from the target's distribution after `drafts[:i]`, one more than drafts."""
    for index, draft in enumerate(drafts):
        if drawn[index] != draft:
            return list(drawn[: index + 1])
    return list(drawn[: len(drafts) + 1])


Draw = Callable[[int, list[int]], Sequence[int]]
"""(position in the step, rows) -> a token for each of these rows, its earlier tokens being what was drawn before."""


def accept_in_rounds(drafts: Sequence[Sequence[int]], draw: Draw) -> list[list[int]]:
    """The tokens of each row, where a draw depends on the tokens before it (penalties, say): position by position, of
    the rows whose drafts have all been right so far."""
    tokens: list[list[int]] = [[] for _ in drafts]
    rows, position = list(range(len(drafts))), 0
    while rows:
        for row, token in zip(rows, draw(position, rows), strict=True):
            tokens[row].append(token)
        rows = [row for row in rows if drafts[row][position : position + 1] == tokens[row][position : position + 1]]
        position += 1
    return tokens
