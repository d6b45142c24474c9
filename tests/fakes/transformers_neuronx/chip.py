"""The chip as far as a test may look at it: cache cells, sampling tables, and a record of what happened.

Not part of the library's surface. `chips` lists every model that was brought to the chip, oldest first.
"""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from . import answers

EMPTY, WRITTEN, GARBAGE = 0, 1, 2

chips = []
calls = []
"""(model, verb) in order: to_neuron, cpu_compile, save, load, reset, update_generation_config."""

seconds_per_launch = 0.0


@dataclass(frozen=True)
class Launch:
    """One graph run."""

    kind: str  # prefill, decode or speculate
    bucket: int
    slots: tuple  # the rows that were given, not those that were idle


class Chip:
    """One model's share of the chip."""

    def __init__(self, model, num_slots, num_positions, vocab_size):
        self.model = model
        self.cells = np.zeros((num_slots, num_positions), np.uint64)
        self.marks = np.zeros((num_slots, num_positions), np.uint8)
        self.vocab_size = vocab_size
        self.disagrees_every = getattr(model.config, "fake_disagrees_every", 0)
        self.tables = {}  # top_k, top_p, temperature, top_p_min_tokens
        self.random = np.random.default_rng(0)
        self.launches = []
        self.stale_reads = []  # (slot, position) that held garbage, or nothing, when a row that was given read it
        self.lost_writes = []  # (slot, position) outside the cache
        self.divisions_by_zero = 0
        self._given = set()
        self._busy = threading.Lock()
        chips.append(self)

    @contextmanager
    def launch(self, kind, bucket, slots):
        """Two at a time would share input buffers."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("two threads run graphs of one model: its device buffers are shared")
        try:
            self.launches.append(Launch(kind, bucket, tuple(slots)))
            self._given = set(slots)
            if seconds_per_launch:
                time.sleep(seconds_per_launch)
            yield
        finally:
            self._busy.release()

    def clear(self):
        self.cells[:], self.marks[:] = 0, EMPTY

    def digest(self, slot, length):
        """Of the cells before position `length`, as attention reads them."""
        if not self.holds(slot, length - 1):
            return 0
        unwritten = np.flatnonzero(self.marks[slot, :length] != WRITTEN)
        if slot in self._given:
            self.stale_reads += [(slot, int(position)) for position in unwritten]
        return answers.digest(self.cells[slot, :length])

    def holds(self, slot, position):
        return 0 <= slot < len(self.cells) and position < self.cells.shape[1]

    def write(self, slot, position, cell, mark=WRITTEN):
        if not self.holds(slot, position):
            self.lost_writes.append((slot, position))
            return
        self.cells[slot, position], self.marks[slot, position] = cell, mark

    def write_tokens(self, slot, position, tokens):
        """Cells of consecutive tokens; the digest after each of them."""
        before, digests = self.digest(slot, position), []
        for offset, token in enumerate(tokens):
            cell = answers.make_cell(token, position + offset, before)
            before = answers.extend(before, cell, position + offset)
            self.write(slot, position + offset, cell)
            digests.append(before)
        return digests

    def write_garbage(self, slot, start, end):
        """What padding leaves behind."""
        for position in range(start, end):
            self.write(slot, position, answers.make_cell(0, position, 0xBAD), GARBAGE)

    def logits(self, digest):
        return answers.logits(digest, self.vocab_size, self.disagrees_every)

    def draw(self, digest, slot, config):
        """The token the compiled sampler picks for the row of this slot."""
        scores = self.logits(digest)
        if not config.do_sample:
            return int(scores.argmax())
        order = np.argsort(-scores, kind="stable")[: config.global_top_k or None]
        top_k, top_p, temperature, min_tokens = (self._parameter(name, slot, config) for name in PARAMETERS)
        kept = _kept(scores[order].astype(np.float64), top_k, top_p, temperature, min_tokens)
        if not np.isfinite(kept).all():
            self.divisions_by_zero += 1
            return int(order[-1])
        uniform = 0.5 if config.deterministic else self.random.random()
        return int(order[min(int((np.cumsum(kept) < uniform).sum()), len(order) - 1)])

    def _parameter(self, name, slot, config):
        value = self.tables[name] if config.dynamic else getattr(config, name)
        return value[slot] if config.per_batch_line else value


PARAMETERS = ("top_k", "top_p", "temperature", "top_p_min_tokens")
_DROPPED = -30000.0


def _kept(scores, top_k, top_p, temperature, min_tokens):
    """Probabilities of the candidates, likeliest first; those that are dropped keep a share of nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = scores / temperature
        scores[max(top_k, 0) :] = _DROPPED
        reached = np.cumsum(_softmax(scores))
        scores[max(int((reached < top_p).sum()), min_tokens - 1) + 1 :] = _DROPPED
        return _softmax(scores)


def _softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
