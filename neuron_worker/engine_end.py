"""What a server does once its engine has ended: `/health` says 503 for a while, then the process exits with 1.

vLLM's server closes its port at once and exits with 0, which an orchestrator takes for a job well done and a load
balancer never sees. `vllm_changes` puts these functions in the place of vLLM's.

Knows vLLM's engine client by its attributes. Knows no device and no reason: that one is in the engine's own log.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""Longer than the ten seconds between two probes of an orchestrator's default, so that one of them sees the 503."""

CLIENTS_ARE_TOLD = (
    "the server's engine has ended and with it this request; the server exits and its log says why: send the request "
    "again once the server is back"
)

LAST_WORDS = "error: the server's engine has ended; the engine's last CRITICAL line above says why. Exit status 1"

_ended: weakref.WeakSet[Any] = weakref.WeakSet()  # engines that were seen dead


def has_died(engine: Any) -> bool:
    """Whether it ended by itself: neither asked to by this process nor, as by Ctrl-C, beside it."""
    resources = getattr(getattr(engine, "engine_core", None), "resources", None)
    if not getattr(resources, "engine_dead", False):
        return False
    processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
    return not processes or any(process.exitcode != 0 for process in processes)


def end_server_later(server: Any, engine: Any, keep_alive: bool) -> None:
    """Called by vLLM every few seconds, and for each request that meets the dead engine."""
    if engine in _ended or not has_died(engine):
        return
    _ended.add(engine)
    if keep_alive:
        logger.critical("the engine has ended: /health is 503 until this process is stopped, nothing is served")
        return
    logger.critical("the engine has ended: /health is 503, the server exits in %.0f s", GRACE_SECONDS)
    asyncio.get_running_loop().call_later(GRACE_SECONDS, setattr, server, "should_exit", True)


async def serve(original: Callable[..., Awaitable[Any]], engine: Any, *args: Any, **keywords: Any) -> Any:
    """vLLM's `build_and_serve`, whose end by the engine's fault is an exit status."""
    closing = await original(engine, *args, **keywords)
    if engine not in _ended:
        return closing
    await closing
    raise SystemExit(LAST_WORDS)  # printed after all that is said while the process ends; status 1
