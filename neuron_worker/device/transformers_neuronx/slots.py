"""Which slots hold a sequence, and how far.

The library computes every slot in each decode and writes position 0 of those it was given no row for (with a draft,
the first k+1 positions). So a slot that a decode leaves out is lost until a prompt fills it again: usually its
sequence is over, which nobody tells the device. A row that comes back all the same is refused, since it would be
answered from a damaged cache. Repeating the row of such a slot would keep its cache whole, but also keep every later
step at the graph of the longest sequence that ever ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import DeviceError


class Slots:
    def __init__(self, num_slots: int) -> None:
        self._lengths: dict[int, int] = {}  # of those that hold a sequence
        self._lost: set[int] = set()
        self._num_slots = num_slots

    def check(self, slots: list[int]) -> None:
        """Slots named in one call: there, and each once."""
        for slot in slots:
            if not 0 <= slot < self._num_slots:
                raise DeviceError(f"block {slot + 1} is no slot: there are {self._num_slots}, blocks 1 and up")
        if len(set(slots)) != len(slots):
            raise DeviceError(f"two rows of one call share a slot: {sorted(slots)}")

    def check_decode(self, rows: Iterable[tuple[int, int]]) -> None:
        """(slot, position) of each row; the position follows what the slot holds."""
        for slot, position in rows:
            if slot in self._lost:
                raise DeviceError(
                    f"slot {slot} was left out of an earlier decode, which overwrote its first position; every running "
                    "sequence must be in every decode, and this one must be read again from its first token"
                )
            held = self._lengths.get(slot, 0)
            if held != position:
                raise DeviceError(f"slot {slot} holds {held} tokens, a row decodes at position {position}")

    def prefilled(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        self._lost.discard(slot)

    def decoded(self, counts: dict[int, int]) -> None:
        """Tokens that each slot of a decode moved on by. All others are lost."""
        for slot in [slot for slot in self._lengths if slot not in counts]:
            del self._lengths[slot]
            self._lost.add(slot)
        for slot, count in counts.items():
            self._lengths[slot] += count

    def forget(self) -> None:
        """Nothing the cache holds can be relied on."""
        self._lost |= set(self._lengths)
        self._lengths.clear()
