"""What int8 costs in accuracy: `python benchmarks/accuracy.py --data DIR [--windows 40] [--questions 100]`.

DIR has plain_wiki.txt and gsm8k_test.jsonl, or corpora/ and prompts/ with them. Perplexity: consecutive windows of 1024
tokens, each token scored after those before it in its window. GSM8K: the given answer's log-likelihood per token, after
its question. Everything goes through the device, as prompts that are scored, so the numbers are those of what is
served. By default a part of the data, in minutes; `--windows 0 --questions 0` takes all of it, and only that is judged.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from bars import verdict
from bench import conditions, demo_model
from data_files import CORPORA, PROMPTS, find
from numpy.typing import NDArray
from transformers import AutoTokenizer

from neuronserve.bucketing.pack import NO_TARGET, StepPacker
from neuronserve.bucketing.row import Row, int32
from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape, Want

WINDOW, CHUNK, BLOCK = 1024, 256, 32
BAR = 1.015
TEXT, QUESTIONS = "plain_wiki.txt", "gsm8k_test.jsonl"
T = TypeVar("T")
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8 weights": {"quantization": "int8"},
    "int8 weights, head too": {"quantization": "int8", "quantize_head": True},
    "int8": {"quantization": "int8", "activations": "int8"},
    "int8, head too": {"quantization": "int8", "activations": "int8", "quantize_head": True},
}


class Scorer:
    """A device that reads prompts and says how likely each of their tokens was."""

    def __init__(self, model: str, how: dict[str, Any]) -> None:
        self._device = registry.create("cpu", None)
        self._device.load(model, DeviceOptions(1, WINDOW, BLOCK, 1, **how))
        self._device.allocate(1 + WINDOW // BLOCK)
        self._shape = StepShape(0, 1, CHUNK, WINDOW)
        self._packer = StepPacker(BLOCK, 1)
        self._packer.prepare(self._shape)
        self._device.compile(self._shape)
        self._device.seal()

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Of every token but the first, after those before it. [n - 1]"""
        targets, found = [*tokens[1:], NO_TARGET], []
        blocks = int32(list(range(1, 1 + WINDOW // BLOCK)))
        for start in range(0, len(tokens), CHUNK):
            piece, wanted = (int32(list(values[start : start + CHUNK])) for values in (tokens, targets))
            row = Row(piece, start, blocks, is_decode=False, want=Want.NOTHING, targets=wanted)
            scores = self._device.run(self._packer.pack([row], self._shape)).prompt_scores
            assert scores is not None
            found.append(scores.target_logprobs[: len(piece)].copy())
        return np.concatenate(found)[:-1]

    def close(self) -> None:
        self._device.close()


@dataclass(frozen=True)
class Question:
    tokens: list[int]
    answer: int  # where it starts


@dataclass(frozen=True)
class Data:
    windows: list[list[int]]
    questions: list[Question]
    is_all: bool  # not a part of what the files have


def read(text_path: Path, questions_path: Path, model: str, num_windows: int, num_questions: int) -> Data:
    """Says how much of the files is taken."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = text_path.read_text(encoding="utf-8")
    # Windows lie all over the text: its start alone would be a few articles.
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    questions = list(_questions(tokenizer, questions_path.read_text(encoding="utf-8").splitlines()))
    taken, asked = spread(windows, num_windows), spread(questions, num_questions)
    print(f"{len(taken)} of {len(windows)} windows of {WINDOW} tokens, {len(asked)} of {len(questions)} questions\n")
    return Data(taken, asked, len(taken) == len(windows) and len(asked) == len(questions))


def _questions(tokenizer: Any, lines: Sequence[str]) -> Iterator[Question]:
    for line in lines:
        item = json.loads(line)
        question = tokenizer(f"Question: {item['question']}\nAnswer:", add_special_tokens=False)["input_ids"]
        answer = tokenizer(f" {item['answer']}", add_special_tokens=False)["input_ids"]
        if len(question) + len(answer) <= WINDOW:
            yield Question([*question, *answer], len(question))


def spread(items: list[T], count: int) -> list[T]:
    """`count` of them at equal distances; 0: all."""
    return items if not 0 < count < len(items) else [items[i * len(items) // count] for i in range(count)]


@dataclass(frozen=True)
class Result:
    windows: NDArray[np.float64]  # mean log-probability of each window's tokens
    answers: NDArray[np.float64]  # the same of each answer's

    @property
    def perplexity(self) -> float:
        return math.exp(-self.windows.mean())

    @property
    def answer_perplexity(self) -> float:
        return math.exp(-self.answers.mean())


def measure(model: str, how: dict[str, Any], data: Data) -> Result:
    scorer = Scorer(model, how)
    windows = [scorer.logprobs(tokens).mean(dtype=np.float64) for tokens in data.windows]
    answers = [scorer.logprobs(each.tokens)[each.answer - 1 :].mean(dtype=np.float64) for each in data.questions]
    scorer.close()
    return Result(np.array(windows), np.array(answers))


def report(label: str, result: Result, exact: Result) -> None:
    ratio, answers = result.perplexity / exact.perplexity, result.answer_perplexity / exact.answer_perplexity
    apart = np.abs(result.answers - exact.answers)
    print(
        f"| {label} | {result.perplexity:.3f} | {100 * (ratio - 1):+.2f} % "
        f"| {result.answers.mean():.4f} | {100 * (answers - 1):+.2f} % | {apart.mean():.4f} | {apart.max():.3f} |",
        flush=True,
    )


def judge(results: dict[str, Result], *, is_all: bool) -> list[str]:
    """`part`: within the bar on a part of the data."""
    exact, *others = results
    found = []
    for label in others:
        ratio = results[label].perplexity / results[exact].perplexity
        said = verdict(ratio <= BAR) if is_all or ratio > BAR else "part"
        found.append(
            f"{said} bar 7: perplexity, {label} / {exact}: {100 * (ratio - 1):+.2f} % (bar {100 * (BAR - 1):.1f} %)"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--questions", type=int, default=100)
    arguments = parser.parse_args()
    text, questions = find(arguments.data, CORPORA, TEXT), find(arguments.data, PROMPTS, QUESTIONS)
    if text is None or questions is None:
        print(f"accuracy: skipped; --data DIR with {TEXT} and {QUESTIONS} is not given")
        return
    model = arguments.model or demo_model()
    print(conditions())
    data = read(text, questions, model, arguments.windows, arguments.questions)
    print("| | perplexity | to float32 | answers: log-likelihood a token | answers' perplexity | apart, mean | most |")
    print("| --- " * 7 + "|")
    results: dict[str, Result] = {}
    for label, how in FORMS.items():
        results[label] = measure(model, how, data)
        report(label, results[label], next(iter(results.values())))
    print("\n" + "\n".join(judge(results, is_all=data.is_all)))


if __name__ == "__main__":
    main()
