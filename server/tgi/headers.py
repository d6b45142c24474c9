"""The numbers of a request as response headers. Success alone carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .metrics import Timings


def of_stream(compute_type: str, characters: int | None) -> dict[str, str]:
    """`characters` None: not known, as the prompt came as token ids."""
    return {
        "x-compute-type": compute_type,
        "x-accel-buffering": "no",
        "cache-control": "no-cache",
        **_characters(characters),
    }


def of_answer(
    compute_type: str, inputs: str, timings: Timings, prompt_tokens: int, generated_tokens: int
) -> Mapping[str, str]:
    return {
        "x-compute-type": compute_type,
        "x-compute-time": f"{timings.total:.6f}",
        **_characters(len(inputs)),
        **_times([(timings, generated_tokens)]),
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated_tokens),
    }


def of_openai_answer(
    compute_type: str,
    characters: int | None,
    measured: Sequence[tuple[Timings, int]],
    usage: Mapping[str, int],
    *,
    is_chat: bool,
) -> dict[str, str]:
    """`measured`: each prompt's times and number of generated tokens, which are summed. `usage` as the answer has it.
    A completion has no compute time, as it has none in TGI."""
    tokens = {"x-prompt-tokens": usage.get("prompt_tokens"), "x-generated-tokens": usage.get("completion_tokens")}
    total = sum(timings.total for timings, _ in measured)
    return {
        "x-compute-type": compute_type,
        **({"x-compute-time": f"{total:.6f}"} if is_chat and measured else {}),
        **_characters(characters),
        **(_times(measured) if measured else {}),
        **{name: str(number) for name, number in tokens.items() if number is not None},
    }


def _characters(number: int | None) -> dict[str, str]:
    return {} if number is None else {"x-compute-characters": str(number)}


def _times(measured: Sequence[tuple[Timings, int]]) -> dict[str, str]:
    seconds = {
        "x-total-time": [timings.total for timings, _ in measured],
        "x-validation-time": [timings.validation for timings, _ in measured],
        "x-queue-time": [timings.queue for timings, _ in measured],
        "x-inference-time": [timings.inference for timings, _ in measured],
        "x-time-per-token": [timings.per_token(generated_tokens) for timings, generated_tokens in measured],
    }
    return {name: _milliseconds(sum(each)) for name, each in seconds.items()}


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
