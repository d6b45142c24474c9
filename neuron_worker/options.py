"""Our own settings: what may stand in `additional_config["neuronserve"]` (`--neuronserve.<key> value`) and the shell.

Every key is also an environment variable `NEURONSERVE_<KEY>`. The command line wins over the environment, the
environment over the default. Knows no vLLM and no device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .values import Parser, boolean, near, one_of, parse, positive, text

PREFIX = "NEURONSERVE_"


def _tgi(value: object) -> Mapping[str, object] | None:
    """TGI's settings as given, {} for the defaults; None turns the routes off."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, Mapping):
        return {} if boolean(value) else None
    # Checked here, before anything is loaded; the routes are mounted when the engine is ready.
    from neuronserve.server.tgi.settings import TgiSettings

    TgiSettings.from_mapping(value)
    return value


def tgi_option(given: Mapping[str, object], environ: Mapping[str, str]) -> Mapping[str, object] | None:
    """The option `tgi` alone, for the routes."""
    value: Any = _value(_BY_KEY["tgi"], given, environ)
    return {} if value is True else value


@dataclass(frozen=True)
class Option:
    key: str
    parser: Parser
    default: object
    help: str

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()


OPTIONS = (
    Option("backend", text, "auto", "The device: auto, cpu, or another backend this build has."),
    Option("device", one_of("auto", "neuron"), "auto", "The classic --device flag; neuron and auto mean the same."),
    Option(
        "require_chip",
        boolean,
        False,
        "Without a usable Neuron chip exit with the reason, where the cpu device would serve; Neuron images set it.",
    ),
    Option("chunk_tokens", positive, None, "Most prompt tokens in one call; by default the backend's own choice."),
    Option(
        "quantization",
        one_of("none", "int8", "neuron_quant", aliases={"s8": "int8"}),
        None,
        "Weights in int8: int8, or neuron_quant for what NEURON_QUANT_DTYPE says (s8 unless set); none turns it off.",
    ),
    Option("quantize_head", boolean, False, "The language-model head in int8 too, where weights are int8."),
    Option(
        "activations",
        one_of("int8", "float32"),
        None,
        "What int8 weights of the cpu device are multiplied with: int8, each token's activations rounded in blocks of "
        "64, by default, or float32. Either way a request's tokens depend on no other's.",
    ),
    Option(
        "sampling",
        one_of("auto", "device", "host"),
        "auto",
        "Where tokens are drawn. device: there, as far as it can; host: all logits go to vLLM's sampler; auto: the "
        "device where a request may still choose (cpu), the host where the choice would be compiled in (chips).",
    ),
    Option(
        "adaptive_depth",
        boolean,
        True,
        "Whether a step has only the drafts that pay, by what drafts and steps have cost so far; false: all there are.",
    ),
    Option(
        "lookup_beside_draft",
        boolean,
        True,
        "Whether text that repeats itself is drafted by prompt lookup, and an EAGLE head is asked for the rest alone.",
    ),
    Option("threads", positive, None, "Threads of the cpu device; by default every core the process may use."),
    Option(
        "artifacts",
        text,
        None,
        "Directory where a chip's compiled graphs are kept between starts; by default below the hub's cache, where "
        "HF_HOME or HUGGINGFACE_HUB_CACHE names it (docs/cache.md).",
    ),
    Option(
        "cache_url",
        text,
        None,
        "Where machines share compiled graphs: s3://bucket/folder, hf://owner/name, file:///folder.",
    ),
    Option("require_cached", boolean, False, "Never compile: without compiled graphs the start fails, and says why."),
    Option("device_python", text, None, "Python interpreter that runs the device in another environment."),
    Option("device_timeout", positive, None, "Seconds until a step there counts as hung; by default two minutes."),
    Option(
        "device_prepare_timeout",
        positive,
        None,
        "Seconds until loading or compiling there counts as hung although the process gives signs of life; by default "
        "a day.",
    ),
    Option(
        "device_restarts",
        positive,
        3,
        "Attempts in a row to restart a lost device before the server gives up, with growing pauses between them.",
    ),
    Option(
        "tgi",
        _tgi,
        True,
        "TGI's routes beside OpenAI's: on unless false (--no-tgi); an object sets their limits, such as "
        '{"max_best_of": 4}.',
    ),
)

OTHER_VARIABLES = {
    "NEURONSERVE_CPU_ISA": "Kernels of the cpu device: avx512vnni, avx512, avxvnni, avx2 or base; by default the best "
    "this processor has.",
}
"""Read by a backend itself, wherever it runs: no options, and nothing to warn about."""

_BY_KEY = {option.key: option for option in OPTIONS}


def read(given: Mapping[str, object], environ: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    """(typed value of every option, warnings)."""
    for key in given:
        if key not in _BY_KEY:
            known = ", ".join(_BY_KEY)
            raise ConfigError(f"neuronserve.{key}: no such option{near(key, _BY_KEY)} (known: {known})")
    values = {option.key: _value(option, given, environ) for option in OPTIONS}
    return values, _unknown_variables(environ)


def spelled(key: str, given: Mapping[str, object]) -> str:
    """The name under which the user gave this option."""
    return f"neuronserve.{key}" if given.get(key) is not None else _BY_KEY[key].variable


def _value(option: Option, given: Mapping[str, object], environ: Mapping[str, str]) -> object:
    if given.get(option.key) is not None:
        return parse(f"neuronserve.{option.key}", given[option.key], option.parser)
    if environ.get(option.variable, "").strip():
        return parse(option.variable, environ[option.variable], option.parser)
    return option.default


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = {*(option.variable for option in OPTIONS), *OTHER_VARIABLES}
    return [
        f"{name} is set but is no option of this version{near(name, known)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]
