"""The types of what is served: of the computation, of weights, of activations."""

from __future__ import annotations

from . import environment, export_rules, options, overrides
from .errors import ConfigError
from .given import Given

QUANTIZATIONS = {"s8": "int8", "f8e4m3fn": "f8e4m3fn"}

DTYPES = {
    **dict.fromkeys(("float32", "float", "fp32", "f32"), "float32"),
    **dict.fromkeys(("float16", "half", "fp16", "f16"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
"""Every spelling of a type, those of the classic library among them."""


def spell_dtype(value: object) -> object:
    """`fp16` and the like as vLLM spells them; what is no spelling of a type is left for others to refuse."""
    return DTYPES.get(value.strip().lower(), value) if isinstance(value, str) else value


def dtype(given: Given) -> str:
    asked, capabilities = given.request.dtype, given.capabilities
    name = given.spec.checkpoint_dtype if asked == "auto" else str(spell_dtype(asked))
    if name not in capabilities.dtypes:
        known = ", ".join(capabilities.dtypes)
        raise ConfigError(f"--dtype {asked}: the {capabilities.name} device computes in {known}; use one of these")
    return name


def quantization(given: Given) -> str | None:
    """Of the weights; None: they have the computation's type."""
    request, capabilities, export = given.request, given.capabilities, given.export
    asked, choice = _asked_quantization(given), given.values["quantization"]
    contradicts = asked is not None and choice in ("none", "int8") and choice != QUANTIZATIONS[asked[1]]
    if "quant" in given.override and asked is not None and contradicts:
        ours = options.spelled("quantization", request.options)
        raise ConfigError(f"{ours}={choice} and {asked[0]}={asked[1]} contradict each other: leave one of them out")
    if asked is None:
        said = options.spelled("quantization", request.options) if choice == "none" else None
        return export_rules.quantization(export, request.model_dir, None, said)
    key, stored = asked
    name = QUANTIZATIONS[stored]
    if name not in capabilities.quantizations:
        known = " or ".join(capabilities.quantizations) or "the model's own type only"
        raise ConfigError(
            f"{key}={stored}: the {capabilities.name} device stores weights as {known}; use s8 (int8) or leave it out"
        )
    return export_rules.quantization(export, request.model_dir, name, key)


def _asked_quantization(given: Given) -> tuple[str, str] | None:
    """(key that decides, classic name of the type)."""
    choice = given.values["quantization"]
    if "quant" in given.override:
        return f"{overrides.KEY}.quant.quant_dtype", given.override["quant"].get("quant_dtype", "s8")
    if choice == "none":
        return None
    if choice == "int8":
        return "quantization", "s8"
    if given.env.quant_dtype is not None or choice == "neuron_quant":
        return environment.QUANT_KEY, given.env.quant_dtype or "s8"
    return None


def activations(given: Given, quantization: str | None) -> str:
    asked, capabilities = given.text("activations"), given.capabilities
    if quantization is None:
        return "float32"
    if asked == "int8" and not capabilities.rounds_activations:
        raise ConfigError(
            f"{options.spelled('activations', given.request.options)}=int8: the {capabilities.name} device multiplies "
            "int8 weights with float activations; leave it out"
        )
    return asked or ("int8" if capabilities.rounds_activations else "float32")
