"""`make bench-peers`: the cpu device beside llama.cpp, OpenVINO GenAI and vLLM's own CPU build, with verdicts.

    python benchmarks/bench_peers.py [--rounds 5] [--model DIR] [--peers NAME ...] [--data DIR]

Peers are set up on first use (`peers.py`); one that cannot be is named with its reason. Every engine is one process
that lives through the run, the rounds go round the engines, and the machine's own floor is measured before and after.
Ours in float32 is there twice: of the checkpoint as it is, and of one in bfloat16, as most are published, whose numbers
the device keeps as they are and computes with in float32. vLLM in float32 widens both; in bfloat16 it computes with
fewer digits too, and is there to see.
The column `text` decodes one stream after questions in the model's chat template, up to the answer's end: what is
drafted with the shipped head finds there what it finds in use, and no more.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bars
import data_files
import floor
from bars import (
    LLAMA_CPP,
    LLAMA_CPP_Q4,
    OPENVINO,
    OURS_DRAFTS,
    OURS_FLOAT,
    OURS_INT8,
    OURS_STORED_NARROW,
    VLLM,
    VLLM_NARROW,
    VLLM_TUNED,
)
from bench import INT8_HEAD, Column, Entry, Process, columns, conditions, demo_model, facts, measure, table
from data_files import find
from measure import FIRST, LAST, PROMPT
from peers import ONLY_AVX2, PEERS, Unavailable, lacks
from work import Step, Work

PEER_ENTRIES = {
    "llama.cpp": Entry(LLAMA_CPP, "llama.cpp"),
    "llama.cpp-q4_1": Entry(LLAMA_CPP_Q4, "llama.cpp-q4_1"),
    "openvino": Entry(OPENVINO, "openvino"),
    "vllm-cpu": Entry(VLLM, "vllm-cpu"),
    "vllm-cpu-iomp": Entry(VLLM_TUNED, "vllm-cpu-iomp"),
    "vllm-cpu-bfloat16": Entry(VLLM_NARROW, "vllm-cpu-bfloat16"),
}
ROOT = Path(__file__).resolve().parent.parent
WITHOUT_AVX512 = {name: entry for name, entry in PEER_ENTRIES.items() if entry.peer != "llama.cpp-q4_1"}
WITHOUT_AVX512["llama.cpp"] = Entry(LLAMA_CPP, "llama.cpp-avx2")
HEADS = ROOT / "speculative" / "heads"
PROMPTS = ROOT / "tests" / "data" / "prompts.jsonl"
QUESTIONS = "spec_bench.jsonl"
NUM_PROMPTS, LONGEST_PROMPT = 8, 512


def questions(text: Mapping[str, Any] | None) -> list[Column]:
    """Every engine its own speed; sampling and drafts where they are ours to judge. `text`: of that column."""
    ours = frozenset({OURS_FLOAT, OURS_INT8})
    plain = frozenset({*ours, OURS_STORED_NARROW, *(entry.label for entry in PEER_ENTRIES.values())})
    asked = [Column(c.name, c.command, ours if c.name.startswith("sampled") else plain) for c in columns(quick=False)]
    return [*asked, Column("text", {"do": "text", **text})] if text else asked


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


def real_prompts(path: Path, model: str) -> dict[str, Any]:
    """`prompts` as a chat sends them, and the token at which an answer `stop`s."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": text}] for text in texts(path)]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    short = [prompt for prompt in prompts if len(prompt) <= LONGEST_PROMPT]
    return {"prompts": spread(short, NUM_PROMPTS), "stop": tokenizer.eos_token_id}


def floor_row(label: str, asked: Sequence[Column], machine: floor.Floor, work: Work) -> str:
    """Tokens per second of the columns with a step's work, at the floor; all that is not reckoned costs nothing."""
    cells = []
    for column in asked:
        step = step_of(column)
        cells.append(f"{step.rows / work.least_seconds(step, machine):.0f}" if step else "")
    return f"| {label} | " + " | ".join(cells) + " |"


