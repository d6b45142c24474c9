"""One frozen `TgiSettings`: what the TGI routes need to know that vLLM's own configuration does not say.

The launcher makes it from TGI's arguments and variables; `vllm serve` makes it from the key `tgi` of our options
(`--neuronserve '{"tgi": {...}}'`), where `false` (or `--no-tgi`) turns the routes off. It travels as JSON in vLLM's
`additional_config["neuronserve"]["tgi"]`, so every API process reads the same values. Names and defaults are TGI's
(router 3.3); the API key is not here, because configurations are logged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.values import Parser, boolean, list_of, near, parse, positive, text

KEY = "neuronserve.tgi"


@dataclass(frozen=True)
class TgiSettings:
    """Limits and identity of the TGI routes. None: deduced from the engine when the routes are mounted."""

    model_id: str | None = None  # as /info reports it; None: vLLM's served model name
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    max_concurrent_requests: int = 128  # admitted at once; the next one gets 429
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_input_tokens: int | None = None  # None: max_total_tokens - 1
    max_total_tokens: int | None = None  # None: the engine's max_model_len
    max_client_batch_size: int = 4
    validation_workers: int = 2  # reported only: vLLM tokenizes in its own pool
    payload_limit: int = 2_000_000  # bytes of a request's body
    cors_allow_origin: tuple[str, ...] = ()  # none: any where the launcher started the server, else vLLM's choice
    disable_grammar_support: bool = False
    enable_prefill_logprobs: bool = True
    any_model_name: bool = False  # the OpenAI routes take any `model`; the launcher sets it

    @classmethod
    def from_mapping(cls, given: Mapping[str, object]) -> TgiSettings:
        """The settings as JSON or a shell left them; an unknown name or a wrong value is refused by its key."""
        for name in given:
            if name not in _PARSERS:
                known = ", ".join(_PARSERS)
                raise ConfigError(f"{KEY}.{name}: no such setting{near(name, _PARSERS)} (known: {known})")
        values = {
            name: parse(f"{KEY}.{name}", value, _PARSERS[name]) for name, value in given.items() if value is not None
        }
        return cls(**values)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, object]:
        """What `from_mapping` takes."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def deduced(self, *, model_id: str, max_model_len: int) -> TgiSettings:
        """With nothing left open."""
        total = max_model_len if self.max_total_tokens is None else self.max_total_tokens
        if total > max_model_len:
            raise ConfigError(
                f"{KEY}.max_total_tokens={total}: the engine serves max_model_len={max_model_len} tokens; lower it, or "
                "raise --max-model-len"
            )
        longest = total - 1 if self.max_input_tokens is None else self.max_input_tokens
        if longest > total:
            raise ConfigError(
                f"{KEY}.max_input_tokens={longest} is above max_total_tokens={total}: an input and its answer share "
                "the total; lower it"
            )
        return dataclasses.replace(
            self,
            model_id=model_id if self.model_id is None else self.model_id,
            max_total_tokens=total,
            max_input_tokens=longest,
        )


def _origins(value: object) -> tuple[object, ...]:
    words = value.split(",") if isinstance(value, str) else value
    return tuple(list_of(text)(words))  # type: ignore[arg-type]


_PARSERS: dict[str, Parser] = {
    "model_id": text,
    "model_sha": text,
    "model_pipeline_tag": text,
    "max_concurrent_requests": positive,
    "max_best_of": positive,
    "max_stop_sequences": positive,
    "max_top_n_tokens": positive,
    "max_input_tokens": positive,
    "max_total_tokens": positive,
    "max_client_batch_size": positive,
    "validation_workers": positive,
    "payload_limit": positive,
    "cors_allow_origin": _origins,
    "disable_grammar_support": boolean,
    "enable_prefill_logprobs": boolean,
    "any_model_name": boolean,
}
