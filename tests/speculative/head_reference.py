"""The EAGLE-1 head in float64 NumPy, one entry at a time, written from the published description alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class HeadReference:
    """Holds the keys and values of the entries read so far; `read` appends one and gives its feature."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        self.config, self.weights = config, weights
        self.keys: list[Array] = []  # [kv heads, D] each
        self.values: list[Array] = []

    def copy(self) -> HeadReference:
        other = HeadReference(self.config, self.weights)
        other.keys, other.values = list(self.keys), list(self.values)
        return other

    def read(self, embedding: Array, feature: Array) -> Array:
        config, position = self.config, len(self.keys)  # the first entry is that of sequence position 1
        num_heads, num_kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        x = self.weights["fc.weight"] @ np.concatenate([embedding, feature])
        query = self._rotated(self._linear("self_attn.q_proj", x).reshape(num_heads, size), position)
        self.keys.append(self._rotated(self._linear("self_attn.k_proj", x).reshape(num_kv, size), position))
        self.values.append(self._linear("self_attn.v_proj", x).reshape(num_kv, size))
        mixed = []
        for head in range(num_heads):
            kv = head // (num_heads // num_kv)
            scores = np.array([query[head] @ key[kv] for key in self.keys]) / np.sqrt(size)
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            mixed.append(sum(share * value[kv] for share, value in zip(shares, self.values, strict=True)))
        x = x + self._linear("self_attn.o_proj", np.concatenate(mixed))
        y = (
            x
            / np.sqrt((x * x).mean() + config["rms_norm_eps"])
            * self.weights["layers.0.post_attention_layernorm.weight"]
        )
        gate = self._linear("mlp.gate_proj", y)
        inner = gate / (1 + np.exp(-gate)) * self._linear("mlp.up_proj", y)
        made: Array = x + self._linear("mlp.down_proj", inner)
        return made

    def _linear(self, name: str, x: Array) -> Array:
        made: Array = self.weights[f"layers.0.{name}.weight"] @ x
        return made

    def _rotated(self, heads: Array, position: int) -> Array:
        half = heads.shape[-1] // 2
        angles = position * self.config["rope_theta"] ** (-np.arange(half) / half)
        left, right = heads[:, :half], heads[:, half:]
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate([left * cosines - right * sines, right * cosines + left * sines], axis=-1)
