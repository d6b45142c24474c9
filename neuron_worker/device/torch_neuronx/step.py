"""One shape's step as a module of static shapes: weights and caches are its parameters, a batch's arrays its inputs.

    (decode: tokens, positions, lengths, blocks) (prefill: tokens, starts, lengths, positions, blocks)
        -> tokens, logits, new keys of each layer, new values of each layer

The caches are never written to: the graph gives new ones, and its `aliases` say which parameter each of them replaces.
Knows no SDK and no request.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..base import PackedBatch, StepShape
from ..graph.decoder import decode_step
from ..graph.ops import LinearWeight, NormWeight
from ..graph.torch_ops import DecodeTensors, KvCache, PrefillTensors, TorchBatch, TorchOps, as_index
from .weights import Weights, frozen

_NUM_DECODE_INPUTS = 4


class Caches(nn.Module):
    """Keys of every layer, then values of every layer; shared by all graphs."""

    def __init__(self, cache: KvCache) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(frozen(tensor) for tensor in (*cache.keys, *cache.values))

    def aliases(self, first: int) -> dict[Tensor, int]:
        """Each cache and the output that replaces it, the outputs from `first` on."""
        return {tensor: first + index for index, tensor in enumerate(self.tensors)}

    def cache(self) -> KvCache:
        tensors = list(self.tensors)
        middle = len(tensors) // 2
        return KvCache(tuple(tensors[:middle]), tuple(tensors[middle:]))


class StepGraph(nn.Module):
    def __init__(self, weights: Weights, caches: Caches, shape: StepShape) -> None:
        super().__init__()
        self.weights, self.caches = weights, caches
        self._has_decode, self._has_prefill = shape.decode_rows > 0, shape.prefill_tokens > 0

    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        ops = FunctionalOps(self._batch(arrays), self.caches.cache())
        decode_step(ops, self.weights.model())
        return ops.tokens, ops.logits, *ops.new_keys, *ops.new_values

    def aliases(self) -> dict[Tensor, int]:
        return self.caches.aliases(first=2)

    def _batch(self, arrays: tuple[Tensor, ...]) -> TorchBatch:
        decode = prefill = None
        if self._has_decode:
            tokens, positions, lengths, blocks = arrays[:_NUM_DECODE_INPUTS]
            decode = DecodeTensors(tokens, positions, lengths, blocks)
            arrays = arrays[_NUM_DECODE_INPUTS:]
        if self._has_prefill:
            tokens, starts, lengths, positions, blocks = arrays
            prefill = PrefillTensors(tokens, starts, lengths, positions, blocks, targets=tokens)  # none is scored
        return TorchBatch(decode, prefill, sampling=None)


class CopyGraph(nn.Module):
    """Cache blocks, source to target: [pairs], [pairs] -> how many pairs, new caches. An unused pair is the scratch
    block twice."""

    def __init__(self, caches: Caches) -> None:
        super().__init__()
        self.caches = caches

    def forward(self, sources: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        copied = [tensor.index_copy(0, targets, tensor[sources]) for tensor in self.caches.tensors]
        return (targets > 0).sum(), *copied

    def aliases(self) -> dict[Tensor, int]:
        return self.caches.aliases(first=1)


class FunctionalOps(TorchOps):
    """The reference's verbs without a write, and the likeliest token by operations that any compiler orders alike."""

    def __init__(self, batch: TorchBatch, cache: KvCache) -> None:
        super().__init__(batch, cache)
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []

    def finish(self, x: Tensor, hidden: Tensor | None, norm: NormWeight, head: LinearWeight) -> None:
        self.logits = self.linear(self.norm(x, norm), head)
        self.tokens = likeliest(self.logits)

    def _store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert layer == len(self.new_keys), "layers attend in order"
        self.new_keys.append(self._with(self._cache.keys[layer], keys))
        self.new_values.append(self._with(self._cache.values[layer], values))
        return self.new_keys[layer], self.new_values[layer]

    def _with(self, blocks: Tensor, new: Tensor) -> Tensor:
        return blocks.flatten(0, 1).index_copy(0, self._places.slots, new).view(blocks.shape)


def likeliest(logits: Tensor) -> Tensor:
    """The lowest id of the largest logits of each row: no argmax, whose choice among equals is the compiler's. [M]"""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    largest = logits.amax(dim=-1, keepdim=True)
    return torch.where(logits == largest, ids, logits.shape[-1] - 1).amin(dim=-1)


def arrays_of(batch: PackedBatch) -> tuple[Tensor, ...]:
    """The inputs of a shape's graph, in its order."""
    arrays: tuple[Tensor, ...] = ()
    if batch.decode is not None:
        part = batch.decode
        arrays += tuple(map(as_index, (part.tokens, part.positions, part.lengths, part.blocks)))
    if batch.prefill is not None:
        rows = batch.prefill
        arrays += tuple(map(as_index, (rows.tokens, rows.starts, rows.lengths, rows.positions, rows.blocks)))
    return arrays


def empty_arrays(shape: StepShape, num_prompts: int, block_size: int) -> tuple[Tensor, ...]:
    """Inputs of a step that holds nothing but padding."""
    num_blocks = -(-shape.context // block_size)
    sizes: list[tuple[int, ...]] = []
    if shape.decode_rows:
        rows = shape.decode_rows
        sizes += [(rows, shape.decode_width), (rows,), (rows,), (rows, num_blocks)]
    if shape.prefill_tokens:
        sizes += [(shape.prefill_tokens,), (num_prompts,), (num_prompts,), (num_prompts,), (num_prompts, num_blocks)]
    return tuple(torch.zeros(size, dtype=torch.int64) for size in sizes)
