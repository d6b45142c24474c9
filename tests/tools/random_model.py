"""A model directory with weights drawn from a seed and a real tokenizer: quick to make, quick to serve."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA_8B_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}


def random_llama(directory: Path, tokenizer_from: Path, **changes: Any) -> Path:
    """Two layers with the head counts of Llama 3.1 8B and the tokenizer, chat template and all, of another model."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        **{**LLAMA_8B_HEADS, **changes},
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, directory)
    return directory
