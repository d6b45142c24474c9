"""Faults of a device, injected under a real server, and what its clients saw of each.

The server runs the arithmetic device in a process of its own that fails on demand (`tests/device/faulty_host.py`).
A round has three clients that run, one that waits for a place, a fault at a phase, and one more client afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ..neuron_worker.tiny_model import tiny_model
from .server import PATIENCE, VLLM, Server, free_port

FAULTY_HOST = Path(__file__).resolve().parent.parent / "device" / "faulty_host.py"
PLACES = 3
LENGTH = 32768
LONG, SHORT = 30000, 8  # long: still running when the fault strikes, however fast the machine
PROMPT = [(7 * i) % 60 + 3 for i in range(40)]
Faults = dict[str, str | list[str]]


@dataclass(frozen=True)
class Case:
    fault: str  # in words
    phase: str
    faults: Faults
    at_prefill: bool = False  # struck by the third client's prompt, while the other two decode


CASES = (
    Case("kill -9", "prefill", {"prefill": "die"}, at_prefill=True),
    Case("kill -9", "decode", {"decode": "die"}),
    Case("kill -9, twice", "decode, then the restart's load", {"decode": "die", "load": "die"}),
    Case("kill -9, twice", "decode, then the restart's compile", {"decode": "die", "compile": "die"}),
    Case("hangs", "prefill", {"prefill": "hang"}, at_prefill=True),
    Case("hangs", "decode", {"decode": "hang"}),
    Case("stopped (SIGSTOP)", "prefill", {"prefill": "stop"}, at_prefill=True),
    Case("stopped (SIGSTOP)", "decode", {"decode": "stop"}),
    Case("writes what is no message", "prefill", {"prefill": "babble"}, at_prefill=True),
    Case("writes what is no message", "decode", {"decode": "babble"}),
    Case("the backend raises", "prefill", {"prefill": "break"}, at_prefill=True),
    Case("the backend raises", "decode", {"decode": "break"}),
)


@dataclass(frozen=True)
class Answer:
    """What one client got."""

    status: int
    text: str = ""
    errors: tuple[str, ...] = ()  # messages, in order
    finish_reason: str | None = None

    @property
    def outcome(self) -> str:
        if self.errors:
            return f"HTTP {self.status}: " + " / ".join(self.errors)
        return f"served ({self.finish_reason})"


@dataclass(frozen=True)
class Leaks:
    """What there is after a round minus what there was before."""

    processes: int
    descriptors: int
    requests: float
    cache: float  # share of the key-value cache in use

    @property
    def words(self) -> str:
        found = {name: count for name, count in vars(self).items() if count}
        return ", ".join(f"{count} {name}" for name, count in found.items()) or "nothing"


@dataclass(frozen=True)
class Outcome:
    case: Case
    streaming: Answer
    whole: Answer
    third: Answer
    waiting: Answer
    after: Answer
    seconds: float  # from the fault until a request was served
    leaks: Leaks


def _text(path: Path) -> str | None:
    """Of a file that the device may remove at any moment."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


