"""A server process to measure: ours, or vLLM's own CPU build from its environment. Its counters and its CPU time.

What a thread used is read from /proc, so every process below the server counts, whoever started it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import INT8_HEAD
from peers import PEERS, Unavailable, interpreter, reason, serving
from start import free_port, wait

INT8 = ("--quantization", "neuron_quant", "--additional-config", json.dumps(INT8_HEAD["additional_config"]))
"""Flags of our server in int8, as `bench_peers.py` measures it."""

SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    url: str
    pid: int
    model: str
    said: str = ""  # until it was ready

    def metrics(self) -> dict[str, float]:
        """`name{labels}` -> value. Our counts are at most a second old, so wait that long before."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return samples(answer.read().decode())


@contextmanager
def serve(model: str, *, peer: str = "ours", flags: Sequence[str] = ()) -> Iterator[Server]:
    port = free_port()
    python = interpreter(PEERS[peer])
    environment = dict(os.environ, VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    if peer == "ours":
        command = [str(python.parent / "vllm"), "serve", model, "--device", "neuron"]
    else:  # the same server; its command asks for the version of a package that bears another name there
        # PYTHONSAFEPATH: else it would find our plugin's metadata in a checkout that it is started in.
        environment.update(PYTHONSAFEPATH="1", **serving(PEERS[peer]))
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    for name, value in PEERS[peer].extra.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait(server, f"http://127.0.0.1:{port}/health", time.perf_counter())
            # Not by `seek`: the server writes where this file stands.
            said = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
            yield Server(f"http://127.0.0.1:{port}", server.pid, model, said)
        except RuntimeError:
            log.seek(0)
            said = log.read()
            if peer != "ours":
                raise Unavailable(f"{peer}'s server ended: {reason(said)}") from None
            sys.exit(said[-3000:])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=120)


def samples(text: str) -> dict[str, float]:
    """Of Prometheus' text format."""
    found = {}
    for line in text.splitlines():
        if match := SAMPLE.match(line):
            labels = f"{{{match['labels']}}}" if match["labels"] else ""
            found[match["name"] + labels] = float(match["value"])
    return found


def total(metrics: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum over all samples of `name` that carry these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in metrics.items()
        if sample.partition("{")[0] == name and all(label in sample for label in wanted)
    )


@dataclass(frozen=True)
class Thread:
    process: int
    thread: int
    name: str  # of its process


def descendants(pid: int) -> list[int]:
    """`pid` and every process below it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


def cpu_seconds(pid: int) -> dict[Thread, float]:
    """Of every thread of the process and those below it, to the nanosecond."""
    return _scheduled(pid, 0)


def waiting_seconds(pid: int) -> dict[Thread, float]:
    """That each of them wanted to run and had no core."""
    return _scheduled(pid, 1)


def _scheduled(pid: int, field: int) -> dict[Thread, float]:
    found = {}
    for process in descendants(pid):
        try:
            name = Path(f"/proc/{process}/comm").read_text().strip()
            for task in Path(f"/proc/{process}/task").iterdir():
                nanoseconds = int((task / "schedstat").read_text().split()[field])
                found[Thread(process, int(task.name), name)] = nanoseconds / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
