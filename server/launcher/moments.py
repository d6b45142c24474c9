"""The lines that deployment scripts wait for, said when what they say is true.

Starting shard          the engine is about to be made
Shard ready in 4.1s     it has loaded and prepared every shape
Starting Webserver      the routes are about to be served
Connected               the port answers
Shutting down shards    the running requests are done, the engine ends
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

from neuronserve.neuron_worker.vllm_changes import Change

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
LAUNCHER = "vllm.entrypoints.launchers.launcher"

logger = logging.getLogger(__name__)


def mark_engine() -> None:
    entry: Any = importlib.import_module(ENTRY)
    original: Callable[..., Any] = entry.build_async_engine_client

    @asynccontextmanager
    async def build_async_engine_client(*args: Any, **keywords: Any) -> AsyncIterator[Any]:
        started = time.monotonic()
        logger.info("Starting shard")
        async with original(*args, **keywords) as engine:
            logger.info("Shard ready in %.1fs", time.monotonic() - started)
            try:
                yield engine
            finally:
                logger.info("Shutting down shards")

    entry.build_async_engine_client = wraps(original)(build_async_engine_client)


def mark_server() -> None:
    entry: Any = importlib.import_module(ENTRY)
    original: Callable[..., Any] = entry.build_and_serve

    @wraps(original)
    async def build_and_serve(engine: Any, *args: Any, **keywords: Any) -> Any:
        config = engine.vllm_config
        tokens = config.scheduler_config.max_num_seqs * config.model_config.max_model_len
        logger.info("Starting Webserver")
        logger.info("Setting max batch total tokens to %d", tokens)
        return await original(engine, *args, **keywords)

    entry.build_and_serve = build_and_serve


def mark_port() -> None:
    server: Any = importlib.import_module(LAUNCHER).NoSignalServer
    original: Callable[..., Any] = server.startup

    @wraps(original)
    async def startup(self: Any, *args: Any, **keywords: Any) -> None:
        await original(self, *args, **keywords)
        if self.started:
            logger.info("Connected")

    server.startup = startup


CHANGES = tuple(
    Change(
        target=target,
        reason="scripts around TGI's launcher wait for its lines, and vLLM's own words come from elsewhere and change",
        until="nobody's script reads the launcher's log",
        apply=apply,
    )
    for target, apply in (
        (f"{ENTRY}.build_async_engine_client", mark_engine),
        (f"{ENTRY}.build_and_serve", mark_server),
        (f"{LAUNCHER}.NoSignalServer.startup", mark_port),
    )
)


def install() -> None:
    for change in CHANGES:
        change.apply()
