"""CPU seconds of the server outside the device call, at 8 streams in int8: `python benchmarks/host_share.py`.

API, engine, scheduler, packing, sampling and streaming, as a share of all CPU time of the server's processes. The
device's time is that of its own threads, which sleep between steps, and of the engine's main thread while it is in the
call and computes beside them: as long as the calls took by the clock, less all the time that it waited for a core,
inside them or out (it never sleeps in a call). What another machine took of this one's cores meanwhile is in the calls'
time by the clock and would flatter the share, so a noisy machine gives no verdict. What Python does outside depends on
how Python was built, and so with which one this runs: without profile-guided optimization it is a tenth slower.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import openai
from bars import ROUNDS, verdict
from bench import conditions, demo_model
from bench_peers import PROMPTS
from replay import ask, prompt_ids, requests_of
from serving import INT8, Server, Thread, cpu_seconds, serve, total, waiting_seconds

STREAMS, PROMPT, TOKENS = 8, 32, 256
BAR = 0.15
MOST_STOLEN = 0.03
"""Of the machine's time, by another machine: above it the share means little."""
ENGINE = "VLLM::EngineCor"
"""As the kernel cuts the engine process's name."""


@dataclass(frozen=True)
class Spent:
    """CPU seconds between two readings."""

    device_threads: tuple[float, ...]  # each of the device's own
    engine_main: float
    others: dict[str, float]  # by process name; `VLLM::EngineCor` holds its helper threads
    device_calls: float  # wall-clock seconds inside them
    engine_waited: float  # of the engine's main thread, for a core

    @property
    def all(self) -> float:
        return sum(self.device_threads) + self.engine_main + sum(self.others.values())

    @property
    def main_in_device(self) -> float:
        return min(self.engine_main, max(0.0, self.device_calls - self.engine_waited))

    @property
    def outside(self) -> float:
        return self.all - sum(self.device_threads) - self.main_in_device

    @property
    def share(self) -> float:
        return self.outside / self.all


def spent(
    before: Mapping[Thread, float],
    after: Mapping[Thread, float],
    device: set[int],
    device_calls: float,
    engine_waited: float,
) -> Spent:
    """`device`: ids of the device's threads."""
    grown = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    main = 0.0
    threads: list[float] = []
    others: dict[str, float] = {}
    for thread, seconds in grown.items():
        if thread.thread in device:
            threads.append(seconds)
        elif is_engine_main(thread):
            main += seconds
        else:
            others[thread.name] = others.get(thread.name, 0.0) + seconds
    return Spent(tuple(sorted(threads, reverse=True)), main, others, device_calls, engine_waited)


def is_engine_main(thread: Thread) -> bool:
    return thread.name == ENGINE and thread.thread == thread.process


def engine_waited(server: Server) -> float:
    return sum(seconds for thread, seconds in waiting_seconds(server.pid).items() if is_engine_main(thread))


def device_threads(before: Mapping[Thread, float], after: Mapping[Thread, float], count: int) -> set[int]:
    """The `count` that did most of the engine's threads beside the main one: nothing else there computes."""
    grown = {
        thread.thread: seconds - before.get(thread, 0.0)
        for thread, seconds in after.items()
        if thread.name == ENGINE and thread.thread != thread.process
    }
    return set(sorted(grown, key=lambda thread: grown[thread])[len(grown) - count :]) if count else set()


async def streams(server: Server, ids: Sequence[int]) -> None:
    requests = requests_of([(0.0, PROMPT, TOKENS)] * STREAMS, ids)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=3600) as client:
        await asyncio.gather(*(ask(client, server.model, request) for request in requests))


def device_calls(server: Server) -> float:
    """Seconds by the clock."""
    time.sleep(1.5)  # the counts are kept for a second
    return total(server.metrics(), "neuronserve_step_seconds_total", where="device")


def machine_seconds() -> tuple[float, float]:
    """(stolen, all), of all cores together, in the kernel's ticks."""
    with open("/proc/stat") as file:
        ticks = [float(value) for value in file.readline().split()[1:9]]
    return ticks[7], sum(ticks)


def one_round(server: Server, ids: Sequence[int]) -> Spent:
    calls, waited, before = device_calls(server), engine_waited(server), cpu_seconds(server.pid)
    asyncio.run(streams(server, ids))
    after, waited = cpu_seconds(server.pid), engine_waited(server) - waited
    calls = device_calls(server) - calls
    own_threads = len(os.sched_getaffinity(0)) - 1  # the main thread is the device's first
    own = device_threads(before, after, own_threads)
    return spent(before, after, own, calls, waited)


def judge(shares: Sequence[float], noise: float) -> str:
    """`noise`: the share of the cores that another machine had; too much, and there is no verdict."""
    share = statistics.median(shares)
    said = verdict(share <= BAR, is_whole=len(shares) >= ROUNDS) if noise <= MOST_STOLEN else "none"
    return (
        f"{said} bar 4: outside the device call {share:.1%} of all CPU time "
        f"({min(shares):.1%}-{max(shares):.1%}), {STREAMS} streams int8 (bar {BAR:.0%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    print(conditions())
    flags = ("--max-num-seqs", "16", "--max-model-len", "1024", *INT8)
    ids = prompt_ids(model, PROMPTS)
    found = []
    with serve(model, flags=flags) as server:
        one_round(server, ids)
        stolen, everything = machine_seconds()
        for _ in range(arguments.rounds):
            found.append(one_round(server, ids))
            latest = found[-1]
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in latest.others.items() if seconds >= 0.005)
            print(
                f"  {latest.all:.2f} CPU s: device's threads {sum(latest.device_threads):.2f}, engine's main thread "
                f"{latest.engine_main:.2f} (device calls took {latest.device_calls:.2f}, no core for "
                f"{latest.engine_waited:.2f}), {parts}"
            )
        stolen, everything = (
            after - before for after, before in zip(machine_seconds(), (stolen, everything), strict=True)
        )
    noise = stolen / everything
    print(f"another machine had {noise:.1%} of these cores")
    print(judge([round_.share for round_ in found], noise))


if __name__ == "__main__":
    main()
