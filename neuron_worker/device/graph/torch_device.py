"""The `cpu` device on torch alone: the reference for tests, and what serves where there is no C compiler.

Keeps weights and cache as torch tensors and runs `decoder.decode_step` on them. It prepares nothing per shape, so
`compile` only takes note; torch allocates its own intermediate tensors. Knows no request and no policy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import torch

from ..base import Capabilities, DeviceOptions, DeviceOutput, DraftRequest, Int32, ModelFacts, PackedBatch, StepShape
from ..cpu.capabilities import CAPABILITIES
from ..draft_rows import draft_rows, no_draft, not_the_last
from ..errors import DeviceError, DoesNotFit, UncompiledShape
from .decoder import Model, decode_step, load_model
from .draft import Draft, load_draft
from .spec import kv_bytes_per_token
from .torch_batch import check_tokens, float_type, output_of, tensors_of
from .torch_draft import TorchDraft
from .torch_ops import KvCache, TorchOps, empty_cache
from .torch_packer import TorchPacker


class TorchDevice:
    """See `base.Device` for the order of calls."""

    def __init__(self, capabilities: Capabilities = CAPABILITIES) -> None:
        self.capabilities = capabilities
        self._model: Model | None = None
        self._cache: KvCache | None = None
        self._options: DeviceOptions | None = None
        self._draft: Draft | None = None
        self._drafting: TorchDraft | None = None
        self._features: torch.Tensor | None = None
        self._shapes: set[StepShape] = set()
        self._ran: StepShape | None = None
        self._sealed = False

    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        packer = TorchPacker(float_type(options.dtype), options.activations)
        model = load_model(model_dir, options, packer)
        torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
        draft = None if draft_dir is None else load_draft(draft_dir, model_dir, model, options, packer)
        self._model, self._options, self._draft = model, options, draft
        spec = model.spec
        cached = kv_bytes_per_token(spec, "float32")
        if draft is not None:
            cached += kv_bytes_per_token(draft.spec, "float32") + 4 * draft.feature_width
        return ModelFacts(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bytes_per_kv_token=cached,
            weight_bytes=packer.num_bytes,
            compute_dtype="float32",
            notes=_notes(options),
        )

    def allocate(self, num_blocks: int) -> None:
        model, options = self._loaded()
        spec = model.spec
        if num_blocks < 2:
            raise DoesNotFit(f"{num_blocks} cache blocks: the scratch block and at least one more are needed")
        self._cache = empty_cache(spec.num_layers, num_blocks, options.block_size, spec.num_kv_heads, spec.head_dim)
        if self._draft is not None:
            self._drafting = TorchDraft(self._draft, options, num_blocks)
            if self._draft.feature_width:
                self._features = torch.zeros(num_blocks, options.block_size, self._draft.feature_width)

    def compile(self, shape: StepShape) -> None:
        _, options = self._loaded()
        if self._sealed:
            raise UncompiledShape(f"{shape} came after the last shape was compiled")
        longest = -(-options.max_model_len // options.block_size) * options.block_size
        if shape.context > longest:
            raise DoesNotFit(f"{shape} has a context above max_model_len {options.max_model_len}")
        self._shapes.add(shape)

    def seal(self) -> None:
        self._sealed = True

    def run(self, batch: PackedBatch) -> DeviceOutput:
        model, _ = self._loaded()
        if batch.shape not in self._shapes:
            raise UncompiledShape(f"{batch.shape} was never compiled; compiled are {len(self._shapes)} others")
        if self._cache is None:
            raise DeviceError("run before allocate: there is no cache")
        check_tokens(batch, model.spec.vocab_size)
        self._ran = batch.shape
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                ops = TorchOps(tensors_of(batch), self._cache, self._features)
                decode_step(ops, model, self._draft)
        except (RuntimeError, IndexError) as error:
            raise DoesNotFit(f"a step of {batch.shape} failed: {error}") from error
        seconds = time.perf_counter() - started
        return output_of(batch, ops.tokens.numpy().astype(np.int32), ops.logits.numpy(), ops.scores, seconds)

    def draft(self, batch: PackedBatch, request: DraftRequest) -> Int32:
        if self._drafting is None:
            raise no_draft()
        if self._ran != batch.shape:
            raise not_the_last(batch.shape)
        rows = draft_rows(batch, request, self._loaded()[0].spec.vocab_size)
        with torch.inference_mode():
            return self._drafting.run(rows, batch.shape.context, self._features)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self._cache is None:
            raise DeviceError("copy_blocks before allocate: there is no cache")
        for source, target in pairs:
            for tensor in self._cached():
                tensor[target] = tensor[source]

    def _cached(self) -> list[torch.Tensor]:
        caches = [self._cache, None if self._drafting is None else self._drafting.cache]
        tensors = [tensor for cache in caches if cache is not None for tensor in (*cache.keys, *cache.values)]
        return tensors if self._features is None else [*tensors, self._features]

    def close(self) -> None:
        self._model = self._cache = self._draft = self._drafting = self._features = None
        self._shapes.clear()

    def _loaded(self) -> tuple[Model, DeviceOptions]:
        if self._model is None or self._options is None:
            raise DeviceError("no model is loaded; call load first")
        return self._model, self._options


def _notes(options: DeviceOptions) -> tuple[str, ...]:
    if options.dtype == "float32":
        return ()
    return (f"weights are kept in {options.dtype}, computed in float32",)
