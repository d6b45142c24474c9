"""One engine in one process, measured on command: JSON lines in, JSON lines out.

Runs in our environment or a peer's, so it imports nothing of ours. Commands:

    {"do": "decode", "streams": 8, "temperature": 0.0}   tokens 17-128 of 128, after 32-token prompts
    {"do": "text", "prompts": [[1, 2], [3]], "stop": 2}  the same after each of these, one at a time, until its end
    {"do": "prefill", "tokens": 512}                     prompts of that length for a second, one token out of each
    {"do": "facts"}                                      memory, counters

Other prompts are random ids from a fixed seed, so that every engine gets the same ones and none shares a prefix.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from typing import Any, Protocol

PROMPT, FIRST, LAST = 32, 16, 128  # tokens 17 to 128 are timed
PREFILL_S = 1.0


class Engine(Protocol):
    def decode(self, prompts: list[list[int]], temperature: float, stop: int | None = None) -> tuple[int, float]:
        """(tokens, seconds) of the timed part, of one prompt up to the token `stop`; (0, 0.0) if that comes before."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the first token."""

    def counters(self) -> dict[str, Any] | None:
        """Of our worker, only ever growing; a peer has none."""

    def facts(self) -> dict[str, Any]: ...


class Vllm:
    """vLLM's engine stepped by hand in this process: ours, or vLLM's own CPU build."""

    def __init__(self, model: str, dtype: str, quantization: str | None, extra: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # vLLM's own switch says otherwise
        if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
            pretend_avx2()
        from vllm import LLM

        begin = time.perf_counter()
        arguments = dict(extra, enable_prefix_caching=False, disable_log_stats=True)
        if quantization:
            arguments["quantization"] = quantization
        dtype = arguments.pop("dtype", dtype)
        self.llm = LLM(model=model, dtype=dtype, max_model_len=1024, max_num_seqs=16, **arguments)
        self.start_seconds = time.perf_counter() - begin
        self.count = 0

    def _add(self, prompt: list[int], max_tokens: int, temperature: float, stop: int | None = None) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=0.95 if temperature else 1.0,
            ignore_eos=True,
            stop_token_ids=[] if stop is None else [stop],
            detokenize=False,
        )
        self.count += 1
        self.llm.llm_engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)

    def decode(self, prompts: list[list[int]], temperature: float, stop: int | None = None) -> tuple[int, float]:
        engine = self.llm.llm_engine
        for prompt in prompts:
            self._add(prompt, LAST, temperature, stop)
        begin, before, seen = 0.0, 0, dict[str, int]()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            seen.update((output.request_id, len(output.outputs[0].token_ids)) for output in outputs)
            if not begin and len(seen) == len(prompts) and min(seen.values()) >= FIRST:
                begin, before = now, sum(seen.values())
        return (sum(seen.values()) - before, now - begin) if begin else (0, 0.0)

    def prefill(self, prompt: list[int]) -> float:
        engine = self.llm.llm_engine
        begin = time.perf_counter()
        self._add(prompt, 1, 0.0)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - begin

    def counters(self) -> dict[str, Any] | None:
        try:
            (counters,) = self.llm.collective_rpc("neuronserve_metrics")
        except Exception:  # whatever a worker raises that has no such method
            return None
        return dict(counters)

    def facts(self) -> dict[str, Any]:
        return {"start_seconds": self.start_seconds, "counters": self.counters()}


def pretend_avx2() -> None:
    """vLLM's CPU build asks torch what the processor has, and loads its kernels by the answer."""
    import torch

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported"):
        setattr(torch.cpu, name, lambda: False)


class Transformers:
    """Hugging Face transformers, eager, a static batch with its own dynamic cache."""

    def __init__(self, model: str, dtype: str, quantization: str | None, extra: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if quantization:
            raise SystemExit("transformers: no int8 weights here")
        begin = time.perf_counter()
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.start_seconds = time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], temperature: float, stop: int | None = None) -> tuple[int, float]:
        if stop is not None:
            raise ValueError("transformers is not measured on texts")
        torch = self.torch
        ids, cache, begin = torch.tensor(prompts), None, 0.0
        with torch.inference_mode():
            for step in range(LAST):
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, logits = out.past_key_values, out.logits[:, -1]
                ids = self._choose(logits, temperature)
                if step == FIRST - 1:
                    begin = time.perf_counter()
        return (LAST - FIRST) * len(prompts), time.perf_counter() - begin

    def _choose(self, logits: Any, temperature: float) -> Any:
        if not temperature:
            return logits.argmax(-1, keepdim=True)
        torch = self.torch
        ordered, order = (logits / temperature).softmax(-1).sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered > 0.95] = 0
        return order.gather(1, torch.multinomial(ordered, 1))

    def prefill(self, prompt: list[int]) -> float:
        begin = time.perf_counter()
        with self.torch.inference_mode():
            self.model(input_ids=self.torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begin

    def counters(self) -> dict[str, Any] | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"start_seconds": self.start_seconds}


def anonymous_mib() -> float:
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) / 1024


def host_times(before: dict[str, Any] | None, after: dict[str, Any] | None, seconds: float) -> dict[str, float]:
    """Milliseconds of a step outside the device call: in our worker, and in the whole engine."""
    if before is None or after is None:
        return {}
    grown = {name: after[name] - before[name] for name in ("steps", "host_seconds", "device_seconds")}
    return {
        "worker_ms": 1e3 * grown["host_seconds"] / grown["steps"],
        "engine_ms": 1e3 * (seconds - grown["device_seconds"]) / grown["steps"],
    }


def answer(engine: Engine, command: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    def prompt(n: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(n)]

    if command["do"] == "decode":
        before, began = engine.counters(), time.perf_counter()
        tokens, seconds = engine.decode([prompt(PROMPT) for _ in range(command["streams"])], command["temperature"])
        whole, after = time.perf_counter() - began, engine.counters()
        return {"tokens_per_second": tokens / seconds, **host_times(before, after, whole)}
    if command["do"] == "text":
        each = [engine.decode([ids], 0.0, command["stop"]) for ids in command["prompts"]]
        return {"tokens_per_second": sum(tokens for tokens, _ in each) / sum(seconds for _, seconds in each)}
    if command["do"] == "prefill":
        taken: list[float] = []
        while sum(taken) < PREFILL_S:
            taken.append(engine.prefill(prompt(command["tokens"])))
        return {"tokens_per_second": command["tokens"] * len(taken) / sum(taken)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak_mib": peak, "anonymous_mib": anonymous_mib(), **engine.facts()}


def make(arguments: argparse.Namespace) -> Engine:
    if arguments.engine in ("llama.cpp", "openvino"):
        from peer_engines import LlamaCpp, OpenVino

        # Their weights' type is that of the file.
        chosen: Any = {"llama.cpp": LlamaCpp, "openvino": OpenVino}[arguments.engine]
        engine: Engine = chosen(arguments.model, FIRST, LAST)
        return engine
    chosen = {"vllm": Vllm, "transformers": Transformers}[arguments.engine]
    engine = chosen(arguments.model, arguments.dtype, arguments.quantization, arguments.extra)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["vllm", "transformers", "llama.cpp", "openvino"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--extra", type=json.loads, default={})
    arguments = parser.parse_args()
    # Engines print as they please; our lines keep a channel of their own.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = make(arguments)
    print(json.dumps({"ready": True}), file=channel)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(answer(engine, command, random.Random(command.get("seed", 0)))), file=channel)


if __name__ == "__main__":
    main()
