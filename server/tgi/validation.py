"""What TGI's router refuses in a request that parsed: the checks in its order, with its messages. Pure.

Tokens are counted between `check_parameters` and `check_length`; the grammar is checked last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
from jsonschema.validators import validator_for  # type: ignore[import-untyped]

from .errors import ValidationError
from .schemas import GenerateParameters, Grammar, JsonGrammar, JsonSchemaGrammar
from .settings import TgiSettings

HOTTEST = 2.0
"""vLLM's bound of `temperature`."""

SMALLEST, LARGEST = 1e-6, 1e6
"""Of `repetition_penalty`: beyond, scores leave the range of float32."""


@dataclass(frozen=True)
class Limits:
    """The settings that requests are held against, none of them open."""

    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    grammar_support: bool = True

    @classmethod
    def of(cls, settings: TgiSettings) -> Limits:
        assert settings.max_input_tokens is not None
        assert settings.max_total_tokens is not None
        return cls(
            max_best_of=settings.max_best_of,
            max_stop_sequences=settings.max_stop_sequences,
            max_top_n_tokens=settings.max_top_n_tokens,
            max_input_tokens=settings.max_input_tokens,
            max_total_tokens=settings.max_total_tokens,
            grammar_support=not settings.disable_grammar_support,
        )


def check_parameters(inputs: str, asked: GenerateParameters, limits: Limits, *, streaming: bool) -> None:
    if streaming:
        _check_streaming(asked)
    _check_best_of(asked, limits)
    _check_numbers(asked)
    if len(asked.stop) > limits.max_stop_sequences:
        raise ValidationError(
            f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(asked.stop)}"
        )
    if asked.seed is not None and (asked.best_of or 1) > 1:
        raise ValidationError("`seed` must not be set when `best_of` > 1")
    if (asked.top_n_tokens or 0) > limits.max_top_n_tokens:
        raise ValidationError(
            f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {asked.top_n_tokens}"
        )
    _check_offered(asked)
    if not inputs:
        raise ValidationError("`inputs` cannot be empty")
    if asked.truncate is not None and not 0 < asked.truncate <= limits.max_input_tokens:
        raise ValidationError(
            f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. Given: {asked.truncate}"
        )


def _check_streaming(asked: GenerateParameters) -> None:
    if asked.best_of not in (None, 1):
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if asked.decoder_input_details:
        raise ValidationError("`decoder_input_details` == true is not supported when streaming tokens")


def _check_best_of(asked: GenerateParameters, limits: Limits) -> None:
    best_of = asked.best_of or 1
    if best_of > 1 and limits.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if best_of > limits.max_best_of:
        raise ValidationError(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")
    samples = asked.do_sample or any(
        value is not None for value in (asked.temperature, asked.top_k, asked.top_p, asked.typical_p)
    )
    if best_of > 1 and not samples:
        raise ValidationError("you must use sampling when `best_of` is > 1")


def _check_numbers(asked: GenerateParameters) -> None:
    for name in ("temperature", "repetition_penalty"):
        value = getattr(asked, name)
        if value is not None and value <= 0:
            raise ValidationError(f"`{name}` must be strictly positive")
    if asked.frequency_penalty is not None and not -2.0 <= asked.frequency_penalty <= 2.0:
        raise ValidationError("`frequency_penalty` must be >= -2.0 and <= 2.0")
    for name in ("top_p", "typical_p"):
        value = getattr(asked, name)
        if value is not None and not 0.0 < value < 1.0:
            raise ValidationError(f"`{name}` must be > 0.0 and < 1.0")
    for name in ("top_k", "max_new_tokens"):
        value = getattr(asked, name)
        if value is not None and value <= 0:
            raise ValidationError(f"`{name}` must be strictly positive")


def _check_offered(asked: GenerateParameters) -> None:
    """What TGI's router lets pass and this engine has not."""
    if asked.temperature is not None and asked.temperature > HOTTEST:
        raise ValidationError(f"`temperature` must be <= {HOTTEST}: this engine does not sample any hotter")
    if asked.repetition_penalty is not None and not SMALLEST <= asked.repetition_penalty <= LARGEST:
        raise ValidationError(f"`repetition_penalty` must be >= {SMALLEST} and <= {LARGEST}")
    if asked.watermark:
        raise ValidationError("`watermark` is not supported by this server: leave it out, or send false")
    if asked.adapter_id is not None:
        raise ValidationError("`adapter_id` is not supported: this server has no adapters; leave it out")


def check_compiled_sampling(asked: GenerateParameters) -> None:
    """Of a device that draws tokens by rules compiled into it: what it cannot do is refused by the name it has here."""
    wanted = {
        "best_of": (asked.best_of or 1) > 1,
        "seed": asked.seed is not None,
        "repetition_penalty": asked.repetition_penalty not in (None, 1.0),
        "frequency_penalty": asked.frequency_penalty not in (None, 0.0),
        "typical_p": asked.typical_p is not None,
        "top_n_tokens": bool(asked.top_n_tokens),
        "decoder_input_details": asked.decoder_input_details,
        "grammar": asked.grammar is not None,
    }
    if names := [f"`{name}`" for name, is_wanted in wanted.items() if is_wanted]:
        raise ValidationError(
            f"{', '.join(names)} cannot be had here, as sampling is compiled into the device: leave it out, or start "
            "the server with --neuronserve.sampling host"
        )


def check_length(num_input: int, max_new_tokens: int | None, limits: Limits) -> int:
    """The number of new tokens to make; null means all that the total leaves."""
    left = limits.max_total_tokens - num_input
    new = max(left, 0) if max_new_tokens is None else max_new_tokens
    if num_input + new > limits.max_total_tokens:
        raise ValidationError(
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {num_input} `inputs` tokens and {new} `max_new_tokens`"
        )
    if num_input > limits.max_input_tokens:
        raise ValidationError(f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {num_input}")
    if new == 0:  # an input as long as the total leaves nothing to make
        raise ValidationError(
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {num_input} `inputs` tokens and 1 `max_new_tokens`"
        )
    return new


def check_grammar(grammar: Grammar | None, limits: Limits) -> dict[str, Any] | str | None:
    """The JSON schema to follow, or the regular expression."""
    if grammar is None:
        return None
    if not limits.grammar_support:
        raise ValidationError("grammar is not supported")
    if isinstance(grammar, JsonGrammar):
        return _checked_schema(grammar.value)
    if isinstance(grammar, JsonSchemaGrammar):
        return _checked_schema(grammar.value.json_schema)
    return grammar.value


def _checked_schema(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValidationError(f"grammar is not valid: {error}") from None
    if not isinstance(value, dict):
        raise ValidationError("grammar is not supported")
    try:
        validator_for(value).check_schema(value)
    except SchemaError as error:
        raise ValidationError(f"grammar is not valid: {error.message}") from None
    if "properties" not in value:
        raise ValidationError("grammar is not valid: Grammar must have a 'properties' field")
    if (reference := _reference_to_elsewhere(value)) is not None:
        raise ValidationError(
            f"grammar is not valid: `$ref` {reference} is not in the schema itself; write it into `$defs`"
        )
    return value


def _reference_to_elsewhere(schema: dict[str, Any]) -> str | None:
    """The engine reads no other document: what such a reference asks for would not be held to."""
    unread: list[Any] = [schema]
    while unread:
        part = unread.pop()
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                return reference
            unread.extend(part.values())
        elif isinstance(part, list):
            unread.extend(part)
    return None
