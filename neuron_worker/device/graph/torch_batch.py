"""A step's arrays as tensors, and its tensors as a step's output: what every executor on torch does around the graph.

Knows no model and no device.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..base import DeviceOutput, Float32, Int32, PackedBatch, PromptScores, RowSampling, Want
from ..errors import DoesNotFit, UnsupportedModel
from .ops import FloatType
from .spec import ITEM_BYTES
from .torch_ops import DecodeTensors, PrefillTensors, TorchBatch, as_index
from .torch_sampling import SamplingTensors


def float_type(dtype: str) -> FloatType:
    if dtype not in ITEM_BYTES:
        raise UnsupportedModel(f"dtype is {dtype!r}; supported are {', '.join(ITEM_BYTES)}")
    return cast(FloatType, dtype)


def check_tokens(batch: PackedBatch, vocab_size: int) -> None:
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
    return TorchBatch(decode, prefill, sampling_of(batch), batch.prompt_logprobs if scored else None)


def _num_used(lengths: Int32) -> int:
    """Places up to the last prompt. Attention to the rest would be all work and no result."""
    used = np.flatnonzero(lengths)
    return int(used[-1]) + 1 if len(used) else 0


def sampling_of(batch: PackedBatch) -> SamplingTensors | None:
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


def output_of(
    batch: PackedBatch, picked: Int32, logits: Float32, scores: tuple[Tensor, ...] | None, seconds: float
) -> DeviceOutput:
    """`picked` [R * W + P] and `logits`, one row per selected row."""
    shape = batch.shape
    num_decode = shape.decode_rows * shape.decode_width
    num_rows = len(batch.sampling.want)
    tokens = np.full((num_rows, shape.decode_width), -1, dtype=np.int32)
    if batch.decode is not None:
        real = np.arange(shape.decode_width) < batch.decode.lengths[:, None]
        tokens[: shape.decode_rows] = np.where(real, picked[:num_decode].reshape(-1, shape.decode_width), -1)
    tokens[shape.decode_rows :, 0] = picked[num_decode:]
    tokens[batch.sampling.want != Want.TOKEN] = -1
    return DeviceOutput(
        tokens=tokens,
        logits=_wanted_logits(batch, batch.sampling, logits),
        prompt_scores=None if scores is None else _scores(scores),
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


def _scores(scores: tuple[Tensor, ...]) -> PromptScores:
    logprobs, ranks, ids, top_logprobs = (tensor.numpy() for tensor in scores)
    return PromptScores(logprobs, ranks.astype(np.int32), ids.astype(np.int32), top_logprobs)
