"""`make bench-peers`: the cpu device beside llama.cpp, OpenVINO GenAI and vLLM's own CPU build, with verdicts.

    python benchmarks/bench_peers.py [--rounds 5] [--model DIR] [--peers NAME ...] [--prompts FILE]

Peers are set up on first use (`peers.py`); one that cannot be is named with its reason. Every engine is one process
that lives through the run, the rounds go round the engines, and the machine's own floor is measured before and after.
The column `text` decodes one stream after real prompts, where drafts from the prompt have something to find.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import bars
import floor
from bars import LLAMA_CPP, LLAMA_CPP_Q4, OPENVINO, OURS_DRAFTS, OURS_FLOAT, OURS_INT8, VLLM, VLLM_TUNED
from bench import INT8_HEAD, Column, Entry, Process, columns, conditions, demo_model, facts, measure, table
from measure import FIRST, LAST, PROMPT
from peers import Unavailable
from work import Step, Work

PEER_ENTRIES = {
    "llama.cpp": Entry(LLAMA_CPP, "llama.cpp"),
    "llama.cpp-q4_1": Entry(LLAMA_CPP_Q4, "llama.cpp-q4_1"),
    "openvino": Entry(OPENVINO, "openvino"),
    "vllm-cpu": Entry(VLLM, "vllm-cpu"),
    "vllm-cpu-iomp": Entry(VLLM_TUNED, "vllm-cpu-iomp"),
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}
PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "prompts.jsonl"
NUM_PROMPTS, LONGEST_PROMPT = 8, 512


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
    parser.add_argument("--out", type=Path, default=Path("build/bench-peers.json"), help="every value, as JSON")
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
        found, _ = measure(processes, asked, arguments.rounds, keep=arguments.out)
        table(found, asked)
        if before:
            for label, size in (("floor, float32", 4), ("floor, int8", 1)):
                print(floor_row(label, asked, before, Work.of(model, size)))
        say_floor("\nafter")
        print()
        print("\n".join(bars.judge(found, [column.name for column in asked])))
        facts(processes)
    finally:
        for process in processes.values():
            process.close()


if __name__ == "__main__":
    main()
