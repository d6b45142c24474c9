"""vLLM's speculative configuration: what of it is served, and the rest refused in one sentence.

`--speculative-model ngram`, the classic `[ngram]` and `{"method": "ngram"}` are prompt lookup; any other model is a
draft, and its config.json says which method reads it. Reads keywords and attributes by name; imports neither vLLM nor
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuronserve.speculative.settings import BY_A_DRAFT, EAGLE, NGRAM, Speculation

from .draft_directory import method_of
from .errors import ConfigError
from .model_files import check_path, config_directory

STOCK = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""vLLM's own short flags -> keys of its speculative_config."""

CLASSIC = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_max_model_len": "max_model_len",
}
"""Those of older releases."""

FLAGS = {**CLASSIC, **STOCK}

KEYS = (
    *("method", "model", "revision", "num_speculative_tokens", "max_model_len"),
    *("prompt_lookup_min", "prompt_lookup_max"),
)
"""What is honoured."""

NAMES_OF_NGRAM = ("ngram", "[ngram]")

LOOKUP = {"prompt_lookup_min": Speculation.shortest_match, "prompt_lookup_max": Speculation.longest_match}
"""Where the user gives neither; vLLM would look for five tokens and no fewer, and rarely find them."""


def spelled_out(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword `speculative_config` with `FLAGS` in it, checked, our method and defaults filled in before vLLM has a
    look."""
    given = _gathered(keywords)
    if unknown := [key for key, value in given.items() if key not in KEYS and value is not None]:
        raise ConfigError(f"speculative_config.{unknown[0]}: not supported; leave it out (known: {', '.join(KEYS)})")
    _check_count(given.get("num_speculative_tokens"))
    method = _method(given, keywords.get("download_dir"))
    if method == NGRAM:
        _check_lookup(given)
        return _with_lookup(given)
    if lookup := [key for key in LOOKUP if given.get(key) is not None]:
        raise ConfigError(f"speculative_config.{lookup[0]} is for prompt lookup and no draft; leave it out")
    return {**given, "method": method}


def planned(keywords: Mapping[str, Any]) -> Speculation | None:
    """Of `translate`'s keywords, where no vLLM makes a configuration of them."""
    given = keywords.get("speculative_config")
    if not given:
        return None
    count = given["num_speculative_tokens"]
    if given.get("method") in BY_A_DRAFT:
        return Speculation(
            given["method"],
            count,
            model=given["model"],
            revision=given.get("revision"),
            max_length=given.get("max_model_len"),
        )
    shortest, longest = (given.get(key) for key in LOOKUP)
    return Speculation(NGRAM, count, shortest or longest, longest or shortest, max_length=given.get("max_model_len"))


def asked(config: Any) -> Speculation | None:
    """Of vLLM's `SpeculativeConfig`."""
    if config is None:
        return None
    if config.method in BY_A_DRAFT:
        return Speculation(
            method=config.method,
            num_tokens=config.num_speculative_tokens,
            model=config.model,
            revision=config.revision,
            max_length=config.max_model_len,
        )
    if config.method != NGRAM:
        raise _not_built(config.method, config.model)
    return Speculation(
        method=config.method,
        num_tokens=config.num_speculative_tokens,
        shortest_match=config.prompt_lookup_min,
        longest_match=config.prompt_lookup_max,
        max_length=config.max_model_len,
    )


def draft_directory(asked: Speculation | None, download_dir: str | None = None) -> str | None:
    """Where the draft's config.json is; None: there is no draft."""
    if asked is None or asked.model is None:
        return None
    return config_directory(asked.model, asked.revision, download_dir)


def _gathered(keywords: Mapping[str, Any]) -> dict[str, Any]:
    given = {key.replace("-", "_"): value for key, value in (keywords.get("speculative_config") or {}).items()}
    for name, key in FLAGS.items():
        if (value := keywords.get(name)) is None:
            continue
        if given.get(key) not in (None, value):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {value} and speculative_config.{key}={given[key]!r}: leave one of them out")
        given[key] = value
    return given


def _method(given: Mapping[str, Any], download_dir: str | None) -> str:
    method, model = given.get("method"), given.get("model")
    if method in NAMES_OF_NGRAM or (method is None and model in NAMES_OF_NGRAM):
        _refuse_a_draft(method, given)
        return NGRAM
    if method is not None and method not in BY_A_DRAFT:
        raise _not_built(method, model)
    if not isinstance(model, str) or not model:
        raise ConfigError(
            "speculative_model is missing; give the draft's directory, or --speculative-model ngram, which looks "
            "drafts up in the prompt"
        )
    check_path("speculative_model", model)
    found = method_of(config_directory(model, given.get("revision"), download_dir, key="speculative_model"))
    if method not in (None, found):
        raise ConfigError(
            f"speculative_config.method={method!r}, but by its config.json speculative_model={model!r} is for "
            f"{found!r}: leave the method out"
            + (', or, if it is an EAGLE head, add "is_eagle": true to its config.json' if method == EAGLE else "")
        )
    return found


def _check_count(count: object) -> None:
    if count is None:
        raise ConfigError("num_speculative_tokens is missing; add --num-speculative-tokens 4, say")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"num_speculative_tokens={count!r}: at least 1 token must be drafted; 4, say")


def _check_lookup(given: Mapping[str, Any]) -> None:
    shortest, longest = (given.get(key) for key in LOOKUP)
    for key in LOOKUP:
        value = given.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"speculative_config.{key}={value!r}: a number of tokens, at least 1; 4, say")
    if shortest is not None and longest is not None and shortest > longest:
        raise ConfigError(f"speculative_config.prompt_lookup_min={shortest} is more than prompt_lookup_max={longest}")


def _refuse_a_draft(method: object, given: Mapping[str, Any]) -> None:
    for key in ("model", "revision"):
        if (value := given.get(key)) is not None and value not in NAMES_OF_NGRAM:
            raise ConfigError(
                f"speculative_config.{key}={value!r} is of a draft, and method={method or NGRAM!r} looks drafts up in "
                "the prompt: leave one of them out"
            )


def _with_lookup(given: dict[str, Any]) -> dict[str, Any]:
    return given if any(given.get(key) is not None for key in LOOKUP) else {**given, **LOOKUP}


def _not_built(method: object, model: object) -> ConfigError:
    named = f"method={method!r}" if model is None else f"method={method!r}, model={model!r}"
    return ConfigError(
        f"speculative_config with {named} is not supported: give a draft model or an EAGLE head as "
        "--speculative-model, or --speculative-model ngram, which looks drafts up in the prompt"
    )
