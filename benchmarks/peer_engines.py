"""llama.cpp and OpenVINO GenAI, each driven as its users drive it, for `measure.py`.

Runs in a peer's environment, so it imports nothing of ours. Neither is held back: all cores, a batch of all streams,
several tokens of a prompt at once, no text made of the tokens.
"""

from __future__ import annotations

import os
import time
from typing import Any

STREAMS, LENGTH = 16, 1024


class LlamaCpp:
    """The C API through llama-cpp-python: one `llama_decode` for a step of all streams. Greedy alone."""

    def __init__(self, model: str, first: int, last: int) -> None:
        import llama_cpp
        import numpy

        begin = time.perf_counter()
        self.first, self.last = first, last
        self.lib, self.numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(model), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot read {model}")
        self.context = llama_cpp.llama_init_from_model(self.model, self._parameters())
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(LENGTH * 2, 0, 1)
        self.start_seconds = time.perf_counter() - begin

    def _parameters(self) -> Any:
        parameters = self.lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = STREAMS * LENGTH, STREAMS
        parameters.n_batch = LENGTH * 2
        parameters.n_threads = parameters.n_threads_batch = len(os.sched_getaffinity(0))
        return parameters

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, stream, whether its logits are wanted) for each."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, stream, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = stream, wanted
        if status := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode answered {status}")

    def _best(self, index: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, index)
        return int(self.numpy.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def _forget(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)

    def decode(self, prompts: list[list[int]], temperature: float, stop: int | None = None) -> tuple[int, float]:
        if temperature:
            raise ValueError("llama.cpp is measured greedily")
        self._forget()
        newest, begin = [], 0.0
        for stream, prompt in enumerate(prompts):
            self._decode([(token, at, stream, at == len(prompt) - 1) for at, token in enumerate(prompt)])
            newest.append(self._best(len(prompt) - 1))
        for step in range(1, self.last):
            if newest == [stop]:
                return (step - self.first, time.perf_counter() - begin) if begin else (0, 0.0)
            if step == self.first:
                begin = time.perf_counter()
            self._decode([(t, len(prompts[s]) + step - 1, s, True) for s, t in enumerate(newest)])
            newest = [self._best(index) for index in range(len(prompts))]
        return (self.last - self.first) * len(prompts), time.perf_counter() - begin

    def prefill(self, prompt: list[int]) -> float:
        self._forget()
        begin = time.perf_counter()
        self._decode([(token, at, 0, at == len(prompt) - 1) for at, token in enumerate(prompt)])
        self._best(len(prompt) - 1)
        return time.perf_counter() - begin

    def counters(self) -> dict[str, Any] | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"start_seconds": self.start_seconds}


class OpenVino:
    """OpenVINO GenAI's continuous batching, stepped by hand."""

    def __init__(self, model: str, first: int, last: int) -> None:
        import numpy
        import openvino
        import openvino_genai as genai

        begin = time.perf_counter()
        self.first, self.last = first, last
        self.numpy, self.openvino, self.genai = numpy, openvino, genai
        config = genai.SchedulerConfig()
        config.cache_size = 2  # GB
        config.max_num_seqs = STREAMS
        config.max_num_batched_tokens = LENGTH * 2
        config.enable_prefix_caching = False
        self.pipe = genai.ContinuousBatchingPipeline(model, config, "CPU")
        self.count = 0
        self.start_seconds = time.perf_counter() - begin

    def _add(self, prompt: list[int], num_tokens: int, temperature: float, stop: int | None = None) -> Any:
        config = self.genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=stop is None)
        if stop is not None:
            config.stop_token_ids = {stop}
            config.include_stop_str_in_output = True  # counted by all engines
        config.do_sample = bool(temperature)
        if temperature:
            config.temperature, config.top_p = temperature, 0.95
        ids = self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
        self.count += 1
        return self.pipe.add_request(self.count, ids, config)

    def decode(self, prompts: list[list[int]], temperature: float, stop: int | None = None) -> tuple[int, float]:
        handles = [self._add(prompt, self.last, temperature, stop) for prompt in prompts]
        begin, before, seen = 0.0, 0, [0] * len(prompts)
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            now = time.perf_counter()
            for index, handle in enumerate(handles):
                if handle.can_read():
                    seen[index] += sum(len(output.generated_ids) for output in handle.read().values())
            if not begin and min(seen) >= self.first:
                begin, before = now, sum(seen)
        if min(seen) != self.last and stop is None:
            raise RuntimeError(f"{self.last} tokens asked for each request, {seen} came")
        return (sum(seen) - before, now - begin) if begin else (0, 0.0)

    def prefill(self, prompt: list[int]) -> float:
        begin = time.perf_counter()
        handle = self._add(prompt, 1, 0.0)
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        handle.read_all()
        return time.perf_counter() - begin

    def counters(self) -> dict[str, Any] | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"start_seconds": self.start_seconds}
