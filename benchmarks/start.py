"""How long a server takes to be ready, beside the same server on the `arithmetic` device, which computes nothing.

    python benchmarks/start.py [--rounds 3] [--model DIR]

Warm: the model in the page cache. Cold: nothing in a cache, of ours or of vLLM's, the model's pages and the kernels'
dropped; so is what it is held against, for vLLM looks at the model anew then, whatever computes. An installation has
its kernels compiled; where they do not fit the machine they are compiled at the first start, which is measured by
itself and added.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bars import verdict
from bench import conditions, demo_model

WARM_BAR, COLD_BAR = 5.0, 15.0
STARTS = 3  # of each form
FLAGS = {"float32": (), "int8": ("--quantization", "neuron_quant")}
BUILD = "import sys; from pathlib import Path; from neuronserve.neuron_worker.device.cpu import build; "
BUILD += "sys.exit(build.build(Path(sys.argv[1])) is None)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ready_seconds(model: str, backend: str, flags: Sequence[str] = (), cache: str | None = None) -> float:
    port = free_port()
    environment = dict(os.environ, NEURONSERVE_BACKEND=backend)
    if cache:
        environment["XDG_CACHE_HOME"] = cache
    command = [str(Path(sys.executable).parent / "vllm"), "serve", model, "--device", "neuron"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "16", "--max-model-len", "2048"]
    command += flags
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            return wait(server, f"http://127.0.0.1:{port}/health", begin)
        except RuntimeError:
            log.seek(0)
            sys.exit(log.read()[-3000:])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=120)


def wait(server: subprocess.Popen[bytes], url: str, begin: float) -> float:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return time.perf_counter() - begin
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.05)
    raise RuntimeError("the server ended before it was ready")


def drop_pages(model: str) -> None:
    kernels = Path(find_spec("neuronserve.neuron_worker.device.cpu").submodule_search_locations[0])  # type: ignore
    for path in (*Path(model).glob("*.safetensors"), *kernels.glob("*.so")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compile_seconds() -> float:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", BUILD, folder], check=True)
        return time.perf_counter() - begin


def measure(model: str, rounds: int) -> dict[str, list[float]]:
    """Name of a start -> seconds in each round."""
    found: dict[str, list[float]] = defaultdict(list)
    starts = {"arithmetic": ("arithmetic", ()), **{form: ("cpu", flags) for form, flags in FLAGS.items()}}
    for flags in FLAGS.values():
        ready_seconds(model, "cpu", flags)  # so that "warm" is warm
    for _ in range(rounds):
        for form, (backend, flags) in starts.items():
            found[f"{form}, warm"].append(ready_seconds(model, backend, flags))
            drop_pages(model)
            with tempfile.TemporaryDirectory() as cache:
                found[f"{form}, cold"].append(ready_seconds(model, backend, flags, cache))
        found["compiling the kernels"].append(compile_seconds())
    return found


def judge(what: str, later: float, bar: float, rounds: int) -> str:
    said = verdict(later <= bar, is_whole=rounds >= STARTS)
    return f"{said} bar 6: {what}: ready {later:.1f} s later than arithmetic (bar {bar})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=STARTS)
    arguments = parser.parse_args()
    print(conditions())
    found = measure(arguments.model or demo_model(), arguments.rounds)
    median = {name: statistics.median(values) for name, values in found.items()}
    for name, values in found.items():
        print(f"{name}: {median[name]:.1f} s ({min(values):.1f}-{max(values):.1f})")
    for form in FLAGS:
        for state, bar, more in (
            ("warm", WARM_BAR, 0.0),
            ("cold", COLD_BAR, 0.0),
            ("cold", COLD_BAR, median["compiling the kernels"]),
        ):
            also = " and kernels that have to be compiled" if more else ""
            later = median[f"{form}, {state}"] + more - median[f"arithmetic, {state}"]
            print(judge(f"{form}, {state}{also}", later, bar, arguments.rounds))


if __name__ == "__main__":
    main()
