"""A tiny model directory: config.json and a word-level tokenizer, no weights unless the test writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_8B_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
SMOLLM2_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
VOCAB_SIZE = 64


def tiny_model(directory: Path, **changes: Any) -> str:
    """A Llama of two layers; `changes` go into its config.json."""
    heads = {**LLAMA_8B_HEADS, **changes}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * heads["num_attention_heads"],
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **heads,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    _write_tokenizer(directory)
    return str(directory)


def _write_tokenizer(directory: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, VOCAB_SIZE))]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, word in enumerate(words[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))
