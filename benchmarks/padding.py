"""Prompt tokens computed for each real one, on real traffic, under each bucket policy.

    python benchmarks/padding.py --data DIR

DIR holds azure_conv_2023.csv and azure_code_2023.csv (columns arrival_s, input_tokens, output_tokens). Every
prompt is computed alone, from its first token: no prompts share a call and no prefix is cached.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bars import verdict
from data_files import TRACES as TRACES_FOLDER
from data_files import find

from neuronserve.bucketing import ladder
from neuronserve.bucketing.ladder import Ladder
from neuronserve.bucketing.plan import Plan, PlanRequest, make_plan
from neuronserve.bucketing.shape import StepDemand
from neuronserve.neuron_worker.device import registry

MAX_MODEL_LEN = 16384  # the longest prompt of both traces is 14050 tokens
MAX_NUM_SEQS = 16
OURS, MOST_GRAPHS = "chunked, 8 graphs", 8
GIVEN = "128,512,1024,2048,3072,4096,8192"
# trace: (file, the most our ladder of eight graphs may compute for each real token)
TRACES = {"conversation": ("azure_conv_2023.csv", 1.12), "code": ("azure_code_2023.csv", 1.10)}


@dataclass(frozen=True)
class Policy:
    name: str
    graphs: int
    computed: Callable[[int], tuple[int, int]]  # prompt length -> (tokens computed, calls)


def whole(name: str, sizes: tuple[int, ...]) -> Policy:
    """A prompt is one call, padded to the smallest size that holds it."""
    fitted = Ladder(sizes)
    return Policy(name, len(sizes), lambda length: (fitted.fit(length), 1))


def chunked(name: str, plan: Plan) -> Policy:
    """Full chunks, then the cheapest shape for the rest. All graphs of the plan count, decode's too."""

    def computed(length: int) -> tuple[int, int]:
        assert plan.chunk_tokens is not None
        tokens = calls = 0
        for start in range(0, length, plan.chunk_tokens):
            end = min(start + plan.chunk_tokens, length)
            tokens += plan.choose(StepDemand(0, 1, end - start, end)).num_tokens
            calls += 1
        return tokens, calls

    return Policy(name, len(plan.shapes), computed)


def policies(given: tuple[int, ...]) -> list[Policy]:
    request = PlanRequest(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, block_size=32)
    device = registry.capabilities("cpu")
    eight = replace(device, default_max_graphs=MOST_GRAPHS)
    return [
        whole("powers of two", ladder.powers_of_two(MAX_MODEL_LEN, 128)),
        whole("as given", ladder.as_given((*given, MAX_MODEL_LEN))),
        chunked(OURS, make_plan(request, eight)),
        chunked("chunked, default", make_plan(request, device)),
    ]


def read_lengths(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(row["input_tokens"]) for row in csv.DictReader(file) if int(row["input_tokens"]) > 0]


def measure(policy: Policy, lengths: list[int]) -> tuple[float, float]:
    """(tokens computed for each real one, calls for each prompt)."""
    results = [policy.computed(length) for length in lengths]
    return sum(tokens for tokens, _ in results) / sum(lengths), sum(calls for _, calls in results) / len(lengths)


def judge(trace: str, ratio: float, graphs: int, bar: float) -> str:
    met = ratio <= bar and graphs <= MOST_GRAPHS
    return f"{verdict(met)} bar 8, {trace}: {ratio:.3f} (bar {bar}) with {graphs} graphs (at most {MOST_GRAPHS})"


def report(trace: str, lengths: list[int], bar: float, given: tuple[int, ...]) -> None:
    mean = sum(lengths) / len(lengths)
    print(f"\n{trace}: {len(lengths)} prompts, {mean:.0f} tokens on average, longest {max(lengths)}")
    judged = ""
    print(f"{'policy':20} {'graphs':>6} {'computed / real':>16} {'calls / prompt':>15}")
    for policy in policies(given):
        ratio, calls = measure(policy, lengths)
        if policy.name == OURS:
            judged = judge(trace, ratio, policy.graphs, bar)
        print(f"{policy.name:20} {policy.graphs:6} {ratio:16.3f} {calls:15.2f}")
    print(judged)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="directory with the Azure traces")
    parser.add_argument("--buckets", default=GIVEN, help=f"sizes of the policy 'as given' (default {GIVEN})")
    arguments = parser.parse_args()
    given = ladder.parse(arguments.buckets, "--buckets") or ()
    for trace, (name, bar) in TRACES.items():
        path = find(arguments.data, TRACES_FOLDER, name)
        if path is None:
            print(f"{trace}: skipped, no {name}; give its directory by --data")
        else:
            report(trace, read_lengths(path), bar, given)


if __name__ == "__main__":
    main()