class FaultyServer:
    """A server of three places whose device fails on demand."""

    def __init__(self, directory: Path, *, restarts: int = 3, step_seconds: int = 3) -> None:
        self.model = Path(tiny_model(directory / "tiny", max_position_embeddings=LENGTH))
        python = directory / "faulty_python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAULTY_HOST} "$@"\n')
        python.chmod(0o755)
        options = {
            "backend": "arithmetic",
            "device_python": str(python),
            "device_timeout": step_seconds,
            "device_restarts": restarts,
        }
        command = [VLLM, "serve", str(self.model), "--host", "127.0.0.1", "--port", str(port := free_port())]
        flags = {"max-model-len": LENGTH, "max-num-seqs": PLACES, "served-model-name": "tiny", "dtype": "float32"}
        command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command += ["--additional-config", json.dumps({"neuronserve": options})]
        self.server = Server(command, port, directory / "log")

    def ready(self) -> FaultyServer:
        self.server.wait_until_ready()
        self.good = self.complete(SHORT).text
        return self

    def close(self) -> None:
        self.server.close()

    # -- clients

    def complete(self, num_tokens: int, *, stream: bool = False, begun: Callable[[], None] | None = None) -> Answer:
        asked = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        with httpx.stream("POST", f"{self.server.url}/v1/completions", json=asked, timeout=PATIENCE) as response:
            if stream and response.status_code == 200:
                return _streamed(response.status_code, response.iter_lines(), begun)
            body = json.loads(response.read())
            if "error" in body:
                return Answer(response.status_code, errors=(body["error"]["message"],))
            choice = body["choices"][0]
            return Answer(response.status_code, choice["text"], (), choice["finish_reason"])

    def health(self) -> int | None:
        """None: nobody listens."""
        try:
            return httpx.get(f"{self.server.url}/health", timeout=PATIENCE).status_code
        except httpx.TransportError:
            return None

    # -- a round

    def run(self, case: Case) -> Outcome:
        before = self.held()
        streaming, whole = Client(self, LONG, stream=True), Client(self, LONG, stream=False)
        self.server.wait_for_metric("vllm:num_requests_running", 2)
        if case.at_prefill:
            self.arm(case.faults)
            third = Client(self, LONG, stream=True)
            struck = self.wait_for_strike()
            waiting = Client(self, SHORT, stream=False)
        else:
            third = Client(self, LONG, stream=True)
            third.begun.wait(PATIENCE)
            waiting = Client(self, SHORT, stream=False)
            self.server.wait_for_metric("vllm:num_requests_waiting", 1)
            self.arm(case.faults)
            struck = self.wait_for_strike()
        answers = [client.answer() for client in (streaming, whole, third, waiting)]
        after = self.complete(SHORT)
        seconds = time.monotonic() - struck
        return Outcome(case, *answers, after, seconds, self.leaks(before))

    def arm(self, faults: Faults) -> None:
        path = self.model / "faults.json"
        self._armed = json.dumps(faults)
        path.with_suffix(".armed").write_text(self._armed)
        path.with_suffix(".armed").replace(path)

    def wait_for_strike(self) -> float:
        path, give_up = self.model / "faults.json", time.monotonic() + PATIENCE
        while _text(path) == self._armed:
            assert time.monotonic() < give_up, "no step met the fault"
            time.sleep(0.002)
        return time.monotonic()

    def devices(self) -> list[int]:
        return [pid for pid in descendants(self.server.process.pid) if _is_device(pid) and is_running(pid)]

    def replace_idle_device(self) -> None:
        """Kill it while nobody asks for anything, and wait for another one."""
        killed = self.devices()
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):  # of the two, one ends the other
                os.kill(pid, signal.SIGKILL)
        give_up = time.monotonic() + PATIENCE
        while "the device was restarted" not in self.server.output or set(self.devices()) & set(killed):
            assert time.monotonic() < give_up, "the device was not replaced"
            time.sleep(0.1)

    # -- what is held

    def held(self) -> tuple[int, int]:
        """Processes of the server, dead ones too, and open files of all of them but the device's."""
        family = descendants(self.server.process.pid)
        ours = [pid for pid in family if not _is_device(pid)]
        return len(family), sum(_num_files(pid) for pid in ours)

    def leaks(self, before: tuple[int, int]) -> Leaks:
        """What is still there after a while; a connection may take a moment to close."""
        give_up = time.monotonic() + 10
        while (now := self.held()) != before and time.monotonic() < give_up:
            time.sleep(0.1)
        requests = sum(self.server.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting"))
        used = self.server.metric("vllm:kv_cache_usage_perc")
        return Leaks(now[0] - before[0], max(0, now[1] - before[1]), requests, used)


class Client:
    """One request in a thread of its own."""

    def __init__(self, server: FaultyServer, num_tokens: int, *, stream: bool) -> None:
        self.begun = threading.Event()  # the first token came
        self._found: list[Answer] = []
        self._thread = threading.Thread(target=self._ask, args=(server, num_tokens, stream), daemon=True)
        self._thread.start()

    def _ask(self, server: FaultyServer, num_tokens: int, stream: bool) -> None:
        try:
            self._found.append(server.complete(num_tokens, stream=stream, begun=self.begun.set))
        except httpx.TransportError as error:
            self._found.append(Answer(0, errors=(f"connection lost: {type(error).__name__}",)))

    def answer(self) -> Answer:
        self._thread.join(PATIENCE)
        assert self._found, "a client was left without an answer"
        return self._found[0]


def _streamed(status: int, lines: Iterator[str], begun: Callable[[], None] | None) -> Answer:
    text, errors, reason, done = "", [], None, False
    for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            done = True
            continue
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            errors.append(event["error"]["message"])
            continue
        text += event["choices"][0]["text"]
        reason = event["choices"][0]["finish_reason"] or reason
        if begun is not None:
            begun()
    return Answer(status, text, tuple(errors if done else [*errors, "the stream broke off"]), reason)


def descendants(ancestor: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _is_device(pid: int) -> bool:
    try:
        return b"faulty_host" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _num_files(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


@contextmanager
def faulty_server(directory: Path, **options: int) -> Iterator[FaultyServer]:
    server = FaultyServer(directory, **options)
    try:
        yield server.ready()
    finally:
        server.close()


@dataclass(frozen=True)
class Ending:
    """What was seen when the restarts were used up."""

    running: Answer
    waiting: Answer
    after: Answer
    health: tuple[int | None, ...]  # every answer that differs from the one before; None: nobody listens
    exit_code: int
    log: str
    left: tuple[int, ...]  # processes


def exhaust(server: FaultyServer, restarts: int) -> Ending:
    """Lose the device, and every restart after it."""
    family = descendants(server.server.process.pid)
    clients = [Client(server, LONG, stream=True) for _ in range(PLACES)]
    for client in clients:
        client.begun.wait(PATIENCE)
    waiting = Client(server, SHORT, stream=False)
    server.server.wait_for_metric("vllm:num_requests_waiting", 1)
    server.arm({"decode": "die", "load": ["die"] * restarts})
    running, waited = clients[0].answer(), waiting.answer()
    after = server.complete(SHORT)
    health = [server.health()]
    while server.server.process.poll() is None:
        if (now := server.health()) != health[-1]:
            health.append(now)
        time.sleep(0.1)
    code = server.server.wait()
    give_up = time.monotonic() + 10
    while (left := [pid for pid in family if is_running(pid)]) and time.monotonic() < give_up:
        time.sleep(0.1)
    return Ending(running, waited, after, tuple(health), code, server.server.output, tuple(left))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
