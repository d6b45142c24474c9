"""Looks after a device while no step runs: one that has died is replaced before anybody asks for it.

vLLM's engine waits for requests in its own thread, so the looking is done in another. A step and a look never
overlap: whichever comes second waits, and a request that arrives during a restart is served after it.

Knows when to look, not what a device is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

logger = logging.getLogger(__name__)

PERIOD = 1.0
LONGEST_WAIT = 10.0
"""For a look that is under way when the worker ends: a restart may take as long as loading a model."""


class IdleWatch:
    def __init__(self, look: Callable[[], None], give_up: Callable[[], None], period: float = PERIOD) -> None:
        """`look` is called every `period` seconds, `give_up` once, when that raised what no later look can mend."""
        self._look = look
        self._give_up = give_up
        self._period = period
        self._busy = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="idle-watch")
        self._thread.start()

    def step(self) -> AbstractContextManager[bool]:
        """Around everything that uses the device."""
        return self._busy

    def stop(self) -> bool:
        """No look from here on; False: one is under way and takes long."""
        self._stop.set()
        self._thread.join(LONGEST_WAIT)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        while not self._stop.wait(self._period):
            with self._busy:
                if self._stop.is_set():
                    return
                try:
                    self._look()
                except Exception:
                    logger.exception("the idle device cannot be looked after any more")
                    break
        else:
            return
        self._give_up()
