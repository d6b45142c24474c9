"""One frozen `TgiSettings`: what the TGI routes need to know that vLLM's own configuration does not say.

The launcher makes it from TGI's arguments and variables; `vllm serve` makes it from the key `tgi` of our options
(`--neuronserve '{"tgi": {...}}'`), where `false` (or `--no-tgi`) turns the routes off. It travels as JSON in vLLM's
`additional_config["neuronserve"]["tgi"]`, so every API process reads the same values. Names and defaults are TGI's
(router 3.3); the API key is not here, because configurations are logged.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    cors_allow_origin: tuple[str, ...] = ()  # none: any origin
    disable_grammar_support: bool = False
    enable_prefill_logprobs: bool = True
    any_model_name: bool = False  # the OpenAI routes take any `model`; the launcher sets it
