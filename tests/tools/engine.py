"""Real vLLM over a model, in the test's own process: a test can add a request between two steps, and look inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.scheduler import Scheduler

from neuronserve.neuron_worker.config import NeuronConfig


class Engine:
    def __init__(self, model: str, *, options: dict[str, Any] | None = None, **arguments: Any) -> None:
        self.llm = LLM(model=model, additional_config={"neuronserve": options or {}}, **arguments)
        self.core = self.llm.llm_engine
        self.tokens: dict[str, list[int]] = {}
        self.cached_tokens: dict[str, int] = {}
        self.num_preemptions = 0
        self.num_steps = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.core.engine_core.engine_core.scheduler

    @property
    def config(self) -> NeuronConfig:
        return NeuronConfig.of(self.core.vllm_config)

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.core.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._note(self.core.step())
            self.num_steps += 1
            known = self.scheduler.requests.values()
            self.num_preemptions = max([self.num_preemptions, *(request.num_preemptions for request in known)])

    def _note(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            self.cached_tokens[output.request_id] = output.num_cached_tokens or 0

    def finish(self) -> None:
        while self.core.has_unfinished_requests():
            self.step()

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, at_once: int) -> list[list[int]]:
        """Tokens of each prompt, `at_once` requests in the engine at any time."""
        waiting = {str(index): prompt for index, prompt in enumerate(prompts)}
        names = list(waiting)
        while waiting or self.core.has_unfinished_requests():
            while waiting and self.core.get_num_unfinished_requests() < at_once:
                name = next(iter(waiting))
                self.add(name, waiting.pop(name), params)
            self.step()
        return [self.tokens[name] for name in names]

    def forget(self) -> None:
        """Drop cached prefixes, so that the next request is computed whole."""
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        self.core.engine_core.shutdown()
