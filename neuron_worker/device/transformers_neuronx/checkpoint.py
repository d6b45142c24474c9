"""Which models the library computes, and what of their configuration it would read wrongly.

The library reads config.json by the names of its time and passes over what it does not know: a head size of its own,
biases, other activations, rotary parameters in a section. What it would get wrong is refused here by name, or
rewritten in a directory that stands in for the checkpoint's. Asked before anything starts, and again when a model
loads. Imports no torch and no SDK.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base import DeviceOptions
from ..errors import UnsupportedModel
from ..graph.config_json import ConfigJson
from ..graph.spec import ModelSpec, read_spec, weight_bytes


@dataclass(frozen=True)
class Architecture:
    name: str  # as config.json has it
    family: str  # the library's module
    model_class: str
    is_experimental: bool = False
    speculates: bool = False
    layout: str = "BSH"  # of attention; the classic server's, where the class has it


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("LlamaForCausalLM", "llama", "LlamaForSampling", speculates=True),
        Architecture("MistralForCausalLM", "mistral", "MistralForSampling"),
        Architecture("MixtralForCausalLM", "mixtral", "MixtralForSampling", is_experimental=True, layout="HSB"),
    )
}


@dataclass(frozen=True)
class Checkpoint:
    """Filled by `read`. Sizes are the model's own, whatever the cores."""

    directory: str
    architecture: Architecture
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int
    is_eagle: bool
    config: Mapping[str, Any]  # config.json as it is
    changes: Mapping[str, Any] = field(default_factory=dict)  # what it must say for the library

    @contextmanager
    def as_the_library_reads_it(self) -> Iterator[str]:
        """A directory to load from: the checkpoint's own where its config.json will do."""
        if not self.changes:
            yield self.directory
            return
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as made:
            for path in Path(self.directory).iterdir():
                if path.name != "config.json":
                    (Path(made) / path.name).symlink_to(path.resolve())
            (Path(made) / "config.json").write_text(json.dumps({**self.config, **self.changes}))
            yield made


def refuse(model_dir: str, options: DeviceOptions) -> None:
    """`LoadError` says what of the model the library does not serve."""
    read(model_dir, options.dtype, options.quantization, options.max_model_len)


def read(model_dir: str, dtype: str, quantization: str | None, max_model_len: int) -> Checkpoint:
    config = ConfigJson.in_directory(model_dir)
    architecture = _architecture(config)
    raw = json.loads(config.path.read_text(encoding="utf-8"))
    is_eagle = config.flag("is_eagle", default=False)
    if architecture.family == "mixtral":
        return _mixtral(config, architecture, raw, dtype)
    spec = read_spec(model_dir)
    _refuse(spec, config.path, max_model_len)
    return Checkpoint(
        directory=model_dir,
        architecture=architecture,
        vocab_size=spec.vocab_size,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        weight_bytes=weight_bytes(spec, _float_type(dtype), quantization),
        is_eagle=is_eagle,
        config=raw,
        changes=_rope_changes(spec, raw),
    )


def _architecture(config: ConfigJson) -> Architecture:
    listed = config.get("architectures") or ["without a name"]
    found = ARCHITECTURES.get(listed[0]) if isinstance(listed, list) else None
    if found is None:
        supported = ", ".join(
            f"{each.name} (experimental)" if each.is_experimental else each.name for each in ARCHITECTURES.values()
        )
        raise UnsupportedModel(
            f"architecture {listed[0]} in {config.path} is not served by transformers-neuronx; served are {supported}"
        )
    return found


def _refuse(spec: ModelSpec, path: Path, max_model_len: int) -> None:
    if spec.head_dim * spec.num_heads != spec.hidden_size:
        raise UnsupportedModel(
            f"head_dim is {spec.head_dim} in {path}: the library takes hidden_size / num_attention_heads "
            f"({spec.hidden_size // spec.num_heads}) for it; use a backend that reads head_dim"
        )
    if spec.qkv_bias or spec.output_bias or spec.mlp_bias:
        raise UnsupportedModel(
            f"{path} has attention_bias or mlp_bias, which the library leaves out; use another backend"
        )
    if spec.activation != "silu_gate":
        raise UnsupportedModel(f"hidden_act in {path} is not silu, the library's only one; use another backend")
    scalings = ("default", "llama3") if spec.architecture == "LlamaForCausalLM" else ("default",)
    if spec.rope is not None and spec.rope.scaling not in scalings:
        raise UnsupportedModel(
            f"rope scaling {spec.rope.scaling!r} in {path}: the library computes {' and '.join(scalings)} for "
            f"{spec.architecture}; use another backend"
        )
    window = min((window for window in spec.windows if window is not None), default=max_model_len)
    if window < max_model_len:
        raise UnsupportedModel(
            f"sliding_window is {window} in {path}: past it the library reads its cache wrongly; "
            f"serve with --max-model-len {window}"
        )


def _rope_changes(spec: ModelSpec, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Newer configurations keep rotary parameters in a section, which the library reads as none."""
    rope = spec.rope
    assert rope is not None, "every architecture here has rotary positions"
    section = raw.get("rope_parameters")
    if not section:
        return {}
    scaling = None
    if rope.scaling != "default":
        scaling = {key: value for key, value in section.items() if key != "rope_theta"}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _mixtral(config: ConfigJson, architecture: Architecture, raw: Mapping[str, Any], dtype: str) -> Checkpoint:
    hidden, layers = config.whole("hidden_size"), config.whole("num_hidden_layers")
    heads, vocab_size = config.whole("num_attention_heads"), config.whole("vocab_size")
    kv_heads, experts = config.whole("num_key_value_heads", default=heads), config.whole("num_local_experts", default=8)
    head_dim = hidden // heads
    layer = 2 * hidden * (hidden + kv_heads * head_dim) + experts * hidden * (3 * config.whole("intermediate_size") + 1)
    return Checkpoint(
        directory=str(config.path.parent),
        architecture=architecture,
        vocab_size=vocab_size,
        num_layers=layers,
        hidden_size=hidden,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        weight_bytes=(layers * layer + 2 * vocab_size * hidden) * (4 if dtype == "float32" else 2),
        is_eagle=False,
        config=raw,
    )


def _float_type(dtype: str) -> Any:
    return dtype
