"""What the cpu device is held to beside its peers: one line a bar, judged by medians of one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

OURS_FLOAT, OURS_INT8, OURS_DRAFTS = "ours float32", "ours int8", "ours int8, drafts"
OURS_FLOAT_HEAD = "ours int8, float32 head"  # as `make bench` has it
LLAMA_CPP, LLAMA_CPP_Q4, OPENVINO = "llama.cpp Q8_0", "llama.cpp Q4_1", "OpenVINO int8"
VLLM, VLLM_TUNED = "vLLM CPU float32", "vLLM CPU float32, libiomp"
EIGHT_BIT = (LLAMA_CPP, OPENVINO)
FLOAT = (VLLM, VLLM_TUNED)
PEERS = (LLAMA_CPP, LLAMA_CPP_Q4, OPENVINO, VLLM, VLLM_TUNED)

Values = dict[str, dict[str, list[float]]]
"""label -> column -> one value a round."""


def verdict(met: bool) -> str:
    return "ok  " if met else "MISS"


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
        """`part`: it would be met, but a peer is missing that may be better than those that are there."""
        mine = medians(found, [self.ours], self.column)
        theirs = medians(found, self.peers, self.other or self.column)
        if not mine or not theirs:
            return f"none bar {self.number}: {self.ours}, {self.column}: nothing to compare with"
        best = max(theirs, key=lambda label: theirs[label])
        value = mine[self.ours] / theirs[best]
        against = f"{best}, {self.other}" if self.other else best
        missing = [label for label in self.peers if label not in theirs]
        said = "part" if missing and value >= self.least else verdict(value >= self.least)
        without = f"; without {', '.join(missing)}" if missing else ""
        return (
            f"{said} bar {self.number}: {self.ours}, {self.column} / {against}: {value:.2f} (bar {self.least}{without})"
        )


def medians(found: Values, labels: Sequence[str], column: str) -> dict[str, float]:
    return {label: statistics.median(found[label][column]) for label in labels if found.get(label, {}).get(column)}


BARS = (
    Bar("1", OURS_INT8, "decode 4", EIGHT_BIT, 1.1),
    Bar("1", OURS_INT8, "decode 8", EIGHT_BIT, 1.3),
    Bar("1", OURS_INT8, "decode 16", EIGHT_BIT, 1.4),
    Bar("1", OURS_INT8, "prefill 512", EIGHT_BIT, 1.3),
    Bar("2", OURS_FLOAT, "decode 1", FLOAT, 1.2),
    Bar("2", OURS_FLOAT, "decode 4", FLOAT, 1.4),
    Bar("2", OURS_FLOAT, "decode 8", FLOAT, 1.25),
    Bar("2", OURS_FLOAT, "decode 16", FLOAT, 1.25),
    Bar("2", OURS_FLOAT, "prefill 128", FLOAT, 1.1),
    Bar("2", OURS_FLOAT, "prefill 512", FLOAT, 1.1),
    Bar("9", OURS_FLOAT, "sampled 8", (OURS_FLOAT,), 0.85, other="decode 8"),
    Bar("9", OURS_FLOAT, "sampled 16", (OURS_FLOAT,), 0.85, other="decode 16"),
    Bar("9", OURS_INT8, "sampled 8", (OURS_INT8,), 0.85, other="decode 8"),
    Bar("9", OURS_INT8, "sampled 16", (OURS_INT8,), 0.85, other="decode 16"),
    Bar("of bench", OURS_FLOAT_HEAD, "decode 8", FLOAT, 1.5),
    Bar("of bench", OURS_FLOAT_HEAD, "sampled 8", (OURS_FLOAT_HEAD,), 0.85, other="decode 8"),
    Bar("of bench", OURS_FLOAT_HEAD, "sampled 16", (OURS_FLOAT_HEAD,), 0.85, other="decode 16"),
    Bar("10", OURS_INT8, "decode 1", EIGHT_BIT, 1.0),
    Bar("10", OURS_DRAFTS, "text", PEERS, 1.0),
    Bar("10", OURS_DRAFTS, "text", (OURS_INT8,), 1.3),
)


def judge(found: Values, columns: Sequence[str]) -> list[str]:
    """Of the bars whose engine and column were asked for."""
    return [bar.judge(found) for bar in BARS if bar.ours in found and bar.column in columns]
