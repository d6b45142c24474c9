"""A lost device comes back, or the server gives up: so many attempts in a row, with growing pauses between them.

A step that works starts the count again. When the attempts are used up `EngineGivesUp` leaves the worker: the one
error that vLLM takes for the end of its engine, after which `/health` fails and the server exits.

Knows how to ask for a device, not what one is made of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from neuronserve.neuron_worker.device.base import Device
from neuronserve.neuron_worker.device.errors import DeviceError

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 60.0


class EngineGivesUp(RuntimeError):
    """No device, and no attempt left. Not a `DeviceError`: those end requests, this one the server."""


class Revival:
    def __init__(
        self,
        restart: Callable[[], Device],
        attempts: int,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._restart = restart
        self._attempts = attempts
        self._pause = pause
        self._used = 0  # since the last step that worked

    def worked(self) -> None:
        self._used = 0

    def revive(self, reason: str) -> Device:
        """A device in the place of the one that was lost for `reason`. Blocks: requests wait meanwhile."""
        while self._used < self._attempts:
            self._pause(_pause_before(self._used))
            self._used += 1
            logger.warning("restarting the device, attempt %d of %d", self._used, self._attempts)
            try:
                return self._restart()
            except DeviceError as error:
                reason = str(error)
            except Exception as error:  # the machine's, such as no memory or no file descriptors left: it may pass
                reason = f"{type(error).__name__}: {error}"
            logger.error("attempt %d of %d to restart the device failed: %s", self._used, self._attempts, reason)
        message = (
            f"the device was lost and {self._attempts} attempts to restart it in a row brought no working step: the "
            f"server ends. The last reason: {reason}"
        )
        logger.critical("%s", message)
        raise EngineGivesUp(message)


def _pause_before(attempt: int) -> float:
    """None before the first; then 1 s, 4 s, 16 s, a minute."""
    return 0.0 if attempt == 0 else min(LONGEST_PAUSE, 4.0 ** (attempt - 1))
