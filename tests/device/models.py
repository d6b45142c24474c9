"""Tiny models with random weights, one per thing a graph can get wrong, made by transformers: the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 160
LONGEST = 96  # positions every model here has

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": LONGEST, "n_embd": 32, "n_layer": 2, "n_head": 4}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama-tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-mqa": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 1}),
    "llama-mha": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 4}),
    "llama-odd": lambda: LlamaConfig(
        **{**_SIZES, "hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 37}
    ),
    "llama-head-dim": lambda: LlamaConfig(**_SIZES, head_dim=12),
    "llama-biases": lambda: LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "llama-gelu": lambda: LlamaConfig(**_SIZES, hidden_act="gelu"),
    "llama3-rope": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_LLAMA3_ROPE)),
    "llama-linear-rope": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    ),
    "mistral-window": lambda: MistralConfig(**_SIZES, sliding_window=7),
    "mistral-whole": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2-window": lambda: Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "gpt2": lambda: GPT2Config(**_GPT2),
    "gpt2-scales": lambda: GPT2Config(
        **_GPT2, n_inner=40, scale_attn_by_inverse_layer_idx=True, activation_function="gelu"
    ),
}


@dataclass(frozen=True)
class Reference:
    """A saved model, and what transformers says of it."""

    directory: Path
    model: PreTrainedModel

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[tokens, vocabulary], float32"""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].float().numpy()


def make(name: str, directory: Path, *, vocab_size: int = VOCABULARY, **save: object) -> Reference:
    """The model called `name`, saved in `directory`, with weights that make every part of it count."""
    torch.manual_seed(len(name))
    config = CONFIGS[name]()
    config.vocab_size = vocab_size
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms start at 1 and biases at 0 otherwise, and a mistake in them would not show.
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
    model.tie_weights()
    model.save_pretrained(directory, **save)
    return Reference(directory, model)


def random_tokens(count: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCABULARY) for i in range(count)]
