"""The graph's verbs on torch tensors: the reference executor, and what a chip's compiler traces.

Every shape is fixed by the batch's arrays, and no branch depends on their values: padding is computed and masked,
and its keys and values go to the scratch block. Compute is float32 whatever the weights are stored in.
Knows no checkpoint and no plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from .ops import Activation, AttentionForm, LinearWeight, NormWeight
from .quantize import ACTIVATION_BLOCK, quantize_activations
from .torch_packer import PackedMatrix
from .torch_sampling import SamplingTensors, greedy_tokens, sampled_tokens, score_targets

_SCORED_AT_ONCE = 64  # prompt positions whose logits exist at one time


@dataclass(frozen=True)
class KvCache:
    """Per layer, [num_blocks, block_size, kv_heads, head_dim]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[1]


@dataclass(frozen=True)
class DecodeTensors:
    """`base.DecodePart` as int64 tensors."""

    tokens: Tensor  # [R, W]
    positions: Tensor  # [R]
    lengths: Tensor  # [R]
    blocks: Tensor  # [R, C]


@dataclass(frozen=True)
class PrefillTensors:
    """`base.PrefillPart` as int64 tensors."""

    tokens: Tensor  # [T]
    starts: Tensor  # [P]
    lengths: Tensor  # [P]
    positions: Tensor  # [P]
    blocks: Tensor  # [P, C]
    targets: Tensor  # [T]


@dataclass(frozen=True)
class TorchBatch:
    """One step's inputs. What is not a tensor here is part of the graph, not of its input."""

    decode: DecodeTensors | None
    prefill: PrefillTensors | None
    sampling: SamplingTensors | None  # per selected row; None: all greedy
    num_top: int | None = None  # alternatives per scored prompt position; None: no scores


@dataclass(frozen=True)
class Places:
    """Where the step's tokens are, decode tokens first. Padding is at position 0 of the scratch block."""

    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens], block * block_size + offset
    owners: Tensor  # [T], the prompt each prefill token belongs to


