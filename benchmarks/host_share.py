"""CPU seconds of the server outside the device call, at 8 streams in int8: `python benchmarks/host_share.py`.

API, engine, scheduler, packing, sampling and streaming, as a share of all CPU time of the server's processes. The
device's time is that of its own threads, which run in a step alone, and of the engine's thread, which computes beside
them while it is in the call (`neuronserve_step_seconds_total`, wall-clock time: on a busy machine it says too much).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import openai
from bench import conditions, demo_model, verdict
from bench_peers import PROMPTS
from replay import ask, prompt_ids, requests_of
from serving import INT8, Server, Thread, cpu_seconds, serve, total

STREAMS, PROMPT, TOKENS = 8, 32, 256
BAR = 0.15
ENGINE = "VLLM::EngineCor"
"""As the kernel cuts the engine process's name."""


@dataclass(frozen=True)
class Spent:
    """CPU seconds between two readings."""

    engine_threads: float  # the device's own threads
    engine_main: float
    others: dict[str, float]  # by process name; `VLLM::EngineCor` holds its helper threads
    device_calls: float  # wall-clock seconds inside them

    @property
    def all(self) -> float:
        return self.engine_threads + self.engine_main + sum(self.others.values())

    @property
    def outside(self) -> float:
        return self.all - self.engine_threads - min(self.device_calls, self.engine_main)

    @property
    def share(self) -> float:
        return self.outside / self.all


def spent(
    before: Mapping[Thread, float], after: Mapping[Thread, float], device: set[int], device_calls: float
) -> Spent:
    """`device`: ids of the device's threads."""
    grown = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    threads = main = 0.0
    others: dict[str, float] = {}
    for thread, seconds in grown.items():
        if thread.thread in device:
            threads += seconds
        elif thread.name == ENGINE and thread.thread == thread.process:
            main += seconds
        else:
            others[thread.name] = others.get(thread.name, 0.0) + seconds
    return Spent(threads, main, others, device_calls)


def device_threads(before: Mapping[Thread, float], after: Mapping[Thread, float], device_calls: float) -> set[int]:
    """Those of the engine that were busy for most of the time of the calls: nothing else in that process is."""
    return {
        thread.thread
        for thread, seconds in after.items()
        if thread.name == ENGINE
        and thread.thread != thread.process
        and seconds - before.get(thread, 0.0) > 0.5 * device_calls
    }


async def streams(server: Server, ids: Sequence[int]) -> None:
    requests = requests_of([(0.0, PROMPT, TOKENS)] * STREAMS, ids)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=3600) as client:
        await asyncio.gather(*(ask(client, server.model, request) for request in requests))


def device_seconds(server: Server) -> float:
    time.sleep(1.5)  # the counts are kept for a second
    return total(server.metrics(), "neuronserve_step_seconds_total", where="device")


def one_round(server: Server, ids: Sequence[int]) -> Spent:
    calls, before = device_seconds(server), cpu_seconds(server.pid)
    asyncio.run(streams(server, ids))
    after, calls = cpu_seconds(server.pid), device_seconds(server) - calls
    return spent(before, after, device_threads(before, after, calls), calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    print(conditions())
    flags = ("--max-num-seqs", "16", "--max-model-len", "1024", *INT8)
    ids = prompt_ids(model, PROMPTS)
    found = []
    with serve(model, flags=flags) as server:
        one_round(server, ids)
        for _ in range(arguments.rounds):
            found.append(one_round(server, ids))
            latest = found[-1]
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in latest.others.items() if seconds >= 0.005)
            print(
                f"  {latest.all:.2f} CPU s: device threads {latest.engine_threads:.2f}, engine's main thread "
                f"{latest.engine_main:.2f} (in device calls {latest.device_calls:.2f}), {parts}"
            )
    shares = [round_.share for round_ in found]
    share = statistics.median(shares)
    print(
        f"{verdict(share <= BAR)} bar 4: outside the device call {share:.1%} of all CPU time "
        f"({min(shares):.1%}-{max(shares):.1%}), {STREAMS} streams int8 (bar {BAR:.0%})"
    )


if __name__ == "__main__":
    main()
