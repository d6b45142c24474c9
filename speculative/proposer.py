"""Who proposes drafts: one verb, whatever is behind it.

    after a step ── propose(Context) ──▶ drafts, or the wish to ask the device ── the next step ──▶ verify

Prompt lookup reads the tokens. A draft model or an EAGLE head runs on the device, in a call after the target's; what it
said reaches its proposer as `Context.drafted`. An EAGLE head is asked only where the text does not repeat itself. A
device that drafts and verifies inside one call has nothing to say in advance: its proposer asks for room. Either way a
proposer may give fewer drafts than it may, or none; wrong drafts cost time and never a token.

Knows no requests, no engine and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .chances import GUESSED
from .ngram import Tokens, match
from .settings import NGRAM, Speculation
from .verify import PLACEHOLDER

SHORTEST_BESIDE_A_HEAD, LONGEST_BESIDE_A_HEAD = 2, 8
"""Endings, in tokens, that are followed before a head is asked."""


@dataclass(frozen=True, slots=True)
class Context:
    """One request between two steps. Filled by the drafter."""

    tokens: Tokens  # all known ones, the accepted ones of the last step included; a view
    most: int  # drafts that can be of use, at least 1
    drafted: Sequence[int] | None = None  # by a draft on the device, for what follows `tokens`; None: not asked yet


@dataclass(frozen=True, slots=True)
class Proposal:
    """What may follow a request's tokens. Read by the drafter."""

    tokens: Sequence[int] = ()  # the next one first, at most `Context.most`
    source: int = GUESSED  # see `chances`
    asks_device: bool = False  # for tokens; propose again with what it says


NOTHING = Proposal()
ASK_DEVICE = Proposal(asks_device=True)


class Proposer(Protocol):
    def propose(self, context: Context) -> Proposal:
        """At most `context.most` tokens, fewer or none where it knows none. One that asks the device is called again
        with `context.drafted`, should the device be asked."""


@dataclass(frozen=True)
class PromptLookup:
    shortest: int
    longest: int

    def propose(self, context: Context) -> Proposal:
        found = match(context.tokens, self.shortest, self.longest)
        return NOTHING if found is None else Proposal(found.continued(context.tokens, context.most), found.length)


class DeviceDraft:
    def propose(self, context: Context) -> Proposal:
        return ASK_DEVICE if context.drafted is None else Proposal(context.drafted[: context.most])


@dataclass(frozen=True)
class LookupFirst:
    """A loop, a quotation or a name is copied further than a small head looks ahead, and for nothing: an ending of a
    few tokens that occurred before is followed, and the draft on the device is asked for the rest."""

    lookup: Proposer
    draft: Proposer

    def propose(self, context: Context) -> Proposal:
        # The device was asked where nothing was found, so what it said is not looked up again.
        found = self.lookup.propose(context) if context.drafted is None else NOTHING
        return found if found.tokens else self.draft.propose(context)


class FusedDraft:
    """Placeholders, so that as many positions are scheduled as the device's call may fill."""

    def propose(self, context: Context) -> Proposal:
        return Proposal([PLACEHOLDER] * context.most)


def make_proposer(asked: Speculation, *, is_fused: bool = False) -> Proposer:
    """`is_fused`: the draft is part of the device's step."""
    if is_fused:
        return FusedDraft()
    if asked.method == NGRAM:
        return PromptLookup(asked.shortest_match, asked.longest_match)
    if asked.looks_up_first:
        return LookupFirst(PromptLookup(SHORTEST_BESIDE_A_HEAD, LONGEST_BESIDE_A_HEAD), DeviceDraft())
    return DeviceDraft()
