"""A model directory with weights drawn from a seed and a real tokenizer: quick to make, quick to serve."""

from __future__ import annotations

import json
import shutil
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
    of_model = json.loads((target / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    names = (*names, "max_position_embeddings", "rope_theta", "rms_norm_eps")
    config = eagle_form.head_config({name: of_model[name] for name in names if name in of_model}, draft_vocab)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        for name, shape in eagle_form.shapes(config).items()
    }
    if draft_vocab is not None:
        d2t, t2d = eagle_form.vocabulary_map(range(draft_vocab), of_model["vocab_size"])
        tensors |= {eagle_form.D2T: torch.from_numpy(d2t), eagle_form.T2D: torch.from_numpy(t2d)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / eagle_form.WEIGHTS)
    (directory / eagle_form.CONFIG).write_text(json.dumps(config))
    return directory
