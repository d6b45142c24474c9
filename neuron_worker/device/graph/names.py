"""How checkpoints name their tensors, one table per family. Matrices are [out, in], or [in, out] where transposed."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import Family


@dataclass(frozen=True)
class TensorNames:
    """Names inside a layer follow `layer`; a matrix adds ".weight" and ".bias", a norm too."""

    prefix: str  # left out by checkpoints of the base model
    embedding: str
    positions: str
    norm: str
    head: str
    layer: str  # with a place for its number
    attention_norm: str
    qkv: tuple[str, ...]  # stacked by rows
    query_norm: str
    key_norm: str
    output: str
    mlp_norm: str
    up: tuple[str, ...]  # the gate first
    down: str
    transposed: bool


NAMES: dict[Family, TensorNames] = {
    "llama": TensorNames(
        prefix="model.",
        embedding="model.embed_tokens",
        positions="",
        norm="model.norm",
        head="lm_head",
        layer="model.layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        output="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        transposed=False,
    ),
    "gpt2": TensorNames(
        prefix="transformer.",
        embedding="transformer.wte",
        positions="transformer.wpe",
        norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        query_norm="",
        key_norm="",
        output="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        transposed=True,
    ),
}
