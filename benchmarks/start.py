"""How long a server takes to be ready, beside the same server on the `arithmetic` device, which computes nothing.

    python benchmarks/start.py [--rounds 3] [--model DIR]

Warm: kernels built, model in the page cache. Cold: an empty cache for what we build, the model's pages dropped.
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
from pathlib import Path

from bench import conditions, demo_model


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ready_seconds(model: str, backend: str, cache: str | None) -> float:
    port = free_port()
    environment = dict(os.environ, NEURONSERVE_BACKEND=backend)
    if cache:
        environment["XDG_CACHE_HOME"] = cache
    command = [str(Path(sys.executable).parent / "vllm"), "serve", model, "--device", "neuron"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "16", "--max-model-len", "2048"]
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
    for path in Path(model).glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    print(conditions())
    found: dict[str, list[float]] = {"arithmetic": [], "cpu warm": [], "cpu cold": []}
    ready_seconds(model, "cpu", None)  # so that "warm" is warm
    for _ in range(arguments.rounds):
        found["arithmetic"].append(ready_seconds(model, "arithmetic", None))
        found["cpu warm"].append(ready_seconds(model, "cpu", None))
        drop_pages(model)
        with tempfile.TemporaryDirectory() as cache:
            found["cpu cold"].append(ready_seconds(model, "cpu", cache))
    median = {name: statistics.median(values) for name, values in found.items()}
    for name, values in found.items():
        spread = f"{min(values):.1f}-{max(values):.1f}"
        print(f"{name}: ready in {median[name]:.1f} s ({spread}), {median[name] - median['arithmetic']:+.1f} s")
    for name, bar in (("cpu warm", 5.0), ("cpu cold", 15.0)):
        later = median[name] - median["arithmetic"]
        print(f"{'ok  ' if later <= bar else 'MISS'} {name}: {later:.1f} s later than arithmetic (bar {bar})")


if __name__ == "__main__":
    main()
