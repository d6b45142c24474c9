"""The published form of an EAGLE-1 head: its files' names, keys and conventions, in one place.

A head belongs to a target with hidden size H and vocabulary V. It reads an *entry* per sequence position p >= 1:

    entry at p   = (embedding of token p, feature of position p - 1)
    feature of q = the target's last hidden state at q, after its final norm: what its lm_head reads
    x            = fc [embedding; feature]                  fc.weight [H, 2H], the embedding's half first
    x            = x + attention(x)                         no norm before it; causal over the entries
    g            = x + mlp(post_attention_layernorm(x))     the head's own feature of position p
    logits       = lm_head(g)                               no norm before it; of token p + 1

To draft on, g is the feature of the next entry. Embeddings and lm_head are the target's and are not in the file. The
rotary position of the entry at p is p - 1 as published; adding a constant to all of them changes nothing, so a device
may as well use p, for all entries alike.

With a reduced draft vocabulary of D tokens, the logits are those of D rows of the target's lm_head, and the file holds
the map as EAGLE-3 has it: `d2t` [D] int64, token of row i is i + d2t[i], and `t2d` [V] bool, true for those tokens.

Pure: numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIG, WEIGHTS = "config.json", "model.safetensors"

IS_EAGLE, BIAS, DRAFT_VOCAB = "is_eagle", "bias", "draft_vocab_size"
"""Keys of config.json beside those of a Llama. `bias` is that of fc, true where it is not given."""

FC, D2T, T2D = "fc.weight", "d2t", "t2d"
LAYER = "layers.0."

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1}


def head_config(sizes: Mapping[str, Any], draft_vocab: int | None) -> dict[str, Any]:
    """config.json of a head. `sizes` are a Llama's keys for its one layer, and its vocabulary's size."""
    config = {**_LLAMA, **sizes, IS_EAGLE: True, BIAS: False, "torch_dtype": "bfloat16"}
    return config if draft_vocab is None else {**config, DRAFT_VOCAB: draft_vocab}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the file, and their shapes, by config.json."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    found: dict[str, tuple[int, ...]] = {FC: (hidden, 2 * hidden)}
    found |= {
        f"{LAYER}self_attn.q_proj.weight": (queries, hidden),
        f"{LAYER}self_attn.k_proj.weight": (keys, hidden),
        f"{LAYER}self_attn.v_proj.weight": (keys, hidden),
        f"{LAYER}self_attn.o_proj.weight": (hidden, queries),
        f"{LAYER}mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}mlp.down_proj.weight": (hidden, inner),
        f"{LAYER}post_attention_layernorm.weight": (hidden,),
    }
    if DRAFT_VOCAB in config:
        found |= {D2T: (config[DRAFT_VOCAB],), T2D: (config["vocab_size"],)}
    return found


def vocabulary_map(tokens: Sequence[int], vocab: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """`d2t` and `t2d` of a draft vocabulary; its rows are the tokens in ascending order."""
    kept = np.array(sorted(set(tokens)), dtype=np.int64)
    if len(kept) and not 0 <= kept[0] <= kept[-1] < vocab:
        raise ValueError(f"draft vocabulary has token {kept[-1]}, the target's vocabulary has {vocab}")
    t2d = np.zeros(vocab, dtype=np.bool_)
    t2d[kept] = True
    return kept - np.arange(len(kept)), t2d


def draft_tokens(d2t: NDArray[np.int64]) -> NDArray[np.int64]:
    """The token of each row of the reduced lm_head."""
    return np.arange(len(d2t)) + d2t


def misfits(config: Mapping[str, Any], found: Mapping[str, Sequence[int]]) -> list[str]:
    """One line for each tensor that is missing, not known or of another shape than config.json makes it."""
    wanted = shapes(config)
    lines = [f"{name} is missing" for name in wanted if name not in found]
    lines += [f"{name} is not part of an EAGLE-1 head" for name in found if name not in wanted]
    return lines + [
        f"{name} is {list(found[name])}, config.json makes it {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