class TorchOps:
    """One step. After `decoder.decode_step`, the results are in `tokens`, `logits` and `scores`."""

    def __init__(
        self, batch: TorchBatch, cache: KvCache, features: Tensor | None = None, carried: Tensor | None = None
    ) -> None:
        """`features` [num_blocks, block_size, width], and `carried` from a draft's round before."""
        self._batch = batch
        self._cache = cache
        self._features = features
        self.carried = carried
        self._places = _places(batch, cache.block_size)
        self._num_decode = batch.decode.tokens.numel() if batch.decode is not None else 0
        self.tokens: Tensor  # [R * W + P]
        self.logits: Tensor  # [R * W + P, vocabulary]
        self.scores: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # of prefill tokens

    def embed(self, table: Tensor, position_table: Tensor | None = None) -> Tensor:
        x = table[self._places.tokens].float()
        return x if position_table is None else x + position_table[self._places.positions].float()

    def norm(self, x: Tensor, weight: NormWeight) -> Tensor:
        if weight.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], weight.weight, weight.bias, weight.epsilon)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + weight.epsilon)
        normed: Tensor = weight.weight * (x * scale)
        return normed

    def linear(
        self, x: Tensor, weight: LinearWeight, *, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        packed: PackedMatrix = weight.packed
        y = _int8_product(x, packed.values) if packed.rounds_input else F.linear(x, packed.values.float())
        if packed.scales is not None:
            y = y * packed.scales
        if weight.bias is not None:
            y = y + weight.bias
        if activation is not None:
            y = _activate(y, activation)
        return y if residual is None else residual + y

    def head_norm(self, qkv: Tensor, form: AttentionForm, query: NormWeight, key: NormWeight) -> Tensor:
        q, k, v = _heads(qkv, form)
        return torch.cat([self.norm(q, query).flatten(1), self.norm(k, key).flatten(1), v.flatten(1)], dim=1)

    def rope(self, qkv: Tensor, form: AttentionForm, table: Tensor) -> Tensor:
        cosines, sines = table[self._places.positions][:, None, :].chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]
        q, k, v = _heads(qkv, form)
        turned = (_turn(q, cosines, sines), _turn(k, cosines, sines), v)
        return torch.cat([heads.flatten(1) for heads in turned], dim=1)

    def attend(self, qkv: Tensor, layer: int, form: AttentionForm) -> Tensor:
        q, k, v = _heads(qkv, form)
        keys, values = self._store(layer, k, v)
        positions = self._places.positions
        outputs = []
        if self._batch.decode is not None:
            outputs.append(
                self._attend_decode(q[: self._num_decode], positions[: self._num_decode], keys, values, form)
            )
        if self._batch.prefill is not None:
            outputs.append(
                self._attend_prefill(q[self._num_decode :], positions[self._num_decode :], keys, values, form)
            )
        return torch.cat(outputs)

    def select(self, x: Tensor) -> Tensor:
        rows = [torch.arange(self._num_decode, device=x.device)]
        if self._batch.prefill is not None:
            prefill = self._batch.prefill
            rows.append(self._num_decode + (prefill.starts + prefill.lengths - 1).clamp(min=0))
        return x[torch.cat(rows)]

    def finish(self, x: Tensor, hidden: Tensor | None, norm: NormWeight, head: LinearWeight) -> None:
        self.logits = self.linear(self.norm(x, norm), head)
        sampling = self._batch.sampling
        self.tokens = greedy_tokens(self.logits) if sampling is None else sampled_tokens(self.logits, sampling)
        if self._batch.num_top is not None and self._batch.prefill is not None:
            assert hidden is not None
            self.scores = self._score(hidden[self._num_decode :], norm, head, self._batch.prefill, self._batch.num_top)

    def keep(self, x: Tensor) -> None:
        assert self._features is not None
        self._features.flatten(0, 1).index_copy_(0, self._places.slots, x)

    def recall(self, width: int) -> Tensor:
        if self.carried is not None:
            return self.carried
        prompts, positions, features = self._batch.prefill, self._places.positions, self._features
        assert prompts is not None
        assert features is not None
        before = (positions - 1).clamp(min=0)
        size = features.shape[1]
        block = prompts.blocks[self._places.owners, before // size]
        found = features.flatten(0, 1)[block * size + before % size]
        return torch.where(positions[:, None] > 0, found, 0.0)

    def join(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([left, right], dim=1)

    def guess(self, x: Tensor, head: LinearWeight, token_ids: NDArray[np.int32] | None, carried: Tensor | None) -> None:
        found = greedy_tokens(self.linear(x, head))
        self.tokens = found if token_ids is None else as_index(token_ids)[found]
        self.carried = carried

    def _store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's cache with the step's tokens in it. Here it is written to; a chip's graph makes a new one."""
        cache = self._cache.keys[layer], self._cache.values[layer]
        for blocks, new in zip(cache, (keys, values), strict=True):
            blocks.flatten(0, 1).index_copy_(0, self._places.slots, new)
        return cache

    def _attend_decode(self, q: Tensor, positions: Tensor, keys: Tensor, values: Tensor, form: AttentionForm) -> Tensor:
        assert self._batch.decode is not None
        blocks = self._batch.decode.blocks
        num_rows = len(blocks)
        by_row = q.view(num_rows, -1, *q.shape[1:])  # [R, W, heads, head_dim]
        context = keys[blocks].flatten(1, 2), values[blocks].flatten(1, 2)  # [R, context, kv_heads, head_dim]
        return _attention(by_row, positions.view(num_rows, -1), *context, form).flatten(0, 1)

    def _attend_prefill(
        self, q: Tensor, positions: Tensor, keys: Tensor, values: Tensor, form: AttentionForm
    ) -> Tensor:
        """Every prompt's context answers every token, and each token takes its own prompt's answer: the shapes then
        do not depend on where prompts begin."""
        assert self._batch.prefill is not None
        result = torch.zeros(len(q), form.num_heads * form.head_dim, device=q.device)
        for prompt, blocks in enumerate(self._batch.prefill.blocks):
            context = keys[blocks].flatten(0, 1)[None], values[blocks].flatten(0, 1)[None]
            answer = _attention(q[None], positions[None], *context, form)[0]
            result = torch.where((self._places.owners == prompt)[:, None], answer, result)
        return result

    def _score(
        self, hidden: Tensor, norm: NormWeight, head: LinearWeight, prefill: PrefillTensors, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = -(-len(hidden) // _SCORED_AT_ONCE)
        slices = zip(hidden.chunk(count), prefill.targets.chunk(count), strict=True)
        pieces = [score_targets(self.linear(self.norm(rows, norm), head), wanted, num_top) for rows, wanted in slices]
        logprobs, ranks, ids, top_logprobs = (torch.cat(column) for column in zip(*pieces, strict=True))
        return logprobs, ranks, ids, top_logprobs


def _places(batch: TorchBatch, block_size: int) -> Places:
    tokens, positions, slots = [], [], []
    owners = torch.zeros(0, dtype=torch.int64)
    if batch.decode is not None:
        part = batch.decode
        column = torch.arange(part.tokens.shape[1], device=part.tokens.device)
        real = column < part.lengths[:, None]  # [R, W]
        at = torch.where(real, part.positions[:, None] + column, 0)
        block = torch.where(real, part.blocks.gather(1, at // block_size), 0)
        tokens.append(torch.where(real, part.tokens, 0).flatten())
        positions.append(at.flatten())
        slots.append((block * block_size + at % block_size).flatten())
    if batch.prefill is not None:
        prompts = batch.prefill
        place = torch.arange(len(prompts.tokens), device=prompts.tokens.device)[:, None]
        owned = (place >= prompts.starts) & (place < prompts.starts + prompts.lengths)  # [T, P]
        real = owned.any(dim=1)
        owners = (owned * torch.arange(owned.shape[1], device=place.device)).sum(dim=1)  # [T], one owner at most
        at = torch.where(real, prompts.positions[owners] + place[:, 0] - prompts.starts[owners], 0)
        block = torch.where(real, prompts.blocks[owners, at // block_size], 0)
        tokens.append(torch.where(real, prompts.tokens, 0))
        positions.append(at)
        slots.append(block * block_size + at % block_size)
    return Places(torch.cat(tokens), torch.cat(positions), torch.cat(slots), owners)


def _attention(q: Tensor, positions: Tensor, keys: Tensor, values: Tensor, form: AttentionForm) -> Tensor:
    """Causal attention of each row's tokens over its own context, whose entry i is position i.
    q [rows, tokens, heads, head_dim], keys and values [rows, context, kv_heads, head_dim]
    -> [rows, tokens, heads * head_dim]"""
    behind = positions[:, :, None] - torch.arange(keys.shape[1], device=keys.device)  # [rows, tokens, context]
    seen = behind >= 0 if form.window is None else (behind >= 0) & (behind < form.window)
    if form.first_key:
        seen = seen & ((behind == 0) | (torch.arange(keys.shape[1], device=keys.device) >= form.first_key))
    q, keys, values = (heads.transpose(1, 2) for heads in (q, keys, values))  # heads before tokens
    mixed = F.scaled_dot_product_attention(q, keys, values, seen[:, None], scale=form.scale, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def _heads(qkv: Tensor, form: AttentionForm) -> tuple[Tensor, ...]:
    """Queries, keys, values as [tokens, heads, head_dim]."""
    by_head = qkv.view(len(qkv), -1, form.head_dim)
    return torch.split(by_head, [form.num_heads, form.num_kv_heads, form.num_kv_heads], dim=1)


def _turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """By the rule of `quantize.py`. A block's sum is a whole number below 2^24: float32 adds it up exactly."""
    rounded, scales = quantize_activations(x.numpy())
    sums = torch.zeros(len(x), len(weight))
    for block in range(scales.shape[1]):
        scale = torch.from_numpy(scales[:, block : block + 1])
        part = slice(block * ACTIVATION_BLOCK, (block + 1) * ACTIVATION_BLOCK)
        sums = sums + F.linear(torch.from_numpy(rounded[:, part]).float(), weight[:, part].float()) * scale
    return sums


def _activate(y: Tensor, activation: Activation) -> Tensor:
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    gate, up = y.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu_gate" else F.gelu(gate)) * up


def empty_cache(num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> KvCache:
    def blocks() -> tuple[Tensor, ...]:
        return tuple(torch.zeros(num_blocks, block_size, num_kv_heads, head_dim) for _ in range(num_layers))

    return KvCache(blocks(), blocks())


def as_index(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).long()
