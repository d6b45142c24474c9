"""The `vllm serve` command that settings come to: its words, and the variables beside them.

Secrets travel in the environment: a command line can be read by everybody on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronserve.neuron_worker import speculation
from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.resolve import resolve
from neuronserve.server.tgi.settings import TgiSettings

from . import tools
from .deduce import BATCH, CORES, INPUT, LENGTH, PREFILL, TOTAL, Settings
from .hostname import bind_address

LEVELS = {"trace": "DEBUG", "debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR", "off": "CRITICAL"}
"""TGI's levels, the most talkative first -> vLLM's."""

ENGINE_FLAGS = {
    "--max-model-len": TOTAL,
    "--max-num-seqs": BATCH,
    "--tensor-parallel-size": CORES,
    "--dtype": "dtype",
    "speculative_config": "speculate",
}
"""Flag of `vllm serve`, as its errors spell it -> the setting it is made from."""

_METHODS = ["GET", "POST"]
_HEADERS = ["content-type", "authorization"]


@dataclass(frozen=True)
class Device:
    """What the device makes of the limits. Filled by `look`."""

    max_num_seqs: int
    chunk_tokens: int | None  # of one step; None: prompts go whole
    name: str


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]  # after `vllm`
    variables: Mapping[str, str]  # set beside the shell's own
    notes: tuple[str, ...] = ()


def look(settings: Settings, environ: Mapping[str, str]) -> Device:
    """The device's own numbers, and its refusals, before anything is started."""
    drafts = _drafts(settings)
    request = ServeRequest(
        model_dir=settings.model.directory,
        max_model_len=settings.number(LENGTH),
        max_num_seqs=settings.number(BATCH),
        tensor_parallel_size=settings.number(CORES) or 1,
        dtype=str(settings.value("dtype")),
        options=_quantization(settings),
        speculation=speculation.planned({"speculative_config": drafts and speculation.spelled_out(drafts)}),
    )
    try:
        resolution = resolve(request, environ)
    except ConfigError as error:
        raise ConfigError(with_origins(str(error), settings)) from None
    return Device(resolution.config.max_num_seqs, resolution.plan.chunk_tokens, resolution.config.backend)


def with_origins(problem: str, settings: Settings) -> str:
    """An error that speaks of the server's flags, with what was typed beside them."""
    for flag, name in ENGINE_FLAGS.items():
        if settings[name].is_given and settings[name].origin != flag:
            problem = problem.replace(flag, f"{flag} (here {settings[name].origin})", 1)
    return problem


def command(settings: Settings, device: Device, environ: Mapping[str, str], extra: tuple[str, ...] = ()) -> Command:
    host, host_note = bind_address(settings["hostname"])
    chunk, chunk_note = _chunk(settings, device)
    ours: dict[str, Any] = {"tgi": tgi_settings(settings).to_json(), **_quantization(settings)}
    if chunk is not None:
        ours["chunk_tokens"] = chunk
    words = ["serve", str(settings.value("model_id")), "--host", host, "--port", str(settings.value("port"))]
    words += _engine_words(settings)
    if drafts := _drafts(settings):
        words += ["--speculative-config", json.dumps(drafts["speculative_config"])]
    words += ["--additional-config", json.dumps({"neuronserve": ours})]
    words += ["--shutdown-timeout", str(settings.value("graceful_termination_timeout"))]
    words += _cors_words(settings)
    if template := _chat_template(settings.text("tokenizer_config_path")):
        words += ["--chat-template", template]
    words += _tool_words(settings, template)
    if endpoint := settings.text("otlp_endpoint"):
        words += ["--otlp-traces-endpoint", endpoint]
    notes = tuple(note for note in (host_note, chunk_note) if note)
    return Command((*words, *extra), _variables(settings, environ), notes)


def tgi_settings(settings: Settings) -> TgiSettings:
    names = (
        "max_concurrent_requests",
        "max_best_of",
        "max_stop_sequences",
        "max_top_n_tokens",
        "max_client_batch_size",
        "validation_workers",
        "payload_limit",
    )
    numbers: dict[str, Any] = {name: settings.number(name) for name in names}
    origins = settings.value("cors_allow_origin")
    return TgiSettings(
        model_id=settings.text("model_id"),
        model_sha=settings.model.sha,
        model_pipeline_tag=settings.model.pipeline_tag,
        max_input_tokens=settings.number(INPUT),
        max_total_tokens=settings.number(TOTAL),
        cors_allow_origin=origins if isinstance(origins, tuple) else (),
        disable_grammar_support=bool(settings.value("disable_grammar_support")),
        enable_prefill_logprobs=bool(settings.value("enable_prefill_logprobs")),
        any_model_name=True,
        **numbers,
    )


