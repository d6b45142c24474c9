"""Real vLLM over the arithmetic device, in this process, and what its answers must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from neuronserve.neuron_worker.device.arithmetic import ArithmeticDevice, answer
from neuronserve.neuron_worker.device.errors import DeviceLost
from neuronserve.neuron_worker.worker import NeuronWorker

from .tiny_model import VOCAB_SIZE


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by the device's rule: 3 + (1 * t_0 + 2 * t_1 + ...) mod 61."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(answer(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


def greedy(num_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, **more})


class Engine:
    """An `LLM` and, for schedules, its engine step by step."""

    def __init__(self, model: str, **arguments: Any) -> None:
        # Drafts in every step: no clock decides what a test sees.
        options = {
            "backend": "arithmetic",
            "adaptive_depth": False,
            "lookup_beside_draft": False,
            **arguments.pop("options", {}),
        }
        defaults = {"max_num_seqs": 4, "max_model_len": 128, "block_size": 16, "dtype": "float32"}
        self.llm = LLM(model=model, additional_config={"neuronserve": options}, **{**defaults, **arguments})
        self.core = self.llm.llm_engine
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str | None] = {}

    @property
    def scheduler(self) -> Scheduler:
        scheduler: Scheduler = self.core.engine_core.engine_core.scheduler
        return scheduler

    @property
    def worker(self) -> NeuronWorker:
        return self.on_worker(lambda worker: worker)

    def on_worker(self, what: Callable[[NeuronWorker], Any]) -> Any:
        return self.llm.collective_rpc(what)[0]

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(asked, params, use_tqdm=False)

    def one(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        return self.generate([prompt], params)[0]

    def tokens_of(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return list(self.one(prompt, params).outputs[0].token_ids)

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        asked: Any = {"prompt_token_ids": prompt}
        self.core.add_request(name, asked, params)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.core.step():
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                self.reasons[output.request_id] = output.outputs[0].finish_reason

    def schedules(self, times: int) -> list[dict[str, int]]:
        """Tokens scheduled of each request, step by step."""
        seen: list[dict[str, int]] = []
        schedule = self.scheduler.schedule

        def noting(*arguments: Any) -> SchedulerOutput:
            output = schedule(*arguments)
            # vLLM makes an id of its own of each name: "name-" and eight characters.
            seen.append({id.rsplit("-", 1)[0]: count for id, count in output.num_scheduled_tokens.items()})
            return output

        self.scheduler.schedule = noting  # type: ignore[method-assign]
        try:
            self.step(times)
        finally:
            self.scheduler.schedule = schedule  # type: ignore[method-assign]
        return seen

    def finish(self) -> None:
        while self.core.has_unfinished_requests():
            self.step()


def note_pauses(engine: Engine) -> list[float]:
    """The pauses between restarts of the device that would have been made."""
    pauses: list[float] = []
    engine.worker.runner._revival._pause = pauses.append
    return pauses


def fail_loads(monkeypatch: pytest.MonkeyPatch, times: int, device: Any = ArithmeticDevice) -> None:
    """So many loads of the device fail from here on."""
    load, left = device.load, iter(range(times))

    def failing(self: Any, *arguments: Any) -> Any:
        if next(left, None) is not None:
            raise DeviceLost("still gone")
        return load(self, *arguments)

    monkeypatch.setattr(device, "load", failing)
