"""A Llama of two layers with random weights, written with numpy alone: a model for checks where none is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

VOCABULARY, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS, POSITIONS = 256, 64, 8, 4, 128, 2, 512
HEAD_DIM = HIDDEN // HEADS

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(directory: Path) -> str:
    """config.json and model.safetensors; the same bytes every time."""
    random = np.random.default_rng(7)
    tensors = {
        name: (random.standard_normal(shape) * 0.2 + (1.0 if len(shape) == 1 else 0.0)).astype("<f4")
        for name, shape in _shapes().items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
    return str(directory)


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{name}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
