"""How soon /health answers while a crowd comes and leaves: the TGI server, 200 clients, half of them gone early.

    python benchmarks/tgi_health.py [--rounds 3] [--clients 200] [--model DIR]

A B A B: /health of the idle server, then under the crowd. Medians and 99th percentiles in milliseconds, pooled over
the rounds; the crowd runs in a process of its own, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from bench import conditions, demo_model
from start import free_port, wait

PAUSE_S = 0.05
IDLE_S = 5.0


async def one(http: httpx.AsyncClient, chance: random.Random) -> None:
    body = {"inputs": "Tell me a story. " * chance.randrange(1, 20)}
    body |= {"parameters": {"max_new_tokens": chance.randrange(1, 24)}}
    patience = chance.uniform(0.1, 2.0) if chance.random() < 0.5 else 300.0
    try:
        async with asyncio.timeout(patience):
            await http.post("/generate_stream", json=body)
    except TimeoutError:
        pass


async def crowd(url: str, clients: int, seed: int) -> None:
    chance = random.Random(seed)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        await asyncio.gather(*(one(http, chance) for _ in range(clients)))


def watch(url: str, goes_on: subprocess.Popen[bytes] | None) -> list[float]:
    """Milliseconds of every answer, while the process runs or for a while."""
    found = []
    end = time.monotonic() + IDLE_S
    with httpx.Client(base_url=url, timeout=60) as http:
        while goes_on.poll() is None if goes_on else time.monotonic() < end:
            begin = time.perf_counter()
            http.get("/health").raise_for_status()
            found.append((time.perf_counter() - begin) * 1e3)
            time.sleep(PAUSE_S)
    return found


def figures(name: str, found: list[float]) -> str:
    ninety_ninth = statistics.quantiles(found, n=100)[98]
    return f"{name:<14} {len(found):>5} answers  median {statistics.median(found):6.1f} ms  p99 {ninety_ninth:6.1f} ms"


def measure(url: str, arguments: argparse.Namespace) -> None:
    idle: list[float] = []
    busy: list[float] = []
    for seed in range(arguments.rounds):
        idle += watch(url, None)
        command = [sys.executable, __file__, "--crowd", url, "--clients", str(arguments.clients), "--seed", str(seed)]
        with subprocess.Popen(command) as people:
            busy += watch(url, people)
    print(figures("idle", idle))
    print(figures(f"{arguments.clients} clients", busy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--crowd", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.crowd:
        asyncio.run(crowd(arguments.crowd, arguments.clients, arguments.seed))
        return
    print(conditions())
    port = free_port()
    launcher = str(Path(sys.executable).parent / "text-generation-launcher")
    command = [launcher, "--model-id", str(arguments.model or demo_model()), "--hostname", "127.0.0.1"]
    command += ["--port", str(port), "--max-batch-size", "8", "--max-total-tokens", "1024"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait(server, f"http://127.0.0.1:{port}/health", time.perf_counter())
            measure(f"http://127.0.0.1:{port}", arguments)
        finally:
            server.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
