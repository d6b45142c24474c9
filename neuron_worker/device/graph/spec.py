"""What a model is, in one vocabulary for every architecture: a frozen `ModelSpec` made from `config.json` alone.

`read_spec` translates the names and defaults of Hugging Face's configurations, old and new; the rest of the graph
reads only the result. Byte counts for a plan are here too, as nothing else is needed for them.
Knows no tensors, no executor, no bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..errors import UnsupportedModel
from .config_json import ConfigJson
from .ops import Activation, FloatType

RopeScaling = Literal["default", "linear", "llama3"]
Family = Literal["llama", "gpt2"]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions. The scaling's numbers are 1 or 0 where the scaling does not use them."""

    theta: float
    scaling: RopeScaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """Filled by `read_spec`, read by everything that builds or plans a graph."""

    architecture: str
    family: Family  # how the checkpoint names its tensors
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm: Literal["rms", "layer"]
    epsilon: float
    activation: Activation
    rope: RopeSpec | None  # None: a learned table of positions
    tied_head: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    head_norm: bool  # RMS norm of every query and key head
    windows: tuple[int | None, ...]  # per layer; None: the whole context
    attention_scales: tuple[float, ...]  # per layer
    checkpoint_dtype: FloatType
    num_experts: int = 1  # of each layer's MLP

    @property
    def longest(self) -> int:
        """Positions the model is made for: linear scaling stretches those it was trained on."""
        if self.rope is None or self.rope.scaling != "linear":
            return self.max_positions
        return int(self.max_positions * self.rope.factor)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.query_size + 2 * self.kv_size

    @property
    def is_gated(self) -> bool:
        return self.activation.endswith("_gate")

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of one layer's linear weights: qkv, attention output, each expert's up (with its gate) and down."""
        up = self.intermediate_size * (2 if self.is_gated else 1)
        return (
            (self.qkv_size, self.hidden_size),
            (self.hidden_size, self.query_size),
            *((up, self.hidden_size), (self.hidden_size, self.intermediate_size)) * self.num_experts,
        )

    @property
    def num_linear_parameters(self) -> int:
        """Of all layers' matrices: what quantisation applies to."""
        return self.num_layers * sum(rows * columns for rows, columns in self.layer_matrices)

    @property
    def num_vector_parameters(self) -> int:
        """Norms and biases."""
        qkv, output, up, down = (rows for rows, _ in self.layer_matrices[:4])
        norm = self.hidden_size * (2 if self.norm == "layer" else 1)
        layer = 2 * norm + (2 * self.head_dim if self.head_norm else 0)
        layer += qkv * self.qkv_bias + output * self.output_bias + (up + down) * self.mlp_bias
        return self.num_layers * layer + norm

    @property
    def num_embedding_parameters(self) -> int:
        positions = self.max_positions if self.rope is None else 0
        return (self.vocab_size + positions) * self.hidden_size

    @property
    def num_head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """As the model's own authors count: a tied head is not counted again."""
        head = 0 if self.tied_head else self.num_head_parameters
        return self.num_linear_parameters + self.num_vector_parameters + self.num_embedding_parameters + head


def weight_bytes(
    spec: ModelSpec, dtype: FloatType, quantization: str | None = None, quantize_head: bool = False
) -> int:
    """Bytes of all weights once loaded. A tied head counts beside its look-up table: the two are laid out apart."""
    item = ITEM_BYTES[dtype]
    layer_rows = spec.num_layers * sum(rows for rows, _ in spec.layer_matrices)
    body = _matrix_bytes(layer_rows, spec.num_linear_parameters, item, quantization is not None)
    head = _matrix_bytes(spec.vocab_size, spec.num_head_parameters, item, quantization is not None and quantize_head)
    return body + head + spec.num_embedding_parameters * item + spec.num_vector_parameters * 4


def kv_bytes_per_token(spec: ModelSpec, dtype: FloatType) -> int:
    """Keys and values of one position in all layers."""
    return 2 * spec.num_layers * spec.kv_size * ITEM_BYTES[dtype]


def _matrix_bytes(rows: int, elements: int, item: int, quantized: bool) -> int:
    return elements + 4 * rows if quantized else elements * item  # int8 and a float32 scale per row


def read_spec(model_dir: str | Path, more: tuple[str, ...] = ()) -> ModelSpec:
    """The model in `model_dir`; `LoadError` or `UnsupportedModel` if it is not one this graph can compute.

    `more`: architectures that a backend computes without this graph; their specification serves a plan.
    """
    config = ConfigJson.in_directory(model_dir)
    architecture = _architecture(config, (*COMPUTED, *more))
    _refuse_quantized(config)
    return _READERS[architecture](config, architecture)


