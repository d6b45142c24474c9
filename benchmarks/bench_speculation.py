"""`make bench-speculation`: what speculation saves, by category of Spec-Bench, one request at a time.

    python benchmarks/bench_speculation.py --data spec_bench.jsonl [--limit 5] [--max-tokens 128] [--proposers ngram]

Each row of the file has `category` and `turns`; first turns are asked, in the model's chat template. Every engine is
one process; a prompt is answered by plain decoding, then by each proposer, then the next prompt, so a slow minute of a
shared machine falls on all of them (A B A B). Greedy, and at temperature 0.7 without a seed, as most requests are: one
with a seed drafts in every step.

Tokens per target step: tokens after the first one, for each step after the prompt's. Speed-up: seconds a token of plain
decoding over seconds a token of the proposer; of the whole answer, and after its first token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bars import verdict
from bench import conditions, demo_model

HERE = Path(__file__).resolve().parent
TEMPERATURES = (0.0, 0.7)
QUANTIZATIONS = {"float32": None, "int8": "neuron_quant"}
QUOTING = ("summarization", "rag", "translation")
PLAIN = "plain"
PROPOSERS = ("ngram", "eagle", "eagle-alone", "draft")
"""`eagle` looks up what repeats itself and asks the head for the rest, as it is served; `eagle-alone` always asks."""


@dataclass(frozen=True)
class Bars:
    """Of one proposer, greedy but for `slowest`. None: not judged."""

    tokens_per_step: float
    slowest: float  # speed of any category
    speed: Mapping[str, float] = field(default_factory=dict)  # by weights, over all categories
    speed_of_quoting: float | None = None


EAGLE_BARS = Bars(1.9, 0.94, {"float32": 1.15, "int8": 1.3})
BARS = {
    "ngram": Bars(1.35, 0.97, speed_of_quoting=1.15),
    "eagle": EAGLE_BARS,
    "eagle-alone": EAGLE_BARS,  # the head by itself
}


@dataclass
class Tally:
    """What some answers took. Filled by `add`, one answer after the other."""

    tokens: int = 0
    steps: int = 0
    tokens_after_first: int = 0
    seconds: float = 0.0
    seconds_after_first: float = 0.0
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)  # by position

    def add(self, answer: Mapping[str, Any]) -> None:
        self.tokens += len(answer["tokens"])
        self.steps += answer["steps"]
        self.tokens_after_first += answer["tokens_after_first"]
        self.seconds += answer["seconds"]
        self.seconds_after_first += answer["seconds_after_first"]
        self.drafts += answer["drafts"]
        longest = max(len(self.accepted), len(answer["accepted"]))
        both = [values + [0] * (longest - len(values)) for values in (self.accepted, list(answer["accepted"]))]
        self.accepted = [sum(pair) for pair in zip(*both, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens_after_first / max(self.steps, 1)

    @property
    def by_position(self) -> str:
        return " ".join(f"{count / max(self.drafts, 1):.2f}" for count in self.accepted)

    def faster_than(self, plain: Tally) -> float:
        return (plain.seconds / max(plain.tokens, 1)) / (self.seconds / max(self.tokens, 1))

    def faster_after_first(self, plain: Tally) -> float:
        ours, theirs = self.seconds_after_first, plain.seconds_after_first
        return (theirs / max(plain.tokens_after_first, 1)) / (ours / max(self.tokens_after_first, 1))


Tallies = dict[tuple[str, str], Tally]
"""(engine, category) -> its answers."""


class Child:
    """An engine in a process of its own. `answer` sends one prompt and waits."""

    def __init__(self, name: str, model: str, quantization: str | None, extra: Mapping[str, Any]) -> None:
        command = [sys.executable, __file__, "--engine", json.dumps({"model": model, **extra})]
        if quantization:
            command[-1] = json.dumps({"model": model, "quantization": quantization, **extra})
        self.name = name
        self.log = Path(tempfile.gettempdir()) / f"bench-speculation-{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the engine of {self.name} ended; its log is {self.log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def answer(self, prompt: str, **sampling: Any) -> dict[str, Any]:
        return self._ask(prompt=prompt, **sampling)

    def answer_together(self, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
        return self._ask(prompts=prompts, max_tokens=max_tokens)

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def serve(arguments: Mapping[str, Any]) -> None:
    """The child: prompts on standard input, answers on standard output, JSON lines both."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints goes to the log
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    sizes = {"max_model_len": 2048, "max_num_seqs": 1, "enable_prefix_caching": False}
    llm = LLM(device="neuron", dtype="float32", disable_log_stats=False, **{**sizes, **arguments})
    out.write("{}\n")
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        answer = _answer_together(llm, **asked) if "prompts" in asked else _answer(llm, str(number), **asked)
        out.write(json.dumps(answer) + "\n")


