"""A server process of the user's kind: started from a command line, watched through its port, ended by a signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

BIN = Path(sys.executable).parent
VLLM = str(BIN / "vllm")
PATIENCE = 300
"""Seconds for whatever must happen in the end; a busy machine takes long, and no test is decided by time."""

CLASSIC = ("NEURON_", "NEURONSERVE_", "VLLM_")


def clean_environment(**more: str) -> dict[str, str]:
    """The caller's shell without what would configure a server, or this test's own way of running vLLM."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLASSIC)}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **more}


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


class Server:
    """One process; `command` is a shell's line or a list of words. Its output goes to `log`."""

    def __init__(self, command: str | list[str], port: int, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.port = port
        self.log = log
        self._file = log.open("wb")
        shell = isinstance(command, str)
        # exec: the process we signal is the server, not the shell that started it.
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", f"exec {command}"] if shell else command,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=clean_environment(**(env or {})),
            cwd=log.parent,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_ready(self) -> Server:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"not ready after {PATIENCE} s:\n{self.output}")

    def metric(self, name: str) -> float:
        """Sum of a Prometheus metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def wait_for_metric(self, name: str, value: float) -> None:
        deadline = time.monotonic() + PATIENCE
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}"
            time.sleep(0.1)

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        try:
            self.terminate()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            self._file.close()