def read_head_spec(config: ConfigJson) -> ModelSpec:
    """Of an EAGLE head: one layer of the Llama family."""
    _refuse_quantized(config)
    listed = [str(name) for name in config.get("architectures") or ()]
    name = next((name for name in listed if name in COMPUTED and _READERS[name] is _llama_family), "LlamaForCausalLM")
    spec = _llama_family(config, name)
    if spec.num_layers != 1:
        raise UnsupportedModel(f"num_hidden_layers is {spec.num_layers} in {config.path}; an EAGLE head here has one")
    return spec


def _architecture(config: ConfigJson, supported: tuple[str, ...]) -> str:
    listed = config.get("architectures")
    if listed is not None and not (isinstance(listed, list) and listed and isinstance(listed[0], str)):
        raise config.malformed("architectures", listed, "a list of class names")
    name = listed[0] if listed else _BY_MODEL_TYPE.get(config.text("model_type", default=""), "without a name")
    if name not in supported:
        raise UnsupportedModel(
            f"architecture {name} in {config.path} is not supported; supported are {', '.join(supported)}"
        )
    return str(name)


def _refuse_quantized(config: ConfigJson) -> None:
    section = config.section("quantization_config")
    if section is not None:
        method = section.get("quant_method") or "unknown"
        raise UnsupportedModel(
            f"quantization_config.quant_method is {method!r} in {config.path}: weights quantised in the checkpoint are "
            "not supported; use the float checkpoint, and int8 by NEURON_QUANT_DTYPE=s8 or --quantization neuron_quant"
        )


def _llama_family(config: ConfigJson, architecture: str) -> ModelSpec:
    num_layers = config.whole("num_hidden_layers")
    num_heads = config.whole("num_attention_heads")
    hidden_size = config.whole("hidden_size")
    head_dim = _head_dim(config, architecture, hidden_size, num_heads)
    has_bias_keys = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = config.flag("attention_bias", default=False) if has_bias_keys else False
    max_positions = config.whole("max_position_embeddings", default=_MAX_POSITIONS[architecture])
    return ModelSpec(
        architecture=architecture,
        family="llama",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads, 8 if architecture.startswith("Mi") else num_heads),
        head_dim=head_dim,
        intermediate_size=config.whole("intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        max_positions=max_positions,
        norm="rms",
        epsilon=config.number("rms_norm_eps", default=1e-6),
        activation=_activation(config, config.text("hidden_act", default="silu"), _GATED),
        rope=_rope(config, max_positions),
        tied_head=config.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", default=False) if architecture == "LlamaForCausalLM" else False,
        head_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(config, architecture, num_layers),
        attention_scales=(head_dim**-0.5,) * num_layers,
        checkpoint_dtype=_checkpoint_dtype(config),
        num_experts=config.whole("num_local_experts", default=8) if architecture == "MixtralForCausalLM" else 1,
    )


def _gpt2(config: ConfigJson, architecture: str) -> ModelSpec:
    for key in ("add_cross_attention", "is_encoder_decoder"):
        if config.flag(key, default=False):
            raise UnsupportedModel(f"{key} is true in {config.path}: only decoders on their own are supported")
    num_layers = config.whole("n_layer", "num_hidden_layers")
    num_heads = config.whole("n_head", "num_attention_heads")
    hidden_size = config.whole("n_embd", "hidden_size")
    head_dim = _even_split(config, hidden_size, num_heads, "n_embd", "n_head")
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", default=False)
    return ModelSpec(
        architecture=architecture,
        family="gpt2",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config.whole("n_inner", default=4 * hidden_size),
        vocab_size=config.whole("vocab_size"),
        max_positions=config.whole("n_positions", "max_position_embeddings", default=1024),
        norm="layer",
        epsilon=config.number("layer_norm_epsilon", default=1e-5),
        activation=_activation(config, config.text("activation_function", default="gelu_new"), _PLAIN),
        rope=None,
        tied_head=config.flag("tie_word_embeddings", default=True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_norm=False,
        windows=(None,) * num_layers,
        attention_scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(num_layers)),
        checkpoint_dtype=_checkpoint_dtype(config),
    )


def _num_kv_heads(config: ConfigJson, num_heads: int, default: int) -> int:
    # null means as many as query heads; only an absent key takes the architecture's default.
    default = num_heads if config.has("num_key_value_heads") else default
    value = config.whole("num_key_value_heads", default=default)
    if num_heads % value:
        raise config.malformed("num_key_value_heads", value, f"a divisor of num_attention_heads ({num_heads})")
    return value


