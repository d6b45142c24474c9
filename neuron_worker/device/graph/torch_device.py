"""The `cpu` device on torch alone: the reference for tests, and what serves where there is no C compiler.

Keeps weights and cache as torch tensors and runs `decoder.decode_step` on them. It prepares nothing per shape, so
`compile` only takes note; torch allocates its own intermediate tensors. Knows no request and no policy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from ..base import (
    Capabilities,
    DeviceOptions,
    DeviceOutput,
    Float32,
    Int32,
    ModelFacts,
    PackedBatch,
    PromptScores,
    RowSampling,
    StepShape,
    Want,
)
from ..errors import DeviceError, DoesNotFit, UncompiledShape, UnsupportedModel
from .decoder import Model, decode_step, load_model
from .ops import FloatType
from .spec import ITEM_BYTES, kv_bytes_per_token
from .torch_ops import DecodeTensors, KvCache, PrefillTensors, TorchBatch, TorchOps, as_index, empty_cache
from .torch_packer import TorchPacker
from .torch_sampling import SamplingTensors

CAPABILITIES = Capabilities(
    name="cpu",
    on_chip=False,
    kv_layout="blocks",
    mixes_prefill_and_decode=True,
    splits_prompts=True,
    all_live_rows_in_decode=False,
    prompts_per_prefill=None,
    outputs=("logits", "tokens"),
    sampling="per_step",
    max_top_k=None,
    prompt_logprobs=True,
    fused_speculation=False,
    tensor_parallel_degrees=None,
    default_max_num_seqs=16,
    default_max_graphs=64,
    fine_prefill_ladder=True,
)


class TorchDevice:
    """See `base.Device` for the order of calls."""

    def __init__(self, capabilities: Capabilities = CAPABILITIES) -> None:
        self.capabilities = capabilities
        self._model: Model | None = None
        self._cache: KvCache | None = None
        self._options: DeviceOptions | None = None
        self._shapes: set[StepShape] = set()
        self._sealed = False

    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        if draft_dir is not None:
            raise UnsupportedModel(f"draft model {draft_dir}: the cpu device does not speculate on its own")
        packer = TorchPacker(_float_type(options.dtype))
        model = load_model(model_dir, options, packer)
        torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
        self._model, self._options = model, options
        spec = model.spec
        return ModelFacts(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bytes_per_kv_token=kv_bytes_per_token(spec, "float32"),
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
        _check_tokens(batch, model.spec.vocab_size)
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                ops = TorchOps(tensors_of(batch), self._cache)
                decode_step(ops, model)
        except (RuntimeError, IndexError) as error:
            raise DoesNotFit(f"a step of {batch.shape} failed: {error}") from error
        return _output(batch, ops, time.perf_counter() - started)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self._cache is None:
            raise DeviceError("copy_blocks before allocate: there is no cache")
        for source, target in pairs:
            for layer in (*self._cache.keys, *self._cache.values):
                layer[target] = layer[source]

    def close(self) -> None:
        self._model = self._cache = None
        self._shapes.clear()

    def _loaded(self) -> tuple[Model, DeviceOptions]:
        if self._model is None or self._options is None:
            raise DeviceError("no model is loaded; call load first")
        return self._model, self._options


def _float_type(dtype: str) -> FloatType:
    if dtype not in ITEM_BYTES:
        raise UnsupportedModel(f"dtype is {dtype!r}; supported are {', '.join(ITEM_BYTES)}")
    return cast(FloatType, dtype)


def _notes(options: DeviceOptions) -> tuple[str, ...]:
    if options.dtype == "float32":
        return ()
    return (f"weights are kept in {options.dtype}, computed in float32",)


def _check_tokens(batch: PackedBatch, vocab_size: int) -> None:
    for part in (batch.decode, batch.prefill):
        if part is not None and part.tokens.size and not 0 <= part.tokens.min() <= part.tokens.max() < vocab_size:
            raise DoesNotFit(
                f"a token id is {part.tokens.min()} or {part.tokens.max()}; the vocabulary has 0 to {vocab_size - 1}"
            )


def tensors_of(batch: PackedBatch) -> TorchBatch:
    decode = prefill = None
    if batch.decode is not None:
        part = batch.decode
        decode = DecodeTensors(
            as_index(part.tokens), as_index(part.positions), as_index(part.lengths), as_index(part.blocks)
        )
    scored = False
    if batch.prefill is not None:
        prompts = batch.prefill
        used = _num_used(prompts.lengths)
        prefill = PrefillTensors(
            tokens=as_index(prompts.tokens),
            starts=as_index(prompts.starts),
            lengths=as_index(prompts.lengths),
            positions=as_index(prompts.positions),
            blocks=as_index(prompts.blocks[:used]),
            targets=as_index(prompts.targets),
        )
        scored = bool((prompts.targets >= 0).any())
    return TorchBatch(decode, prefill, _sampling(batch), batch.prompt_logprobs if scored else None)


def _num_used(lengths: Int32) -> int:
    """Places up to the last prompt. Attention to the rest would be all work and no result."""
    used = np.flatnonzero(lengths)
    return int(used[-1]) + 1 if len(used) else 0


def _sampling(batch: PackedBatch) -> SamplingTensors | None:
    """Per selected row, a decode row once for each of its tokens; None where nothing is drawn at random."""
    rows = batch.sampling
    if not ((rows.want == Want.TOKEN) & (rows.temperature > 0)).any():
        return None
    num_decode, width = batch.shape.decode_rows, batch.shape.decode_width
    repeats = np.where(np.arange(len(rows.want)) < num_decode, width, 1)
    uniforms = np.concatenate([rows.uniforms[:num_decode].ravel(), rows.uniforms[num_decode:, 0]])
    return SamplingTensors(
        temperature=torch.from_numpy(rows.temperature.repeat(repeats)),
        top_k=as_index(rows.top_k.repeat(repeats)),
        top_p=torch.from_numpy(rows.top_p.repeat(repeats)),
        min_p=torch.from_numpy(rows.min_p.repeat(repeats)),
        uniforms=torch.from_numpy(uniforms),
    )


def _output(batch: PackedBatch, ops: TorchOps, seconds: float) -> DeviceOutput:
    shape = batch.shape
    num_decode = shape.decode_rows * shape.decode_width
    num_rows = len(batch.sampling.want)
    picked = ops.tokens.numpy().astype(np.int32)
    tokens = np.full((num_rows, shape.decode_width), -1, dtype=np.int32)
    if batch.decode is not None:
        real = np.arange(shape.decode_width) < batch.decode.lengths[:, None]
        tokens[: shape.decode_rows] = np.where(real, picked[:num_decode].reshape(-1, shape.decode_width), -1)
    tokens[shape.decode_rows :, 0] = picked[num_decode:]
    tokens[batch.sampling.want != Want.TOKEN] = -1
    return DeviceOutput(
        tokens=tokens,
        logits=_wanted_logits(batch, batch.sampling, ops.logits.numpy()),
        prompt_scores=None if ops.scores is None else _scores(ops),
        device_seconds=seconds,
    )


def _wanted_logits(batch: PackedBatch, sampling: RowSampling, logits: Float32) -> Float32 | None:
    wanted = np.flatnonzero(sampling.want == Want.LOGITS)
    if not len(wanted):
        return None
    rows, width = batch.shape.decode_rows, batch.shape.decode_width
    selected: list[int] = []
    for row in wanted.tolist():
        if row < rows and batch.decode is not None:
            selected += range(row * width, row * width + int(batch.decode.lengths[row]))
        else:
            selected.append(rows * width + row - rows)
    return logits[selected]


def _scores(ops: TorchOps) -> PromptScores:
    assert ops.scores is not None
    logprobs, ranks, ids, top_logprobs = (tensor.numpy() for tensor in ops.scores)
    return PromptScores(logprobs, ranks.astype(np.int32), ids.astype(np.int32), top_logprobs)
