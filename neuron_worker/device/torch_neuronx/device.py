"""Our graphs on one core of a chip, behind the device protocol.

    load: weights, the SDK     allocate: caches     compile: one graph per shape, state shared     run: arrays in

The chip gives the likeliest token and the logits of every row; what is drawn at random is drawn here from the logits,
by the rule of every other device.
"""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .. import environment
from ..base import Capabilities, DeviceOptions, DeviceOutput, DraftRequest, Int32, ModelFacts, PackedBatch, StepShape
from ..draft_rows import no_draft
from ..errors import DeviceError, DeviceLost, DoesNotFit, UncompiledShape, UnsupportedModel
from ..graph.decoder import load_model
from ..graph.spec import ModelSpec, kv_bytes_per_token
from ..graph.torch_batch import check_tokens, float_type, output_of, sampling_of
from ..graph.torch_ops import empty_cache
from ..graph.torch_packer import TorchPacker
from ..graph.torch_sampling import sampled_tokens
from . import sdk, settings
from .capabilities import CAPABILITIES
from .step import Caches, CopyGraph, StepGraph, arrays_of, empty_arrays
from .weights import Weights

COPIED_AT_ONCE = 16  # pairs of blocks in one call of the copying graph


@dataclass
class _Loaded:
    """From `load` on."""

    spec: ModelSpec
    options: DeviceOptions
    weights: Weights
    compiler: sdk.Compiler
    num_blocks: int = 0
    caches: Caches | None = None  # from `allocate` on
    steps: dict[StepShape, sdk.Compiled] = field(default_factory=dict)
    copy: sdk.Compiled | None = None


