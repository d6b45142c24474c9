"""The EAGLE-1 head as a torch module, whose parameters have the published names; see `speculative.eagle_form`.

`EagleHead.forward` is one *round* over whole sequences. Round 1 reads the target's features. Round r reads the features
that round r - 1 made, and attends as drafting would at depth r: to the first round's keys up to r - 1 positions back,
and to one key of each later round after that. So the head learns on its own mistakes (training-time test, as HASS,
Zhang et al. 2024, and EAGLE-3, Li et al. 2025, do it).

The entries of prompts are read once, for their keys and values (`EagleHead.read`): the head has one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Rounds:
    """What later entries attend to. Filled by `EagleHead`; B rows, G key heads, C context entries, E entries."""

    context_real: Tensor  # [B, C] bool
    context_keys: Tensor  # [B, G, C, D]
    context_values: Tensor
    keys: list[Tensor] = field(default_factory=list)  # of each round so far, [B, G, E, D]
    values: list[Tensor] = field(default_factory=list)


class EagleHead(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])

    @property
    def layer(self) -> _Layer:
        return cast(_Layer, self.layers[0])

    def read(self, embeddings: Tensor, features: Tensor, context_real: Tensor) -> Rounds:
        """The context's entries, [B, C, H] each. Only their keys and values are ever looked at."""
        x = self.fc(torch.cat([embeddings, features], dim=-1))
        return Rounds(context_real, *self.layer.self_attn.read(x, start=0))

    def forward(self, embeddings: Tensor, features: Tensor, rounds: Rounds) -> Tensor:
        """The next round: of the entries' tokens and of the positions before them, each [B, E, H] as the result is."""
        return self.layer.forward(self.fc(torch.cat([embeddings, features], dim=-1)), rounds)


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.mlp = _Mlp(config["hidden_size"], config["intermediate_size"])

    def forward(self, x: Tensor, rounds: Rounds) -> Tensor:
        x = x + self.self_attn.forward(x, rounds)
        return x + self.mlp.forward(self.post_attention_layernorm(x.float()))


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class _Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.num_heads = config["hidden_size"], config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.size = config.get("head_dim") or hidden // self.num_heads
        self.theta = config.get("rope_theta", 10000.0)
        self.q_proj = nn.Linear(hidden, self.num_heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.size, hidden, bias=False)

    def read(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values of entries whose rotary positions begin at `start`."""
        keys = self._rotated(self._heads(self.k_proj(x), self.num_kv_heads), start)
        return keys, self._heads(self.v_proj(x), self.num_kv_heads)

    def forward(self, x: Tensor, rounds: Rounds) -> Tensor:
        start = rounds.context_real.shape[1]
        queries = self._rotated(self._heads(self.q_proj(x), self.num_heads), start)
        keys, values = self.read(x, start)
        rounds.keys.append(keys)
        rounds.values.append(values)
        mixed = attend(queries, rounds)  # [B, N, E, D]
        made: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
        return made

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:2], count, self.size).transpose(1, 2)

    def _rotated(self, x: Tensor, start: int) -> Tensor:
        """By positions from `start`: an entry has the same one in every round."""
        powers = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size
        positions = torch.arange(start, start + x.shape[2], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.theta**-powers)  # [E, D / 2]
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)


def attend(queries: Tensor, rounds: Rounds) -> Tensor:
    """Queries [B, N, E, D] of the newest round r: to round 1 up to r - 1 back, to round s at r - s back."""
    depth, length = len(rounds.keys), queries.shape[2]
    group, scale = queries.shape[1] // rounds.keys[0].shape[1], queries.shape[3] ** -0.5
    keys = torch.cat([rounds.context_keys, rounds.keys[0]], dim=2).repeat_interleave(group, 1)  # [B, N, C + E, D]
    values = torch.cat([rounds.context_values, rounds.values[0]], dim=2).repeat_interleave(group, 1)
    seen = _seen(rounds.context_real, length, depth)
    if depth == 1:
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
    scores = [(queries @ keys.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)]
    later = [
        (_back(key, back).repeat_interleave(group, 1), _back(value, back).repeat_interleave(group, 1))
        for key, value, back in zip(rounds.keys[1:], rounds.values[1:], range(depth - 2, -1, -1), strict=True)
    ]
    scores += [(queries * key).sum(-1, keepdim=True) * scale for key, _ in later]
    weights = torch.cat(scores, dim=-1).float().softmax(-1).to(queries.dtype)  # [B, N, E, C + E + r - 1]
    mixed = weights[..., : keys.shape[2]] @ values
    for index, (_, value) in enumerate(later):
        mixed = mixed + weights[..., keys.shape[2] + index, None] * value
    return mixed


def _seen(context_real: Tensor, length: int, depth: int) -> Tensor:
    """[B, 1, E, C + E]: which of the first round's entries each entry of round `depth` attends to."""
    batch, contexts = context_real.shape
    entries = torch.ones(length, length, dtype=torch.bool, device=context_real.device).tril(1 - depth)
    parts = [
        context_real[:, None, None, :].expand(batch, 1, length, contexts),
        entries.expand(batch, 1, length, length),
    ]
    return torch.cat(parts, dim=-1)


def _back(x: Tensor, count: int) -> Tensor:
    """Each entry's value `count` entries earlier; the first ones, which have none, get zeros."""
    return functional.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :]
