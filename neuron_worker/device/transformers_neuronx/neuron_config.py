"""The library's NeuronConfig: the classic server's defaults with the user's fields on top.

Values are plain data until `build` makes the library's objects of them, anew for every model: the library writes to
what it is given. Imports no torch; the SDK comes as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ..base import DeviceOptions
from . import settings
from .capabilities import CANDIDATES
from .sdk import Sdk
from .settings import stored_bytes

AMPS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
QUANT_DTYPES = {"int8": "s8", "f8e4m3fn": "f8e4m3fn"}

Role = Literal["alone", "target", "draft", "eagle_target", "eagle_draft"]
Values = dict[str, Any]

_NESTED = {
    "sparse_attn": "SparseAttnConfig",
    "quant": "QuantizationConfig",
    "kv_cache_quant": "KVCacheQuantizationConfig",
    "continuous_batching": "ContinuousBatchingConfig",
    "on_device_generation": "GenerationConfig",
}
_LINE = ("top_k", "top_p", "temperature", "top_p_min_tokens")
_ROLES: dict[Role, Values] = {
    "alone": {},
    "target": {"on_device_embedding": True},
    "draft": {"on_device_embedding": True},
    "eagle_target": {"on_device_embedding": True, "is_eagle_target": True},
    "eagle_draft": {"on_device_embedding": True, "is_eagle_draft": True, "has_pre_attention_norm": False},
}


def samples_on_device(options: DeviceOptions) -> bool:
    return options.sampling == "device" or "on_device_generation" in options.neuron_config


def cache_bytes(options: DeviceOptions) -> int:
    """Of one number in the cache."""
    return stored_bytes(options.neuron_config) or (4 if options.dtype == "float32" else 2)


def weight_tiling_obstacle(hidden_size: int) -> str | None:
    """Why MLP weights cannot be tiled, if they cannot."""
    if hidden_size % 128:
        return f"the hidden size ({hidden_size}) is no multiple of 128"
    if not hasattr(np, "product"):
        return f"the library tiles with NumPy below 2 only, this is {np.__version__}"
    return None


def values(options: DeviceOptions, hidden_size: int, role: Role = "alone", layout: str = "BSH") -> Values:
    """Every field that is set, as plain data. A draft has the defaults alone, as the classic server's has, and the
    model's sampler: what both draw is compared."""
    given = dict(options.neuron_config)
    if role in ("draft", "eagle_draft"):
        given = {name: fields for name, fields in given.items() if name == "on_device_generation"}
    settings.refuse(given, options.max_num_seqs)
    merged: Values = {"attention_layout": layout, "collectives_layout": layout, "fuse_qkv": True, **_ROLES[role]}
    merged["continuous_batching"] = {"max_num_seqs": options.max_num_seqs}
    if options.quantization is not None and role == "alone":
        merged["quant"] = {"quant_dtype": QUANT_DTYPES[options.quantization]}
        merged["weight_tiling"] = weight_tiling_obstacle(hidden_size) is None
    if role != "alone" or samples_on_device(options):
        merged["on_device_generation"] = _generation(given.get("on_device_generation", {}))
    for name, value in given.items():
        merged[name] = {**merged.get(name, {}), **value} if name in _NESTED else value
    if "on_device_generation" in merged:
        merged["on_device_generation"] = _by_line(merged["on_device_generation"], options.max_num_seqs)
    if "quant" in merged:
        merged["quant"] = {"dequant_dtype": AMPS[options.dtype], **merged["quant"]}
    merged["continuous_batching"].pop("batch_size_for_shared_caches", None)  # checked to be the same number
    return merged


def _by_line(fields: Values, num_slots: int) -> Values:
    """One number is every slot's, as the library takes it."""
    if not fields["per_batch_line"]:
        return fields
    numbers = {name: fields[name] for name in _LINE if not isinstance(fields[name], list)}
    return {**fields, **{name: [number] * num_slots for name, number in numbers.items()}}


def _generation(given: Mapping[str, Any]) -> Values:
    """Each slot has parameters of its own, changed while serving; the library keeps candidates only where they may."""
    candidates = {"global_top_k": CANDIDATES} if given.get("dynamic", True) else {}
    numbers = {"top_k": CANDIDATES, "top_p": 1.0, "temperature": 1.0, "top_p_min_tokens": 1}
    return {"do_sample": True, "dynamic": True, "per_batch_line": True, **candidates, **numbers}


def build(sdk: Sdk, fields: Mapping[str, Any]) -> Any:
    """The library's object, of nobody else's."""
    made = dict(fields)
    for name, class_name in _NESTED.items():
        if made.get(name) is not None:
            made[name] = sdk.config_class(class_name)(**copied(made[name]))
    return sdk.config_class("NeuronConfig")(**copied(made))


def generation_config(sdk: Sdk, fields: Mapping[str, Any]) -> Any:
    """A GenerationConfig, of nobody else's."""
    return sdk.config_class("GenerationConfig")(**copied(fields))


def copied(fields: Mapping[str, Any]) -> Values:
    """With lists of its own."""
    return {name: list(value) if isinstance(value, list) else value for name, value in fields.items()}
