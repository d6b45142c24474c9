"""The numbers of a request as response headers. Success alone carries them."""

from __future__ import annotations

from collections.abc import Mapping

from .metrics import Timings


def of_stream(compute_type: str, inputs: str) -> dict[str, str]:
    return {**of_openai_stream(compute_type), "x-compute-characters": str(len(inputs))}


def of_openai_stream(compute_type: str) -> dict[str, str]:
    return {"x-compute-type": compute_type, "x-accel-buffering": "no", "cache-control": "no-cache"}


def of_answer(
    compute_type: str, inputs: str, timings: Timings, prompt_tokens: int, generated_tokens: int
) -> Mapping[str, str]:
    return {
        "x-compute-type": compute_type,
        "x-compute-time": f"{timings.total:.6f}",
        "x-compute-characters": str(len(inputs)),
        "x-total-time": _milliseconds(timings.total),
        "x-validation-time": _milliseconds(timings.validation),
        "x-queue-time": _milliseconds(timings.queue),
        "x-inference-time": _milliseconds(timings.inference),
        "x-time-per-token": _milliseconds(timings.per_token(generated_tokens)),
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated_tokens),
    }


def of_openai_answer(compute_type: str, timings: Timings, usage: Mapping[str, int]) -> dict[str, str]:
    """`usage` as the answer has it."""
    tokens = {"x-prompt-tokens": usage.get("prompt_tokens"), "x-generated-tokens": usage.get("completion_tokens")}
    return {
        "x-compute-type": compute_type,
        "x-compute-time": f"{timings.total:.6f}",
        "x-total-time": _milliseconds(timings.total),
        **{name: str(number) for name, number in tokens.items() if number is not None},
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
