"""Tiny EAGLE heads with random weights, in the published forms; and what they draft, in float64 by NumPy alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from .models import VOCABULARY, Reference

Array = np.ndarray

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "rms_norm_eps": 1e-5}
REDUCED = sorted({(7 * i) % VOCABULARY for i in range(70)})
"""Tokens of a reduced draft vocabulary."""


@dataclass(frozen=True)
class Head:
    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Array]  # float64
    target: Reference
    tokens: Sequence[int] | None  # the reduced vocabulary

    def drafts(self, tokens: list[int], count: int, shift: int = 0, first: int = 1) -> list[int]:
        """What follows `tokens`. A correct head has `shift` 0, entries read the position before theirs, and `first`
        1, the first token has no entry."""
        spec = REFERENCES[self.form](self, tokens)
        made: list[int] = []
        keys: list[Array] = []
        values: list[Array] = []
        feature = np.zeros(self.hidden)
        for position in range(first, len(tokens) + count - 1):
            is_known = position < len(tokens)
            if is_known:
                at = position - 1 - shift
                feature = spec.features[at] if at >= 0 else np.zeros(self.hidden)
            token = tokens[position] if is_known else made[-1]
            feature, logits = spec.entry(token, feature, position, keys, values)
            if position >= len(tokens) - 1:
                best = int(logits.argmax())
                made.append(best if self.tokens is None else self.tokens[best])
        return made

    @property
    def form(self) -> str:
        return "eagle3" if "Eagle3" in self.config["architectures"][0] else "eagle"

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])


class Layer:
    """One layer of a head; entries come one by one, and append their key and value."""

    def __init__(self, head: Head, at: str, features: Array, targets_head: Array) -> None:
        self.w = dict(head.tensors)
        self.at = at
        self.features = features
        self.head_rows = targets_head
        self.heads, self.kv_heads = head.config["num_attention_heads"], head.config["num_key_value_heads"]
        self.size = head.config.get("head_dim", head.hidden // self.heads)
        self.epsilon = head.config["rms_norm_eps"]
        self.theta = head.config.get("rope_theta", 10000.0)

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean() + self.epsilon) * self.w[name]

    def attend(self, read: Array, position: int, keys: list[Array], values: list[Array]) -> Array:
        q, k, v = (self.w[f"{self.at}self_attn.{name}_proj.weight"] @ read for name in "qkv")
        keys.append(self.turned(k.reshape(self.kv_heads, -1), position))
        values.append(v.reshape(self.kv_heads, -1))
        mixed = []
        for index, query in enumerate(self.turned(q.reshape(self.heads, -1), position)):
            group = index // (self.heads // self.kv_heads)
            scores = np.array([key[group] @ query for key in keys]) / np.sqrt(self.size)
            weights = np.exp(scores - scores.max())
            mixed.append(sum(w * value[group] for w, value in zip(weights / weights.sum(), values, strict=True)))
        return self.w[f"{self.at}self_attn.o_proj.weight"] @ np.concatenate(mixed)

    def turned(self, heads: Array, position: int) -> Array:
        """As published, where the entry of the token at 1 has position 0."""
        half = self.size // 2
        angles = (position - 1) * self.theta ** (-np.arange(half) / half)
        left, right = heads[:, :half], heads[:, half:]
        return np.concatenate(
            [left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)], axis=1
        )

    def mlp(self, x: Array) -> Array:
        y = self.norm(x, f"{self.at}post_attention_layernorm.weight")
        gate, up = (self.w[f"{self.at}mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return self.w[f"{self.at}mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)


class Eagle(Layer):
    def entry(
        self, token: int, feature: Array, position: int, keys: list[Array], values: list[Array]
    ) -> tuple[Array, Array]:
        x = self.w["fc.weight"] @ np.concatenate([self.w["embed"][token], feature]) + self.w.get("fc.bias", 0)
        name = f"{self.at}input_layernorm.weight"
        x = x + self.attend(self.norm(x, name) if name in self.w else x, position, keys, values)
        x = x + self.mlp(x)
        return x, self.head_rows @ x


class Eagle3(Layer):
    def entry(
        self, token: int, feature: Array, position: int, keys: list[Array], values: list[Array]
    ) -> tuple[Array, Array]:
        embedded = self.norm(self.w["embed"][token], f"{self.at}input_layernorm.weight")
        normed = self.norm(feature, f"{self.at}hidden_norm.weight")
        base = normed if self.w["before"] else feature
        x = base + self.attend(np.concatenate([embedded, normed]), position, keys, values)
        x = x + self.mlp(x)
        return x, self.w["lm_head.weight"] @ self.norm(x, "norm.weight")


def _eagle(head: Head, tokens: list[int]) -> Eagle:
    with torch.no_grad():
        features = head.target.model.base_model(torch.tensor([tokens])).last_hidden_state[0].double().numpy()
    rows = head.target.model.get_output_embeddings().weight.detach().double().numpy()
    made = Eagle(head, "layers.0.", features, rows if head.tokens is None else rows[list(head.tokens)])
    embeddings = head.target.model.get_input_embeddings().weight.detach().double().numpy()
    made.w["embed"] = made.w.get("embed_tokens.weight", embeddings)
    return made


def _eagle3(head: Head, tokens: list[int]) -> Eagle3:
    with torch.no_grad():
        states = head.target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    taps = head.config["eagle_aux_hidden_state_layer_ids"]  # but for the last, which transformers gives normed
    joined = torch.cat([states[layer][0] for layer in taps], dim=1).double().numpy()
    made = Eagle3(head, "midlayer.", joined @ head.tensors["fc.weight"].T, np.zeros(0))
    embeddings = head.target.model.get_input_embeddings().weight.detach().double().numpy()
    made.w["embed"], made.w["before"] = embeddings, head.config.get("norm_before_residual", False)
    return made


REFERENCES: dict[str, Callable[[Head, list[int]], Any]] = {"eagle": _eagle, "eagle3": _eagle3}


def make_head(
    directory: Path,
    target: Reference,
    form: str = "eagle",
    *,
    tokens: Sequence[int] | None = None,
    prefix: str = "",
    bias: bool = False,
    input_norm: bool = False,
    own_embedding: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,
) -> Head:
    """A head for the target, saved in `directory`. Its numbers are large enough for every part to count."""
    hidden, vocab = target.model.config.hidden_size, target.model.config.vocab_size
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if form == "eagle3" else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "max_position_embeddings": 96,
        **SIZES,
        **config,
    }
    if form == "eagle":
        config["is_eagle"] = True
    if tokens is not None or form == "eagle3":
        config["draft_vocab_size"] = vocab if tokens is None else len(tokens)
    shapes = _shapes(config, form, bias=bias, input_norm=input_norm, own_embedding=own_embedding)
    generator = torch.Generator().manual_seed(seed + len(form))
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else 1.5 * shape[1] ** -0.5)
        tensors[name] = (values + 1.0 if name.endswith("norm.weight") else values).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    saved = {name if name == "lm_head.weight" else prefix + name: values for name, values in tensors.items()}
    if tokens is not None:
        ids = torch.tensor(tokens)
        saved["d2t"] = ids - torch.arange(len(tokens))
        saved["t2d"] = torch.isin(torch.arange(vocab), ids)
    save_file(saved, directory / "model.safetensors")
    return Head(directory, config, {name: values.double().numpy() for name, values in tensors.items()}, target, tokens)


def _shapes(
    config: dict[str, Any], form: str, *, bias: bool, input_norm: bool, own_embedding: bool
) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    at, inputs = ("midlayer.", 2 * hidden) if form == "eagle3" else ("layers.0.", hidden)
    fc_inputs = hidden * (len(config["eagle_aux_hidden_state_layer_ids"]) if form == "eagle3" else 2)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, fc_inputs),
        f"{at}self_attn.q_proj.weight": (queries, inputs),
        f"{at}self_attn.k_proj.weight": (keys, inputs),
        f"{at}self_attn.v_proj.weight": (keys, inputs),
        f"{at}self_attn.o_proj.weight": (hidden, queries),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
        f"{at}post_attention_layernorm.weight": (hidden,),
    }
    if form == "eagle3":
        shapes |= {f"{at}input_layernorm.weight": (hidden,), f"{at}hidden_norm.weight": (hidden,)}
        shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config["draft_vocab_size"], hidden)}
    if bias:
        shapes["fc.bias"] = (hidden,)
    if input_norm:
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
    if own_embedding:
        shapes["embed_tokens.weight"] = (config["vocab_size"], hidden)
    return shapes
