"""What a client reads: whole answers and events as JSON objects, their keys in TGI's order. Pure."""

from __future__ import annotations

from typing import Any

from .following import Step
from .generate import Answer
from .translate import Job

Json = dict[str, Any]


def whole(job: Job, answers: list[Answer], *, full_text: bool) -> Json:
    best, *others = answers
    prefix = job.inputs if full_text else ""
    result: Json = {"generated_text": prefix + best.ending.generated_text}
    if job.asked.details or job.asked.decoder_input_details:
        sequences = [{"generated_text": prefix + other.ending.generated_text, **_sequence(other)} for other in others]
        result["details"] = _sequence(best, {"best_of_sequences": sequences} if sequences else {})
    return result


def _sequence(answer: Answer, more: Json | None = None) -> Json:
    top_tokens = [[vars(token) for token in position] for position in answer.top_tokens]
    return {
        "finish_reason": answer.ending.finish_reason,
        "generated_tokens": answer.ending.generated_tokens,
        "seed": answer.ending.seed,
        "prefill": [vars(token) for token in answer.prefill],
        "tokens": [vars(token) for token in answer.tokens],
        **(more or {}),
        **({"top_tokens": top_tokens} if any(top_tokens) else {}),
    }


def event(job: Job, index: int, step: Step, *, full_text: bool) -> Json:
    result: Json = {"index": index, "token": vars(step.token)}
    if step.top_tokens:
        result["top_tokens"] = [vars(token) for token in step.top_tokens]
    if (ending := step.ending) is None:
        return {**result, "generated_text": None, "details": None}
    details = {
        "finish_reason": ending.finish_reason,
        "generated_tokens": ending.generated_tokens,
        "seed": ending.seed,
        "input_length": len(job.token_ids),
    }
    return {
        **result,
        "generated_text": (job.inputs if full_text else "") + ending.generated_text,
        "details": details if job.asked.details else None,
    }