def step_of(column: Column) -> Step | None:
    if "tokens" in column.command:
        return Step.of_prompt(int(column.command["tokens"]))
    if "streams" in column.command and not column.name.startswith("sampled"):
        return Step.of_decoding(int(column.command["streams"]), PROMPT + (FIRST + LAST) // 2)
    return None


def start(entries: Sequence[Entry], model: str) -> dict[str, Process]:
    """The engines that can be had. Without one of ours there is nothing to measure."""
    processes: dict[str, Process] = {}
    for entry in entries:
        try:
            processes[entry.label] = Process(entry, model)
            if lack := lacks(PEERS[entry.peer]):
                print(f"{entry.label}: {lack}", flush=True)
        except Unavailable as missing:
            if entry.peer == "ours":
                raise SystemExit(f"{entry.label}: {missing}") from missing
            print(f"not measured: {entry.label}: {missing}", flush=True)
    return processes


def say_floor(when: str, options: Sequence[str]) -> floor.Floor | None:
    measured = floor.measure(options)
    print(f"{when}: {measured or 'no floor: no C compiler found'}", flush=True)
    return measured


def engines(arguments: argparse.Namespace, model: str) -> list[Entry]:
    head = {"speculative_model": str(HEADS / Path(model).name), "num_speculative_tokens": 4}
    named = WITHOUT_AVX512 if arguments.only_avx2 else PEER_ENTRIES
    for name in arguments.peers:
        if name not in named:
            print(f"not measured: {PEER_ENTRIES[name].label}: there is no build of it without AVX-512 here")
    return [
        Entry(OURS_FLOAT, "ours"),
        Entry(OURS_STORED_NARROW, "ours-bfloat16"),
        Entry(OURS_INT8, "ours", "neuron_quant", INT8_HEAD),
        Entry(OURS_DRAFTS, "ours", "neuron_quant", {**INT8_HEAD, **(arguments.drafts or head)}),
        *(named[name] for name in arguments.peers if name in named),
    ]


FLOORS = {"floor, four bytes": 4, "floor, three bytes": 3, "floor, two bytes": 2, "floor, 8-bit": 1}
"""Bytes of a weight; ours keeps float32 in the fewest that hold it."""


def report(found: bars.Values, asked: Sequence[Column], model: str, machine: floor.Floor | None) -> None:
    table(found, asked)
    if machine:
        for label, size in FLOORS.items():
            print(floor_row(label, asked, machine, Work.of(model, size)))
    print()
    print("\n".join(bars.judge(found, [column.name for column in asked])))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model, the only one that llama.cpp is measured on")
    parser.add_argument("--rounds", type=int, default=bars.ROUNDS)
    parser.add_argument("--peers", nargs="*", default=list(PEER_ENTRIES), choices=list(PEER_ENTRIES))
    parser.add_argument("--only", nargs="*", help="columns to measure, for example 'decode 1' (default: all)")
    parser.add_argument("--data", type=Path, help=f"directory with {QUESTIONS}, for the column `text`")
    parser.add_argument(
        "--drafts", type=json.loads, help="engine arguments of the line with drafts (default: the model's shipped head)"
    )
    parser.add_argument("--only-avx2", action="store_true", help="nobody uses AVX-512, as far as engines can be told")
    parser.add_argument("--out", type=Path, default=Path("build/bench-peers.json"), help="every value, as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    model = arguments.model or demo_model()
    path = find(arguments.data, data_files.PROMPTS, QUESTIONS)
    asked = questions(real_prompts(path, model) if path else None)
    asked = [column for column in asked if not arguments.only or column.name in arguments.only]
    print(conditions() + (", without AVX-512" if arguments.only_avx2 else ""), flush=True)
    if path is None:
        print(f"the column `text` is skipped: no {QUESTIONS}; give its directory by --data")
    if arguments.only_avx2:
        os.environ.update(ONLY_AVX2)
    machine = floor.AVX2 if arguments.only_avx2 else floor.NATIVE
    processes = start(engines(arguments, model), model)
    try:
        before = say_floor("before", machine)
        found, _ = measure(processes, asked, arguments.rounds, keep=arguments.out)
        after = say_floor("\nafter", machine)
        report(found, asked, model, floor.slower(before, after))
        facts(processes)
    finally:
        for process in processes.values():
            process.close()


if __name__ == "__main__":
    main()
