"""What users of the classic Neuron fork type, turned into what vLLM 0.32 understands. Pure: nothing of vLLM is touched.

    --device neuron                                    dropped, once it is known to mean this plugin
    --override-neuron-config JSON                      additional_config["override_neuron_config"]
    --speculative-model M, --num-speculative-tokens K,
    --speculative-max-model-len N                      speculative_config
    --use-v2-block-manager                             dropped
    --quantization neuron_quant, int8, none            additional_config["neuronserve"]["quantization"]
    --dtype fp16, bf16, ...                            vLLM's own spelling
    --neuronserve JSON, --neuronserve.KEY VALUE        additional_config["neuronserve"]
    --no-tgi                                           additional_config["neuronserve"]["tgi"] = false

`translate` does it for the keywords of `LLM(...)` and the engine arguments, `add_flags` for a command line. Each
new name keeps working beside its old one; what both give is merged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from . import export_rules, overrides, speculation
from .config import ASKED_KEY, OPTIONS_KEY, user_options
from .device import registry
from .errors import ConfigError
from .model_files import check_path
from .resolve import backend_name
from .served_types import spell_dtype

DRAIN_SECONDS = 90
"""How long a server that is told to stop lets running requests finish; vLLM's own default aborts them."""

ASKED = ("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
"""vLLM fills these in when they are absent; ours to know is whether the user did."""

OUR_QUANTIZATIONS = ("neuron_quant", "int8", "none")
"""Of `--quantization`; anything else is one of vLLM's own methods."""

_FLAG = "--override-neuron-config"


def translate(keywords: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Keywords of vLLM's engine arguments, the classic ones among them, in vLLM's own vocabulary."""
    check_path("model", keywords.get("model"))
    kept = export_rules.fill(keywords)
    given = _options(kept)
    kept["additional_config"] = merged(kept.get("additional_config") or {}, given)
    kept.pop("use_v2_block_manager", None)
    if kept.get("speculative_config") or any(kept.get(name) is not None for name in speculation.FLAGS):
        kept["speculative_config"] = speculation.spelled_out({**kept, "speculative_config": _drafts(kept)})
        kept.update(dict.fromkeys(speculation.STOCK))  # they are in it now, and vLLM wants each only once
    for name in speculation.CLASSIC:
        kept.pop(name, None)
    if kept.get("async_scheduling"):
        raise ConfigError("--async-scheduling is not built yet: leave it out")
    if "dtype" in kept:
        kept["dtype"] = spell_dtype(kept["dtype"])
    if kept.get("max_num_seqs") is None:
        backend = backend_name(user_options(kept["additional_config"]), environ)
        kept["max_num_seqs"] = registry.capabilities(backend).default_max_num_seqs
    return kept


def _options(kept: dict[str, Any]) -> dict[str, Any]:
    """What goes into `additional_config`; its classic keywords leave `kept`."""
    options = dict(_object("neuronserve", kept.pop("neuronserve", None)))
    if (device := kept.pop("device", None)) is not None:
        options["device"] = check_device(str(device))
    if kept.get("quantization") in OUR_QUANTIZATIONS:
        options["quantization"] = kept.pop("quantization")
    asked = {name: kept[name] for name in ASKED if kept.get(name) is not None}
    if asked:
        options[ASKED_KEY] = asked
    override = _object(overrides.KEY, kept.pop(overrides.KEY, None))
    return {**({OPTIONS_KEY: options} if options else {}), **({overrides.KEY: override} if override else {})}


def _drafts(kept: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object("speculative_config", kept.get("speculative_config"))


def _object(key: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if isinstance(value, str):
        return json_object(key, value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value!r}: expected a dictionary")
    return value


def check_device(device: str) -> str:
    if device not in ("auto", "neuron"):
        raise ConfigError(
            f"device={device!r} is not served by this plugin: leave --device out or use neuron; on a machine without "
            "a Neuron device both run on the embedded cpu backend"
        )
    return device


def json_object(key: str, text: str) -> dict[str, Any]:
    """A JSON object as the shell left it."""
    example = '{"fuse_qkv": true}' if key == overrides.KEY else '{"chunk_tokens": 128}'
    try:
        value = json.loads(text)
    except ValueError as error:
        split = text.startswith('"') and '":' in text  # bash expands {"a":1,"b":2} into two words
        why = "the shell split it at a comma" if split else str(error)
        raise ConfigError(f"{key}={text!r} is not JSON ({why}); put it in single quotes: '{example}'") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{key}={text!r}: expected a JSON object, such as '{example}'")
    return value


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both, object by object; `new` wins."""
    result = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


class _Into(argparse.Action):
    """Writes the value into a dictionary of the namespace, under `path`, beside what is there."""

    def __init__(self, *args: Any, into: str, path: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.into, self.path = into, path

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        value = self.const if self.nargs == 0 else values
        for key in reversed(self.path):
            value = {key: value}
        setattr(namespace, self.into, merged(getattr(namespace, self.into, None) or {}, value))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The classic flags and ours, on a parser that has vLLM's. May be called again."""
    actions = parser._option_string_actions
    if _FLAG in actions:
        return
    group = parser.add_argument_group("Neuron", "Flags of the classic Neuron guides, and this plugin's own options.")

    def flag(name: str, help: str, into: str, *path: str, **kwargs: Any) -> None:
        # SUPPRESS: an absent flag leaves no attribute, so vLLM's own defaults stand.
        group.add_argument(
            name,
            action=_Into,
            into=into,
            path=path,
            default=argparse.SUPPRESS,
            help=help,
            dest=f"_{name[2:]}",
            **kwargs,
        )

    extra, draft = "additional_config", "speculative_config"
    flag("--device", "neuron or auto.", extra, OPTIONS_KEY, "device", type=_argument(check_device))
    flag(_FLAG, "NeuronConfig fields as JSON.", extra, overrides.KEY, type=_json_argument(overrides.KEY))
    flag(
        "--neuronserve",
        "Options as JSON, or --neuronserve.KEY VALUE.",
        extra,
        OPTIONS_KEY,
        type=_json_argument("neuronserve"),
    )
    flag("--no-tgi", "Without TGI's routes.", extra, OPTIONS_KEY, "tgi", nargs=0, const=False)
    flag("--require-cached", "Never compile.", extra, OPTIONS_KEY, "require_cached", nargs=0, const=True)
    flag("--speculative-model", "Draft model.", draft, "model")
    flag("--num-speculative-tokens", "Tokens drafted per step.", draft, "num_speculative_tokens", type=int)
    flag("--speculative-max-model-len", "Of the draft model.", draft, "max_model_len", type=int)
    group.add_argument("--use-v2-block-manager", action="store_true", default=argparse.SUPPRESS, help="Has no effect.")
    _adapt_stock_flags(parser)


def _adapt_stock_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser._option_string_actions
    for name in ("--additional-config", "--speculative-config"):
        if (action := actions.get(name)) is not None:
            action.__class__ = _merging(type(action))
    if (dtype := actions.get("--dtype")) is not None:
        dtype.type = spell_dtype
    if (quantization := actions.get("--quantization")) is not None and quantization.choices is not None:
        quantization.choices = [*quantization.choices, *OUR_QUANTIZATIONS]
    parser.set_defaults(shutdown_timeout=DRAIN_SECONDS)


def _merging(stock: type[argparse.Action]) -> type[argparse.Action]:
    """An action that adds to the dictionary that earlier flags made, where the stock one would replace it."""

    class Merging(stock):  # type: ignore[valid-type, misc]
        def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
            now = getattr(namespace, self.dest, None)
            if isinstance(now, dict) and isinstance(values, dict):
                values = merged(now, values)
            setattr(namespace, self.dest, values)

    return Merging


def _argument(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """`check` for argparse, which wants an error class of its own."""

    def parse(text: str) -> Any:
        try:
            return check(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _json_argument(key: str) -> Callable[[str], Any]:
    return _argument(lambda text: json_object(key, text))
