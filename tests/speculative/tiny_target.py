"""A tiny instruct model: random weights, a tokenizer of bytes, a chat template. Made in a second."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def tiny_target(directory: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(
        models.BPE(vocab={"<s>": 0, "</s>": 1, **{c: n + 2 for n, c in enumerate(alphabet)}}, merges=[])
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # so that the next token is not the same everywhere
        model.lm_head.weight.mul_(20)
    model.to(torch.float32).save_pretrained(directory)
    return directory


def some_data(path: Path, rows: int = 12) -> Path:
    chats = [{"messages": [{"role": "user", "content": f"tell me about number {n}"}]} for n in range(rows)]
    text = {"text": " ".join(f"w{n}" for n in range(90))}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*chats, text]))
    return path
