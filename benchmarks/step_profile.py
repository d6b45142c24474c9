"""`make profile`: where a millisecond of a step goes.

    python benchmarks/step_profile.py [--streams 1 8 16] [--quantization int8] [--rounds 5] [--no-server] [--model DIR]

Decode steps and a prefill of 512, in one process: the device's operations by kind, as its main thread saw them, and
around them packing, sampling, the worker, vLLM's scheduler and its handling of outputs. Then a server with the same
streams: CPU time of everything that is not the engine, per step. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import host_share
import measure
import numpy as np
from bench import INT8_HEAD, conditions, demo_model
from bench_peers import PROMPTS
from replay import prompt_ids
from serving import INT8, serve, total

from neuronserve.neuron_worker.device.base import DeviceOutput, PackedBatch
from neuronserve.neuron_worker.device.cpu.library import KINDS
from neuronserve.neuron_worker.device.cpu.native_ops import Bound

WARM, TOKENS, PROMPT = 16, 96, 32
PREFILL = 512

Parts = dict[str, float]
"""What -> milliseconds of a step."""


class Stopwatch:
    """Seconds by name of everything that was asked to be watched; what runs inside another is not counted there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # seconds of the watched calls within each that is open

    def watch(self, owner: Any, verb: str, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, verb)

        def watched(*arguments: Any, **named: Any) -> Any:
            with self.time(name):
                return call(*arguments, **named)

        setattr(owner, verb, watched)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took, within = time.perf_counter() - began, self._inside.pop()
            self.seconds[name] += took - within
            if self._inside:
                self._inside[-1] += took


class Profiler:
    """Our engine in this process, with watches on its seams."""

    def __init__(self, model: str, quantization: str | None) -> None:
        extra = INT8_HEAD if quantization else {}
        self.engine = measure.Vllm(model, "float32", "neuron_quant" if quantization else None, dict(extra))
        core = self.engine.llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        self.device, self.runner = worker.runner.device, worker.runner
        self.stopwatch = Stopwatch()
        watch = self.stopwatch.watch
        watch(self.engine.llm.llm_engine.output_processor, "process_outputs", "vLLM: outputs")
        watch(core.scheduler, "schedule", "vLLM: scheduler")
        watch(core.scheduler, "update_from_output", "vLLM: scheduler, after the step")
        watch(core.model_executor, "execute_model", "worker: the rest")
        watch(self.runner.state, "apply", "worker: requests join, move on, leave")
        watch(self.runner.packer, "pack", "worker: packing")
        watch(self.runner, "_finish", "worker: sampling and report")
        self.programs = self.device._programs
        most = max(len(bound.ops) for program in self.programs.values() for bound in program.bounds)
        self.operations = np.zeros(most)  # seconds of a call, by the place in its program
        self.by_program: dict[int, tuple[Bound, np.ndarray]] = {}  # and of all calls
        watch(self.device, "run", "device: call, around its operations")
        self.device.run = self._counted(self.device.run)

    def decode(self, streams: int, seed: int) -> Parts:
        """Steps in which all streams decode, after the first ones."""
        chance, engine = random.Random(seed), self.engine.llm.llm_engine
        for _ in range(streams):
            self.engine._add([chance.randrange(1000, 40000) for _ in range(PROMPT)], WARM + TOKENS, 0.0)
        for _ in range(WARM + 2):
            engine.step()
        parts = self._steps(TOKENS - 8)
        while engine.has_unfinished_requests():
            engine.step()
        return parts

    def prefill(self, seed: int) -> Parts:
        chance = random.Random(seed)
        self.engine._add([chance.randrange(1000, 40000) for _ in range(PREFILL)], 1, 0.0)
        return self._steps(None)

    def _steps(self, count: int | None) -> Parts:
        """So many steps, or all there are, which count as one."""
        engine, session = self.engine.llm.llm_engine, self.device._session
        self.stopwatch.seconds.clear()
        self.by_program.clear()
        session.profile(self.operations)
        done = 0
        while engine.has_unfinished_requests() if count is None else done < count:
            with self.stopwatch.time("vLLM: the engine's loop"):
                engine.step()
            done += 1
        session.profile(None)
        seconds = dict(self.stopwatch.seconds)
        operations = self._operations()
        seconds["device: call, around its operations"] -= sum(operations.values())
        return {name: 1e3 * value / (count or 1) for name, value in {**operations, **seconds}.items()}

    def _operations(self) -> Parts:
        found: Parts = defaultdict(float)
        for bound, seconds in self.by_program.values():
            labels = [label(KINDS[op["kind"]], int(op["in"]), int(op["out"])) for op in bound.ops]
            for name, value in by_kind(seconds, labels).items():
                found[name] += value
        return found

    def _counted(self, run: Callable[[PackedBatch], DeviceOutput]) -> Callable[[PackedBatch], DeviceOutput]:
        """Which operations a call has depends on its shape and on what is asked of it."""

        def counted(batch: PackedBatch) -> DeviceOutput:
            self.operations[:] = 0
            output = run(batch)
            bound = self.programs[batch.shape].latest
            _, sums = self.by_program.setdefault(id(bound), (bound, np.zeros(len(bound.ops))))
            sums += self.operations[: len(sums)]
            return output

        return counted


