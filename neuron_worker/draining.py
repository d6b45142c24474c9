"""How a server that is told to stop ends: what runs is answered, what runs longer than the limit is cut, and nobody
reads of a dead engine that was stopped on purpose.

Works on vLLM's `AsyncLLM`, in the thread that shuts it down. Knows no HTTP: a request that is cut ends as aborted, and
whoever streams it says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

logger = logging.getLogger(__name__)

ENGINE_LOGGER = "vllm.v1.engine.async_llm"
DEAD = "EngineDeadError"
LAST_SECONDS = 15.0
"""For an idle engine to let go of its device, beyond the limit: one that is killed leaves that to the system."""


def drain(engine: Any, limit: float) -> float:
    """Until the requests of this moment have been answered or cut. Seconds that are left for the engine to end."""
    deadline = time.monotonic() + limit
    states = engine.output_processor.request_states
    running = set(states)
    while time.monotonic() < deadline and not engine.errored and any(request in states for request in running):
        time.sleep(0.02)
    unanswered = [request for request in running if request in states]
    if unanswered and not engine.errored:
        logger.warning("requests cut after %g s (--shutdown-timeout): %d", limit, len(unanswered))
        _cut(engine, unanswered)
    return patience_with_the_engine(deadline - time.monotonic())


def patience_with_the_engine(left: float) -> float:
    """Seconds until it is killed, where its requests leave `left` of the limit."""
    return max(LAST_SECONDS, left)


def patience_with_servers(limit: float) -> float:
    """Seconds until an API process is killed that other processes serve beside: it cuts its requests at the limit,
    and tells their clients so afterwards."""
    return limit + LAST_SECONDS


def _cut(engine: Any, requests: list[str]) -> None:
    """Each ends now with what it has; without this, vLLM would end its engine under it, and its stream in an error."""
    loop = engine.output_handler.get_loop()
    asyncio.run_coroutine_threadsafe(engine.abort(requests, internal=True), loop).result()


def expect_the_end(engine: Any) -> None:
    """The engine's end is no error from here on, unless it is one already."""
    handler = getattr(engine, "output_handler", None)
    if handler is not None and not engine.errored:
        logging.getLogger(ENGINE_LOGGER).addFilter(_NoDeath(handler))


class _NoDeath(logging.Filter):
    """Drops what one engine's output handler says of the dead engine: a stopped one looks like that to it."""

    def __init__(self, handler: asyncio.Task[None]) -> None:
        super().__init__()
        self.handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return not (kind is not None and kind.__name__ == DEAD and _current_task() is self.handler)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # not in a loop's thread
        return None