def _templated(llm: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    text: str = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _answer_together(llm: Any, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Greedily, all in one batch."""
    from vllm import SamplingParams

    texts = [_templated(llm, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate(texts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "seconds": seconds}


def _answer(llm: Any, request: str, prompt: str, temperature: float, max_tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    text = _templated(llm, prompt)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, detokenize=False)
    before = _counted(llm)
    engine, begin = llm.llm_engine, time.perf_counter()
    engine.add_request(request, text, params)
    tokens: list[int] = []
    first, num_first, steps = begin, 0, 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if outputs and not tokens:
            first, num_first = time.perf_counter(), len(outputs[0].outputs[0].token_ids)
        elif outputs:
            steps += 1
        tokens = list(outputs[0].outputs[0].token_ids) if outputs else tokens
    end, after = time.perf_counter(), _counted(llm)
    return {
        "tokens": tokens,
        "steps": steps,
        "tokens_after_first": len(tokens) - num_first,
        "seconds": end - begin,
        "seconds_after_first": end - first,
        "drafts": after[0] - before[0],
        "accepted": [new - old for new, old in zip(after[1], before[1] or [0] * len(after[1]), strict=True)],
    }


def _counted(llm: Any) -> tuple[int, list[int]]:
    """Steps with drafts, and accepted drafts by position, since the engine was made."""
    drafts, accepted = 0, list[int]()
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts = int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = [int(value) for value in metric.values]
    return drafts, accepted


def questions(path: Path, limit: int | None, every: int = 1) -> Iterator[tuple[str, str]]:
    """(category, first turn), the categories in turn, `limit` of each, of every so many rows."""
    by_category: dict[str, list[str]] = defaultdict(list)
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for line in lines[::every]:
        row = json.loads(line)
        by_category[row["category"]].append(row["turns"][0])
    longest = max(map(len, by_category.values()), default=0)
    for index in range(longest if limit is None else min(limit, longest)):
        yield from ((category, turns[index]) for category, turns in by_category.items() if index < len(turns))


def measure(children: Sequence[Child], asked: Sequence[tuple[str, str]], temperature: float, most: int) -> Tallies:
    found: Tallies = defaultdict(Tally)
    different: dict[str, int] = defaultdict(int)
    for child in children:  # its first answer warms it up
        child.answer("Hello!", temperature=temperature, max_tokens=16)
    for category, prompt in asked:
        plain: Sequence[int] = ()
        for child in children:
            answer = child.answer(prompt, temperature=temperature, max_tokens=most)
            found[child.name, category].add(answer)
            if child.name == PLAIN:
                plain = answer["tokens"]
            different[child.name] += answer["tokens"] != plain
    for child in children[1:] if not temperature else ():
        print(f"  {child.name}: {different[child.name]} of {len(asked)} answers differ from plain decoding's")
    return found


def together(found: Tallies, engine: str, categories: Iterable[str]) -> Tally:
    total = Tally()
    for category in categories:
        one = found[engine, category]
        for name in ("tokens", "steps", "tokens_after_first", "seconds", "seconds_after_first", "drafts"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        longest = max(len(total.accepted), len(one.accepted))
        both = [values + [0] * (longest - len(values)) for values in (total.accepted, one.accepted)]
        total.accepted = [sum(pair) for pair in zip(*both, strict=True)]
    return total


def table(found: Tallies, engine: str, categories: Sequence[str]) -> None:
    print("\n| category | tokens per step | acceptance by position | speed-up | after the first token |")
    print("| --- " * 5 + "|")
    for name, chosen in [*((category, [category]) for category in categories), ("overall", categories)]:
        ours, plain = together(found, engine, chosen), together(found, PLAIN, chosen)
        speeds = f"{ours.faster_than(plain):.2f} | {ours.faster_after_first(plain):.2f}"
        print(f"| {name} | {ours.tokens_per_step:.2f} | {ours.by_position} | {speeds} |")
    print(flush=True)


def judge(
    found: Tallies, engine: str, weights: str, temperature: float, categories: Sequence[str], is_whole: bool
) -> None:
    """`is_whole`: every prompt of the file was asked."""
    bars = BARS.get(engine)
    if bars is None:
        return
    speeds = {name: found[engine, name].faster_than(found[PLAIN, name]) for name in categories}
    slowest = min(speeds, key=speeds.__getitem__)
    said = f"speed-up of the slowest category, {slowest}: {speeds[slowest]:.2f} (bar {bars.slowest})"
    met = verdict(speeds[slowest] >= bars.slowest, is_whole=is_whole)
    print(f"{met} {engine} {weights}, temperature {temperature}, {said}")
    if temperature:
        return
    ours, plain = together(found, engine, categories), together(found, PLAIN, categories)
    lines = [("tokens per target step", ours.tokens_per_step, bars.tokens_per_step)]
    if weights in bars.speed:
        lines.append(("speed-up overall", ours.faster_than(plain), bars.speed[weights]))
    quoting = [category for category in QUOTING if category in categories]
    if bars.speed_of_quoting and quoting:
        speed = together(found, engine, quoting).faster_than(together(found, PLAIN, quoting))
        lines.append((f"speed-up on {', '.join(quoting)}", speed, bars.speed_of_quoting))
    for text, value, bar in lines:
        print(f"{verdict(value >= bar, is_whole=is_whole)} {engine} {weights}, {text}: {value:.2f} (bar {bar})")


def proposers(arguments: argparse.Namespace, model: str) -> dict[str, dict[str, Any]]:
    """Engine arguments of each."""
    k = arguments.num_tokens
    eagle = arguments.eagle or str(HERE.parent / "speculative" / "heads" / Path(model).name)
    known = {
        "ngram": {"speculative_model": "ngram", "num_speculative_tokens": k or 4},
        "eagle": {"speculative_model": eagle, "num_speculative_tokens": k or 4},
        "eagle-alone": {
            "speculative_model": eagle,
            "num_speculative_tokens": k or 4,
            "additional_config": {"neuronserve": {"lookup_beside_draft": False}},
        },
        "draft": {"speculative_model": arguments.draft or model, "num_speculative_tokens": k or 4},
    }
    return {name: known[name] for name in arguments.proposers}


def options(description: str | None) -> argparse.ArgumentParser:
    """What is measured, on what."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="spec_bench.jsonl; without it nothing is measured")
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--proposers", nargs="+", choices=PROPOSERS, default=["ngram", "eagle"])
    parser.add_argument("--eagle", help="the head's directory; default: the one shipped for the model")
    parser.add_argument("--draft", help="the draft model's directory; default: the model itself")
    parser.add_argument("--num-tokens", type=int, help="drafts per step; 4")
    parser.add_argument("--weights", nargs="+", choices=list(QUANTIZATIONS), default=list(QUANTIZATIONS))
    return parser


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--limit", type=int, help="prompts of each category; all")
    parser.add_argument("--every", type=int, default=1, help="one prompt in so many, the categories in proportion; all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        serve(json.loads(arguments.engine))
        return
    if arguments.data is None:
        print("bench-speculation is skipped: name the prompts, such as make bench-speculation DATA=spec_bench.jsonl")
        return
    asked = list(questions(arguments.data, arguments.limit, arguments.every))
    is_whole = arguments.limit is None and arguments.every == 1
    categories = list(dict.fromkeys(category for category, _ in asked))
    model = arguments.model or demo_model()
    print(
        f"{conditions()}; {len(asked)} prompts, at most {arguments.max_tokens} tokens each, one at a time", flush=True
    )
    for weights in arguments.weights:
        quantization = QUANTIZATIONS[weights]
        chosen = {PLAIN: {}, **proposers(arguments, model)}
        children = [Child(name, model, quantization, extra) for name, extra in chosen.items()]
        try:
            for temperature in TEMPERATURES:
                print(f"\n{weights}, {'greedy' if not temperature else f'temperature {temperature}'}", flush=True)
                found = measure(children, asked, temperature, arguments.max_tokens)
                for child in children[1:]:
                    print(f"\n{child.name}, {weights}, temperature {temperature}", end="")
                    table(found, child.name, categories)
                    judge(found, child.name, weights, temperature, categories, is_whole)
        finally:
            for child in children:
                child.close()


if __name__ == "__main__":
    main()
