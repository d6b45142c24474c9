"""What the cpu device is held to beside its peers: one line a bar, judged by medians of one run.

python benchmarks/bars.py build/bench-peers.json ...   the verdicts of runs that were kept, later ones over earlier
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OURS_FLOAT, OURS_INT8, OURS_DRAFTS = "ours float32", "ours int8", "ours int8, drafts"
OURS_STORED_NARROW = "ours float32, checkpoint in bfloat16"
OURS_FLOAT_HEAD = "ours int8, float32 head"  # as `make bench` has it
LLAMA_CPP, LLAMA_CPP_Q4, OPENVINO = "llama.cpp Q8_0", "llama.cpp Q4_1", "OpenVINO int8"
VLLM, VLLM_TUNED = "vLLM CPU float32", "vLLM CPU float32, libiomp"
VLLM_NARROW = "vLLM CPU bfloat16, libiomp"  # computes with fewer digits, so no bar is held against it
EIGHT_BIT = (LLAMA_CPP, OPENVINO)
FLOAT = (VLLM, VLLM_TUNED)
PEERS = (LLAMA_CPP, LLAMA_CPP_Q4, OPENVINO, VLLM, VLLM_TUNED)

Values = dict[str, dict[str, list[float]]]
"""label -> column -> one value a round."""


ROUNDS = 5
"""What a verdict asks for; of fewer it says `part`."""


def verdict(met: bool, *, is_whole: bool = True) -> str:
    """`part`: met as far as was measured, and not all of it was."""
    return "MISS" if not met else "ok  " if is_whole else "part"


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
        lacks = self._lacks(found, theirs)
        said = verdict(value >= self.least, is_whole=not lacks)
        noted = "".join(f"; {lack}" for lack in lacks)
        return (
            f"{said} bar {self.number}: {self.ours}, {self.column} / {against}: {value:.2f} (bar {self.least}{noted})"
        )

    def _lacks(self, found: Values, theirs: Sequence[str] | dict[str, float]) -> list[str]:
        """What the figure was measured without: peers, and rounds."""
        missing = [label for label in self.peers if label not in theirs]
        columns = [found[self.ours][self.column], *(found[label][self.other or self.column] for label in theirs)]
        rounds = min(map(len, columns))
        return [f"without {', '.join(missing)}"] * bool(missing) + [f"{rounds} rounds of {ROUNDS}"] * (rounds < ROUNDS)


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
    Bar("2, checkpoint in bfloat16", OURS_STORED_NARROW, "decode 1", FLOAT, 1.2),
    Bar("2, checkpoint in bfloat16", OURS_STORED_NARROW, "decode 4", FLOAT, 1.4),
    Bar("2, checkpoint in bfloat16", OURS_STORED_NARROW, "decode 8", FLOAT, 1.25),
    Bar("2, checkpoint in bfloat16", OURS_STORED_NARROW, "decode 16", FLOAT, 1.25),
    Bar("2, checkpoint in bfloat16", OURS_STORED_NARROW, "prefill 128", FLOAT, 1.1),
    Bar("2, checkpoint in bfloat16", OURS_STORED_NARROW, "prefill 512", FLOAT, 1.1),
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


def merged(runs: Sequence[Values]) -> Values:
    """A column of a later run replaces that of an earlier one for all engines: figures of two runs do not compare."""
    found: Values = {}
    for run in runs:
        again = {column for columns in run.values() for column in columns}
        for columns in found.values():
            for column in again:
                columns.pop(column, None)
        for label, columns in run.items():
            found.setdefault(label, {}).update(columns)
    return found


def main() -> None:
    if not sys.argv[1:]:
        sys.exit(__doc__)
    found = merged([json.loads(Path(name).read_text()) for name in sys.argv[1:]])
    print("\n".join(judge(found, [column for columns in found.values() for column in columns])))


if __name__ == "__main__":
    main()
