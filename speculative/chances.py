"""How often drafts turn out right, by where they come from.

A draft says little of itself; where it comes from says much. What followed an ending of eight tokens the last time
follows it again nine times in ten, what followed a single token one time in four, and a head that guesses is right as
often as it was for the requests before. So drafts of one source share their chances, over all requests: an answer of
fifty tokens would end before its own were known.

Pure: counts in, shares out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GUESSED = 0
"""The source of what a draft on the device says; that of looked up drafts is the number of tokens that matched."""

LONGEST = 8
"""Endings of more tokens count as endings of so many."""

FORGET = 0.99
"""What is left of a source's counts with each count that is added."""

ASSUMED = 16
"""Drafts that the chances below count for."""

FIRST_ASSUMED = {GUESSED: 0.4, 1: 0.25, 2: 0.5, 3: 0.65, 4: 0.7, 5: 0.75, 6: 0.75, 7: 0.8, LONGEST: 0.9}
"""Of the first draft after the text, before any was seen. About those of SmolLM2-135M-Instruct's answers to Spec-Bench
(`docs/performance.md`)."""

NEXT_ASSUMED = {GUESSED: 0.4, 1: 0.6, 2: 0.7, 3: 0.7, 4: 0.75, 5: 0.75, 6: 0.8, 7: 0.8, LONGEST: 0.9}
"""Of each draft after one that was right."""


@dataclass
class Counts:
    """Of drafts at one place after the text, those before them all right."""

    right: float
    all: float

    def add(self, is_right: bool) -> None:
        self.right = FORGET * self.right + is_right
        self.all = FORGET * self.all + 1


@dataclass
class Chances:
    """One for all requests of an engine."""

    _places: dict[int, list[Counts]] = field(default_factory=dict)

    def kept(self, source: int, drafted: int, kept: int) -> None:
        """Of `drafted` tokens in a row the first `kept` were right."""
        places = self._at_least(source, drafted)
        for place in range(min(kept + 1, drafted)):
            places[place].add(place < kept)

    def expected(self, source: int, count: int) -> list[float]:
        """That so many drafts in a row are right, for 1 to `count`; never rising."""
        chance, found = 1.0, []
        for place in self._at_least(source, count)[:count]:
            chance *= place.right / place.all
            found.append(chance)
        return found

    def _at_least(self, source: int, count: int) -> list[Counts]:
        source = min(source, LONGEST)
        places = self._places.setdefault(source, [])
        while len(places) < count:
            assumed = NEXT_ASSUMED if places else FIRST_ASSUMED
            places.append(Counts(ASSUMED * assumed[source], ASSUMED))
        return places
