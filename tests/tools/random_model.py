"""A model directory with weights drawn from a seed and a real tokenizer: quick to make, quick to serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from neuronserve.speculative import eagle_form

LLAMA_8B_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}


def random_llama(directory: Path, tokenizer_from: Path, **changes: Any) -> Path:
    """Two layers with the head counts of Llama 3.1 8B and the tokenizer, chat template and all, of another model."""
    config = LlamaConfig(
        vocab_size=49152,
        intermediate_size=512,
        num_hidden_layers=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        **{"hidden_size": 256, **LLAMA_8B_HEADS, **changes},
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, directory)
    return directory


def random_eagle_head(directory: Path, target: Path, draft_vocab: int | None = None) -> Path:
    """Of the published form, for the model in `target`; the first `draft_vocab` tokens alone are drafted."""
    config = eagle_form.head_config(_sizes_of(target), draft_vocab)
    return _head(directory, config, eagle_form.shapes(config), draft_vocab)


def random_eagle3_head(directory: Path, target: Path, draft_vocab: int, layers: tuple[int, int, int]) -> Path:
    """Of EAGLE-3's form, which reads the inputs of three layers and has an lm_head of its own."""
    sizes = _sizes_of(target)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **sizes,
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    hidden, inner, at = sizes["hidden_size"], sizes["intermediate_size"], "midlayer."
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        f"{at}self_attn.q_proj.weight": (hidden, 2 * hidden),
        f"{at}self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{at}self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{at}self_attn.o_proj.weight": (hidden, hidden),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
        f"{at}input_layernorm.weight": (hidden,),
        f"{at}hidden_norm.weight": (hidden,),
        f"{at}post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    return _head(directory, config, shapes, draft_vocab)


def _sizes_of(target: Path) -> dict[str, Any]:
    of_model = json.loads((target / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    names = (*names, "max_position_embeddings", "rope_theta", "rms_norm_eps")
    return {name: of_model[name] for name in names if name in of_model}


def _head(
    directory: Path, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], draft_vocab: int | None
) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    if draft_vocab is not None:
        d2t, t2d = eagle_form.vocabulary_map(range(draft_vocab), config["vocab_size"])
        tensors |= {eagle_form.D2T: torch.from_numpy(d2t), eagle_form.T2D: torch.from_numpy(t2d)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / eagle_form.WEIGHTS)
    (directory / eagle_form.CONFIG).write_text(json.dumps(config))
    return directory
