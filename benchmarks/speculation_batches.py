"""Whether speculation costs anything in a full batch: seconds of plain decoding over seconds of each proposer.

    python benchmarks/speculation_batches.py --data spec_bench.jsonl [--batches 1 2 4 8 16] [--rounds 3]

A round of a batch size B asks the next B prompts of the file at once, greedily: plain decoding, each proposer, plain
decoding again, whose two times are averaged; then the next B prompts. Every engine is one process.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence

from bars import ROUNDS, verdict
from bench import conditions, demo_model
from bench_speculation import PLAIN, QUANTIZATIONS, Child, options, proposers, questions

BARS = {"ngram": 0.97, "eagle": 0.94, "eagle-alone": 0.94}


def measure(children: Sequence[Child], prompts: Sequence[str], most: int) -> dict[str, float]:
    """Speed of each proposer against plain decoding's, on one batch."""
    first, *others = children
    before = first.answer_together(prompts, most)
    found = {child.name: child.answer_together(prompts, most) for child in others}
    after = first.answer_together(prompts, most)
    plain = (before["seconds"] + after["seconds"]) / 2
    for name, answer in found.items():
        if answer["tokens"] != before["tokens"]:
            print(f"  {name}: an answer differs from plain decoding's")
    return {name: plain / answer["seconds"] for name, answer in found.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    if arguments.data is None:
        print("speculation_batches is skipped: name the prompts, such as --data spec_bench.jsonl")
        return
    prompts = [prompt for _, prompt in questions(arguments.data, None)]
    model = arguments.model or demo_model()
    print(
        f"{conditions()}; {arguments.rounds} rounds, at most {arguments.max_tokens} tokens of each prompt", flush=True
    )
    for weights in arguments.weights:
        chosen = {PLAIN: {}, **proposers(arguments, model)}
        size = {"max_num_seqs": max(arguments.batches)}
        children = [Child(name, model, QUANTIZATIONS[weights], {**extra, **size}) for name, extra in chosen.items()]
        try:
            for child in children:
                child.answer_together(prompts[-max(arguments.batches) :], 32)
            _table(children, prompts, weights, arguments)
        finally:
            for child in children:
                child.close()


def judge(what: str, speeds: Sequence[float], bar: float) -> str:
    speed = statistics.median(speeds)
    return f"{verdict(speed >= bar, is_whole=len(speeds) >= ROUNDS)} {what}: {speed:.2f} (bar {bar})"


def _table(children: Sequence[Child], prompts: Sequence[str], weights: str, arguments: argparse.Namespace) -> None:
    names = [child.name for child in children[1:]]
    print(f"\n| {weights}, batch | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 1) + "|")
    lines = []
    for batch in arguments.batches:
        waiting = itertools.cycle(prompts)
        rounds = [
            measure(children, list(itertools.islice(waiting, batch)), arguments.max_tokens)
            for _ in range(arguments.rounds)
        ]
        speeds = {name: [found[name] for found in rounds] for name in names}
        cells = [f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})" for values in speeds.values()]
        print(f"| {batch} | " + " | ".join(cells) + " |", flush=True)
        lines += [
            judge(f"{name} {weights}, batch {batch}", values, BARS[name])
            for name, values in speeds.items()
            if name in BARS
        ]
    print("\n" + "\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
