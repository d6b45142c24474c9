"""vLLM's speculative configuration: what of it is served, and the rest refused in one sentence.

`--speculative-model ngram`, the classic `[ngram]` and `{"method": "ngram"}` are prompt lookup. Reads keywords and
attributes by name; imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuronserve.speculative.settings import METHODS, NGRAM, Speculation

from .errors import ConfigError

STOCK = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""vLLM's own short flags -> keys of its speculative_config."""

KEYS = ("method", "model", "num_speculative_tokens", "max_model_len", "prompt_lookup_min", "prompt_lookup_max")
"""What is honoured; `max_model_len` is a draft model's, and has no effect without one."""

NAMES_OF_NGRAM = ("ngram", "[ngram]")

LOOKUP = {"prompt_lookup_min": Speculation.shortest_match, "prompt_lookup_max": Speculation.longest_match}
"""Where the user gives neither; vLLM would look for five tokens and no fewer, and rarely find them."""


def spelled_out(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword `speculative_config`, checked before vLLM looks for a draft model, our defaults in it."""
    given = {key.replace("-", "_"): value for key, value in (keywords.get("speculative_config") or {}).items()}
    stock = {key: keywords[name] for name, key in STOCK.items() if keywords.get(name) is not None}
    _check(_method({**stock, **given}), {**stock, **given}.get("model"))
    if unknown := [key for key, value in given.items() if key not in KEYS and value is not None]:
        raise ConfigError(f"speculative_config.{unknown[0]}: not supported; leave it out (known: {', '.join(KEYS)})")
    if any(given.get(key) is not None for key in LOOKUP):
        return given
    return {**given, **LOOKUP}


def planned(keywords: Mapping[str, Any]) -> Speculation | None:
    """Of `translate`'s keywords, where no vLLM makes a configuration of them."""
    given = keywords.get("speculative_config")
    if not given:
        return None
    if not given.get("num_speculative_tokens"):
        raise ConfigError("num_speculative_tokens is missing; add --num-speculative-tokens 4, say")
    shortest, longest = (given.get(key) for key in LOOKUP)
    return Speculation(NGRAM, given["num_speculative_tokens"], shortest or longest, longest or shortest)


def asked(config: Any) -> Speculation | None:
    """Of vLLM's `SpeculativeConfig`."""
    if config is None:
        return None
    _check(config.method, config.model)
    return Speculation(
        method=config.method,
        num_tokens=config.num_speculative_tokens,
        shortest_match=config.prompt_lookup_min,
        longest_match=config.prompt_lookup_max,
    )


def _method(given: Mapping[str, Any]) -> str:
    for name in (given.get("method"), given.get("model")):
        if name in NAMES_OF_NGRAM:
            return NGRAM
    return str(given.get("method") or "draft_model")


def _check(method: str, model: object) -> None:
    if method in METHODS:
        return
    named = f" (method={method!r})" if model is None else f" (method={method!r}, model={model!r})"
    raise ConfigError(
        f"speculative decoding is not built yet with a draft model or an EAGLE head{named}: leave out "
        "--speculative-model and its companions, or use --speculative-model ngram, which looks drafts up in the prompt"
    )
