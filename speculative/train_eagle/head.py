"""The EAGLE-1 head as a torch module, whose parameters have the published names; see `speculative.eagle_form`.

`EagleHead.forward` is one *round* over whole sequences. Round 1 reads the target's features. Round r reads the features
that round r - 1 made, and attends as drafting would at depth r: to the first round's keys up to r - 1 positions back,
and to one key of each later round after that. So the head learns on its own mistakes (training-time test, as HASS,
Zhang et al. 2024, and EAGLE-3, Li et al. 2025, do it).

The entries of prompts are read once, for their keys and values (`EagleHead.read`): the head has one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Rounds:
    """What later entries attend to. Filled by `EagleHead`; rows lie end to end, with C context entries and E entries in
    all, G key heads."""

    contexts: Sequence[int]  # of each row
    entries: Sequence[int]
    positions: Tensor  # [E], rotary ones: a row's entries follow its context
    context_keys: Tensor  # [G, C, D]
    context_values: Tensor
    keys: list[Tensor] = field(default_factory=list)  # of each round so far, [G, E, D]
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

    def read(self, embeddings: Tensor, features: Tensor, contexts: Sequence[int], entries: Sequence[int]) -> Rounds:
        """The context's entries, [C, H] each. Only their keys and values are ever looked at."""
        x = self.fc(torch.cat([embeddings, features], dim=-1))
        before = torch.cat([torch.arange(count, device=x.device) for count in contexts])
        after = [
            torch.arange(start, start + count, device=x.device) for start, count in zip(contexts, entries, strict=True)
        ]
        return Rounds(contexts, entries, torch.cat(after), *self.layer.self_attn.read(x, before))

    def forward(self, embeddings: Tensor, features: Tensor, rounds: Rounds) -> Tensor:
        """The next round: of the entries' tokens and of the positions before them, each [E, H] as the result is."""
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
        hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
        num_kv_heads = config["num_key_value_heads"]
        self.size = config.get("head_dim") or hidden // num_heads
        self.theta = config.get("rope_theta", 10000.0)
        self.q_proj = nn.Linear(hidden, num_heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, num_kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, num_kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(num_heads * self.size, hidden, bias=False)

    def read(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [G, entries, D]."""
        return self._rotated(self._heads(self.k_proj(x)), positions), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rounds: Rounds) -> Tensor:
        queries = self._rotated(self._heads(self.q_proj(x)), rounds.positions)
        keys, values = self.read(x, rounds.positions)
        rounds.keys.append(keys)
        rounds.values.append(values)
        mixed = attend(queries, rounds)  # [N, E, D]
        made: Tensor = self.o_proj(mixed.transpose(0, 1).reshape(len(x), -1))
        return made

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.size).transpose(0, 1)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """An entry has the same position in every round."""
        powers = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size
        angles = torch.outer(positions.float(), self.theta**-powers)  # [E, D / 2]
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)


def attend(queries: Tensor, rounds: Rounds) -> Tensor:
    """Queries [N, E, D] of the newest round r: to round 1 up to r - 1 back, to round s at r - s back. Row by row."""

    def of_rows(values: Sequence[Tensor], counts: Sequence[int]) -> list[tuple[Tensor, ...]]:
        return list(zip(*(torch.split(value, list(counts), dim=1) for value in values), strict=True))

    contexts = of_rows((rounds.context_keys, rounds.context_values), rounds.contexts)
    entries = of_rows((queries, *rounds.keys, *rounds.values), rounds.entries)
    depth = len(rounds.keys)
    made = [
        _attend_in_row(own[0], context, own[1 : 1 + depth], own[1 + depth :])
        for context, own in zip(contexts, entries, strict=True)
    ]
    return torch.cat(made, dim=1)


def _attend_in_row(
    queries: Tensor, context: tuple[Tensor, ...], keys: tuple[Tensor, ...], values: tuple[Tensor, ...]
) -> Tensor:
    """One row: queries [N, E, D], its context's keys and values, and those of each round."""
    depth, length = len(keys), queries.shape[1]
    num_contexts, group = context[0].shape[1], len(queries) // len(keys[0])
    scaled = queries.contiguous() * queries.shape[2] ** -0.5  # as it lies, products by it are tens of times slower

    def shared(x: Tensor) -> Tensor:
        """By the query heads of a group."""
        return x.repeat_interleave(group, 0)

    first = [shared(torch.cat([before, own], dim=1)) for before, own in zip(context, (keys[0], values[0]), strict=True)]
    unseen = torch.ones(length, num_contexts + length, dtype=torch.bool, device=queries.device)
    unseen = unseen.triu(num_contexts + 2 - depth)
    scores = [(scaled @ first[0].transpose(-1, -2)).masked_fill(unseen, -torch.inf)]
    later = [
        (shared(_back(key, back)), shared(_back(value, back)))
        for key, value, back in zip(keys[1:], values[1:], range(depth - 2, -1, -1), strict=True)
    ]
    scores += [(scaled * key).sum(-1, keepdim=True) for key, _ in later]
    weights = torch.cat(scores, dim=-1).float().softmax(-1).to(queries.dtype)  # [N, E, C + E + r - 1]
    known = num_contexts + length
    mixed = weights[..., :known] @ first[1]
    for index, (_, value) in enumerate(later):
        mixed = mixed + weights[..., known + index, None] * value
    return mixed


def _back(x: Tensor, count: int) -> Tensor:
    """Each entry's value `count` entries earlier; the first ones, which have none, get zeros."""
    return functional.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :]