class NeuronTorchDevice:
    """See `base.Device` for the order of calls."""

    def __init__(
        self, capabilities: Capabilities = CAPABILITIES, environ: MutableMapping[str, str] = os.environ
    ) -> None:
        self._capabilities = capabilities
        self._environ = environ
        self._loaded: _Loaded | None = None
        self._sealed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        _refuse(options, draft_dir)
        environment.prepare(self._environ, options.tensor_parallel_size, options.compiler_cache)
        packer = TorchPacker(float_type(options.dtype))
        model = load_model(model_dir, options, packer)
        compiler = sdk.load(options.dtype)
        self._loaded, self._sealed = _Loaded(model.spec, options, Weights(model), compiler), False
        return _facts(model.spec, options, packer.num_bytes, compiler)

    def allocate(self, num_blocks: int) -> None:
        loaded = self._need()
        if num_blocks < 2:
            raise DoesNotFit(f"{num_blocks} cache blocks: the scratch block and at least one more are needed")
        if loaded.steps:
            raise DeviceError("allocate after compile: the cache's size is part of every graph")
        spec, size = loaded.spec, loaded.options.block_size
        cache = empty_cache(spec.num_layers, num_blocks, size, spec.num_kv_heads, spec.head_dim)
        loaded.caches, loaded.num_blocks = Caches(cache), num_blocks

    def compile(self, shape: StepShape) -> None:
        loaded = self._need()
        if self._sealed:
            raise UncompiledShape(f"{shape} came after the last shape was compiled")
        caches, options = _caches(loaded), loaded.options
        longest = -(-options.max_model_len // options.block_size) * options.block_size
        if shape.context > longest:
            raise DoesNotFit(f"{shape} has a context above max_model_len {options.max_model_len}")
        if shape in loaded.steps:
            return
        inputs = empty_arrays(shape, options.prompts_per_call, options.block_size)
        graph = StepGraph(loaded.weights, caches, shape)
        loaded.steps[shape] = _compiled(loaded, graph, inputs, f"{shape}")

    def seal(self) -> None:
        loaded = self._need()
        if loaded.caches is not None:
            self._copying(loaded)
        self._sealed = True

    def run(self, batch: PackedBatch) -> DeviceOutput:
        loaded = self._need()
        step = loaded.steps.get(batch.shape)
        if step is None:
            raise UncompiledShape(f"{batch.shape} was never compiled; compiled are {len(loaded.steps)} others")
        _check(batch, loaded)
        started = time.perf_counter()
        tokens, logits = _called(step, arrays_of(batch))
        sampling = sampling_of(batch)
        if sampling is not None:
            tokens = sampled_tokens(logits, sampling)
        seconds = time.perf_counter() - started
        return output_of(batch, tokens.numpy().astype(np.int32), logits.numpy(), None, seconds)

    def draft(self, batch: PackedBatch, request: DraftRequest) -> Int32:
        raise no_draft()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        loaded = self._need()
        _caches(loaded)
        highest = max((block for pair in pairs for block in pair), default=0)
        if highest >= loaded.num_blocks:
            raise DoesNotFit(f"copy_blocks: block {highest}; the cache has {loaded.num_blocks}")
        copy = self._copying(loaded)
        for start in range(0, len(pairs), COPIED_AT_ONCE):
            padded = np.zeros((COPIED_AT_ONCE, 2), np.int64)
            padded[: len(pairs[start : start + COPIED_AT_ONCE])] = pairs[start : start + COPIED_AT_ONCE]
            sources, targets = torch.from_numpy(padded.T.copy())
            _called(copy, (sources, targets))

    def close(self) -> None:
        self._loaded = None

    def _copying(self, loaded: _Loaded) -> sdk.Compiled:
        if loaded.copy is None:
            pairs = torch.zeros(COPIED_AT_ONCE, dtype=torch.int64)
            loaded.copy = _compiled(loaded, CopyGraph(_caches(loaded)), (pairs, pairs.clone()), "the copying of blocks")
        return loaded.copy

    def _need(self) -> _Loaded:
        if self._loaded is None:
            raise DeviceError("no model is loaded; call load first")
        return self._loaded


def _refuse(options: DeviceOptions, draft_dir: str | None) -> None:
    if options.tensor_parallel_size > 1:
        raise UnsupportedModel(environment.ONE_CORE.format(options.tensor_parallel_size, CAPABILITIES.name))
    if draft_dir is not None:
        raise UnsupportedModel(
            f"draft model {draft_dir}: the torch-neuronx backend does not speculate inside the device; leave it out"
        )
    if options.require_artifacts:
        raise UnsupportedModel(
            "require_cached: the torch-neuronx backend's graphs are compiled by the SDK, which cannot be told not to; "
            "leave it out"
        )
    settings.refuse(options.neuron_config, options.max_num_seqs)


def _facts(spec: ModelSpec, options: DeviceOptions, num_bytes: int, compiler: sdk.Compiler) -> ModelFacts:
    notes = [f"graphs are compiled by {compiler.name}; this backend has not run on a chip yet"]
    if options.dtype != "float32":
        notes.append(f"weights are kept in {options.dtype}, the cache and what is between matrices in float32")
    if options.artifacts is not None:
        notes.append("compiled graphs are kept by the SDK's own cache (NEURON_COMPILE_CACHE_URL) alone")
    return ModelFacts(
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        bytes_per_kv_token=kv_bytes_per_token(spec, "float32"),
        weight_bytes=num_bytes,
        compute_dtype="float32",
        notes=tuple(notes),
    )


def _caches(loaded: _Loaded) -> Caches:
    if loaded.caches is None:
        raise DeviceError("allocate comes first: there is no cache")
    return loaded.caches


def _compiled(loaded: _Loaded, graph: StepGraph | CopyGraph, inputs: tuple[Tensor, ...], what: str) -> sdk.Compiled:
    try:
        with torch.no_grad():
            return loaded.compiler.compile(graph, inputs, graph.aliases())
    except DeviceError:
        raise
    except Exception as error:
        name = loaded.compiler.name
        raise DeviceError(f"{name} failed to compile {what}: {type(error).__name__}: {error}") from error


def _called(step: sdk.Compiled, arrays: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():
            return step(*arrays)
    except Exception as error:  # the arrays were checked: it is the runtime, and the caches may be half written
        raise DeviceLost(f"the Neuron runtime failed at a step: {type(error).__name__}: {error}") from error


def _check(batch: PackedBatch, loaded: _Loaded) -> None:
    """What a chip would not notice: it reads and writes wherever an index points."""
    check_tokens(batch, loaded.spec.vocab_size)
    if batch.prefill is not None and (batch.prefill.targets >= 0).any():
        raise DeviceError("prompt log-probabilities: the torch-neuronx backend's graphs have none; leave them out")
    for part in (batch.decode, batch.prefill):
        if part is None:
            continue
        if not 0 <= part.blocks.min() <= part.blocks.max() < loaded.num_blocks:
            raise DoesNotFit(f"a block is {part.blocks.max()}; the cache has {loaded.num_blocks}")
        end = int(np.where(part.lengths > 0, part.positions + part.lengths, 0).max())
        room = part.blocks.shape[1] * loaded.options.block_size
        if end > room or part.positions.min() < 0:
            raise DoesNotFit(f"a row ends at position {end}; {batch.shape} has room for {room}")