def _head_dim(config: ConfigJson, architecture: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = config.whole("head_dim")
    elif architecture == "Qwen3ForCausalLM":
        head_dim = 128
    else:
        head_dim = _even_split(config, hidden_size, num_heads, "hidden_size", "num_attention_heads")
    if head_dim % 2:
        raise config.malformed("head_dim", head_dim, "even: rotary positions turn pairs of its elements")
    return head_dim


def _even_split(config: ConfigJson, whole: int, parts: int, whole_key: str, parts_key: str) -> int:
    if whole % parts:
        raise config.malformed(whole_key, whole, f"a multiple of {parts_key} ({parts})")
    return whole // parts


def _activation(config: ConfigJson, name: str, supported: dict[str, Activation]) -> Activation:
    if name not in supported:
        raise UnsupportedModel(
            f"activation {name!r} in {config.path} is not supported; supported here are {', '.join(supported)}"
        )
    return supported[name]


def _windows(config: ConfigJson, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "MistralForCausalLM":
        return (_window_size(config),) * num_layers
    if architecture in ("LlamaForCausalLM", "MixtralForCausalLM") or not config.flag(
        "use_sliding_window", default=False
    ):
        return (None,) * num_layers
    window = _window_size(config)
    return tuple(window if slides else None for slides in _sliding_layers(config, num_layers))


def _window_size(config: ConfigJson) -> int | None:
    if config.has("sliding_window") and config.get("sliding_window") is None:
        return None  # null says there is none; leaving the key out means the first models' 4096
    return config.whole("sliding_window", default=4096)


def _sliding_layers(config: ConfigJson, num_layers: int) -> list[bool]:
    listed = config.get("layer_types")
    if listed is None:
        first = config.whole("max_window_layers", default=28, minimum=0)
        return [layer >= first for layer in range(num_layers)]
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(listed, list) or len(listed) != num_layers or any(kind not in known for kind in listed):
        raise config.malformed("layer_types", listed, f"a list of {num_layers}, each of {', '.join(known)}")
    return [known[kind] for kind in listed]


def _rope(config: ConfigJson, max_positions: int) -> RopeSpec:
    # transformers 4 has rope_theta and rope_scaling apart; transformers 5 writes both into rope_parameters.
    section = config.section("rope_scaling", "rope_parameters")
    theta = config.number("rope_theta", default=10000.0)
    partial = config.number("partial_rotary_factor", default=1.0)
    if section is None:
        return _whole_heads(config, RopeSpec(theta), partial)
    scaling = section.text("rope_type", "type", default="default")
    if section.has_sections():
        scaling = "per layer type"
    if scaling not in get_args(RopeScaling):
        raise UnsupportedModel(
            f"rope scaling {scaling!r} in {config.path} is not supported; "
            f"supported are {', '.join(get_args(RopeScaling))}"
        )
    theta = section.number("rope_theta", default=theta)
    partial = section.number("partial_rotary_factor", default=partial)
    rope = RopeSpec(theta)
    if scaling == "linear":
        rope = RopeSpec(theta, "linear", section.number("factor"))
    if scaling == "llama3":
        rope = RopeSpec(
            theta,
            "llama3",
            section.number("factor"),
            section.number("low_freq_factor"),
            section.number("high_freq_factor"),
            config.whole(
                "original_max_position_embeddings",
                default=section.whole("original_max_position_embeddings", default=max_positions),
            ),
        )
    return _whole_heads(config, rope, partial)


def _whole_heads(config: ConfigJson, rope: RopeSpec, partial: float) -> RopeSpec:
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor is {partial} in {config.path}; only 1 is supported")
    return rope


def _checkpoint_dtype(config: ConfigJson) -> FloatType:
    name = config.text("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    for dtype in get_args(FloatType):
        if name == dtype:
            return dtype  # type: ignore[no-any-return]
    raise config.malformed("torch_dtype", name, f"one of {', '.join(get_args(FloatType))}")


_GATED: dict[str, Activation] = {"silu": "silu_gate", "swish": "silu_gate", "gelu": "gelu_gate"}
_PLAIN: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_READERS: dict[str, Callable[[ConfigJson, str], ModelSpec]] = {
    "LlamaForCausalLM": _llama_family,
    "MistralForCausalLM": _llama_family,
    "Qwen2ForCausalLM": _llama_family,
    "Qwen3ForCausalLM": _llama_family,
    "GPT2LMHeadModel": _gpt2,
    "MixtralForCausalLM": _llama_family,
}
COMPUTED = tuple(name for name in _READERS if name != "MixtralForCausalLM")
"""Architectures of this graph; the others have a specification alone."""

_MAX_POSITIONS = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131072,
    "MixtralForCausalLM": 131072,
    "Qwen2ForCausalLM": 32768,
    "Qwen3ForCausalLM": 32768,
}
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