def _engine_words(settings: Settings) -> list[str]:
    words = ["--max-model-len", str(settings.value(LENGTH)), "--tensor-parallel-size", str(settings.value(CORES))]
    words += ["--dtype", str(settings.value("dtype"))]
    if (batch := settings.number(BATCH)) is not None:
        words += ["--max-num-seqs", str(batch)]
    if (revision := settings.text("revision")) is not None and not settings.model.is_local:
        words += ["--revision", revision]
    return words


def _cors_words(settings: Settings) -> list[str]:
    origins = settings.value("cors_allow_origin")
    allowed = list(origins) if isinstance(origins, tuple) else ["*"]
    lists = {"origins": allowed, "methods": _METHODS, "headers": _HEADERS}
    return [word for name, value in lists.items() for word in (f"--allowed-{name}", json.dumps(value))]


def _tool_words(settings: Settings, template: str | None) -> list[str]:
    """Arguments follow their function's schema, as in TGI. The user's own words come later, and win."""
    model = settings.model
    if model.directory and not model.is_local:
        tools.fetch(model.name, settings.text("revision"), _hub_cache(settings))
    parser = tools.parser_for(model.directory, template)
    return ["--tool-call-parser", parser, "--tool-strict-level", "parameter", "--enable-auto-tool-choice"]


def _quantization(settings: Settings) -> dict[str, Any]:
    asked = settings.value("quantize")
    return {} if asked is None else {"quantization": asked}


def _drafts(settings: Settings) -> dict[str, Any]:
    """Keywords of the server: what TGI does for a model without heads of its own, n-grams."""
    asked = settings.number("speculate")
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": asked}} if asked else {}


def _chunk(settings: Settings, device: Device) -> tuple[int | None, str | None]:
    """(tokens to ask the device for, what to say): a cap lowers the device's own chunk and never raises it."""
    cap = settings.number(PREFILL)
    if cap is None:
        return None, None
    if device.chunk_tokens is None:
        return None, f"max_batch_prefill_tokens={cap} has no effect: the {device.name} device takes prompts whole"
    if cap >= device.chunk_tokens:
        own = f"the {device.name} device has {device.chunk_tokens} prompt tokens in a step"
        return None, f"max_batch_prefill_tokens={cap} caps nothing: {own}"
    return cap, None


def _chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"tokenizer_config_path={path!r}: {error}; give a tokenizer_config.json") from None
    if isinstance(found, list):  # several, by name
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    if not isinstance(found, str):
        raise ConfigError(f"tokenizer_config_path={path!r}: no chat_template in it; leave it out to use the model's")
    return found


def _hub_cache(settings: Settings) -> str | None:
    return settings.text("weights_cache_override") or settings.text("huggingface_hub_cache")


def _variables(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Of these the server reads, in the spellings it knows."""
    endpoint = settings.text("otlp_endpoint")
    wanted = {
        "VLLM_API_KEY": settings.text("api_key"),
        "HF_TOKEN": settings.text("hf_token"),
        "HF_HUB_CACHE": _hub_cache(settings),
        "OTEL_SERVICE_NAME": settings.text("otlp_service_name") if endpoint else None,
        "LOG_FORMAT": "JSON" if is_json(settings) else None,
        "VLLM_LOGGING_LEVEL": environ.get("VLLM_LOGGING_LEVEL") or log_level(settings.text("log_level")),
        "VLLM_LOGGING_COLOR": "0" if settings.value("log_colorize") is False else None,
    }
    return {name: value for name, value in wanted.items() if value}


def is_json(settings: Settings) -> bool:
    return bool(settings.value("json_output")) or settings.value("log_format") == "JSON"


def log_level(directive: str | None) -> str | None:
    """`debug`, or the most talkative level of `text_generation_router=debug,info`; None: not given."""
    if directive is None:
        return None
    asked = {part.rpartition("=")[2].strip().lower() for part in directive.split(",")}
    asked = {"warn" if level == "warning" else level for level in asked}
    found = next((LEVELS[level] for level in LEVELS if level in asked), None)
    if found is None:
        raise ConfigError(f"LOG_LEVEL={directive!r}: expected {', '.join(LEVELS)}, or target=level")
    return found