@contextmanager
def logs_apart() -> Iterator[None]:
    """vLLM logs to standard output; the tables are to stand there alone."""
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def label(kind: str, width: int, out: int) -> str:
    return f"device: {kind} {width} to {out}" if out and kind != "embed" else f"device: {kind}"


def by_kind(seconds: np.ndarray, labels: list[str]) -> Parts:
    found: Parts = defaultdict(float)
    for name, value in zip(labels, seconds.tolist(), strict=True):
        found[name] += value
    return dict(found)


def middle(rounds: list[Parts]) -> Parts:
    names = {name: None for parts in rounds for name in parts}
    return {name: statistics.median(parts.get(name, 0.0) for parts in rounds) for name in names}


def show(title: str, parts: Parts) -> None:
    whole = sum(parts.values())
    print(f"\n{title}: {whole:.2f} ms\n\n| | ms | share |\n| --- | --- | --- |")
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if value >= 0.001:
            print(f"| {name} | {value:.3f} | {value / whole:.1%} |")


def outside_the_engine(model: str, flags: tuple[str, ...], rounds: int) -> None:
    """CPU time by process, of a server with as many streams as `host_share` has."""
    ids = prompt_ids(model, PROMPTS)
    with serve(model, flags=("--max-num-seqs", "16", "--max-model-len", "1024", *flags)) as server:
        host_share.one_round(server, ids)
        found = []
        for _ in range(rounds):
            before = total(server.metrics(), "neuronserve_steps_total")
            spent = host_share.one_round(server, ids)
            steps = total(server.metrics(), "neuronserve_steps_total") - before
            engine = spent.engine_main - spent.main_in_device
            parts = {**spent.others, "engine's main thread outside device calls": engine}
            found.append({name: 1e3 * value / steps for name, value in parts.items()})
    show(f"CPU time outside device calls per step, a server with {host_share.STREAMS} streams", middle(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--quantization", choices=["int8", "none"], default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-server", action="store_true", help="leave out the part over HTTP")
    arguments = parser.parse_args()
    model, is_int8 = arguments.model or demo_model(), arguments.quantization == "int8"
    print(conditions())
    with logs_apart():
        profiler = Profiler(model, "int8" if is_int8 else None)
    for streams in arguments.streams:
        profiler.decode(streams, 0)
        rounds = [profiler.decode(streams, seed) for seed in range(1, arguments.rounds + 1)]
        show(f"a decode step of {streams} streams, {arguments.quantization}", middle(rounds))
    profiler.prefill(0)
    rounds = [profiler.prefill(seed) for seed in range(1, arguments.rounds + 1)]
    show(f"a prompt of {PREFILL} tokens, {arguments.quantization}", middle(rounds))
    if not arguments.no_server:
        outside_the_engine(model, INT8 if is_int8 else (), arguments.rounds)


if __name__ == "__main__":
    main()
