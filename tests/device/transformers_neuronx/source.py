"""The library's own host-side Python on the stand-in's chip, where its public source is at hand.

    TRANSFORMERS_NEURONX_SOURCE=<checkout>/src pytest tests/device/transformers_neuronx

Then every test of this folder also runs on the real code: configurations, buckets, what a call is taken for, padding,
what goes to which graph, and what is done with the result. What needs the SDK is left out by stubs: importing it,
building and compiling graphs, and running them, which `_Program` does with the chip's cells instead.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.fakes.transformers_neuronx import answers, chip
from tests.fakes.transformers_neuronx.base import pieces
from tests.fakes.transformers_neuronx.fused_speculation import FusedSpeculativeDecoder
from tests.fakes.transformers_neuronx.llama.model import LlamaForSampling

KEY = "TRANSFORMERS_NEURONX_SOURCE"
PATH = os.environ.get(KEY)
STUBBED = ("torch_neuronx", "libneuronxla", "neuronxcc")

__all__ = ["KEY", "PATH", "answers", "chip", "imported"]


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Anything of the SDK imports, and is nothing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.split(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        stub = MagicMock(name=spec.name)
        stub.__name__, stub.__path__, stub.__spec__, stub.__version__ = spec.name, [], spec, "2.16.372.0"
        return stub

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def imported() -> Iterator[Any]:
    """The library from its source, its graphs on the stand-in's chip."""
    finder, before = _Stubs(), set(sys.modules)
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, str(PATH))
    chip.chips.clear()
    chip.calls.clear()
    chip.seconds_per_launch = 0.0
    try:
        library = importlib.import_module("transformers_neuronx")
        _connect(library)
        yield library
    finally:
        sys.path.remove(str(PATH))
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("transformers_neuronx", *STUBBED):
                del sys.modules[name]


def _connect(library: Any) -> None:
    """Puts our chip under the verbs that need a real one."""
    base = importlib.import_module("transformers_neuronx.base")
    fused = importlib.import_module("transformers_neuronx.fused_speculation")
    ops = importlib.import_module("transformers_neuronx.ops")
    module = importlib.import_module("transformers_neuronx.module")
    base.NeuronModelBase.to_neuron = _to_neuron
    base.NeuronModelBase.reset = lambda model: model.chip.clear()
    _before(base.NeuronModelBase, "update_generation_config", _note_update)
    _before(base.NeuronModelBase, "_prepare_for_continuous_batching", _note_slots)
    _before(fused.FusedSpeculativeDecoder, "speculative_iteration", _note_slots_of_both)
    fused.FusedSpeculativeDecoder.to_neuron = _fuse
    ops.parallel_write = _write
    load = module.PretrainedModel.load_state_dict_dir

    def loaded(model: Any, directory: str) -> None:
        model.written_config = json.loads((Path(directory) / "config.json").read_text())
        load(model, directory)

    module.WrappingCheckpointCompatibleModel.load_state_dict_dir = loaded


def _before(owner: Any, name: str, note: Any) -> None:
    method = getattr(owner, name)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, *args)
        return method(self, *args, **kwargs)

    setattr(owner, name, noted)


def _note_update(model: Any, *args: Any) -> None:
    chip.calls.append((model, "update_generation_config"))


def _note_slots(model: Any, input_ids: Any, cache_ids: Any = None, slots: Any = None) -> None:
    """The chip computes every slot; who was given is what its record is about."""
    model.given = [] if slots is None else slots.flatten().tolist()


def _note_slots_of_both(decoder: Any, input_ids: Any, cache_ids: Any, slots: Any) -> None:
    for model in (decoder.draft, decoder.target):
        _note_slots(model, input_ids, cache_ids, slots)


def _write(table: Any, tensors: list[torch.Tensor]) -> None:
    if table is None:
        raise RuntimeError("the tables do not exist")
    table.write(tensors[0])


class _Table:
    """A row of sampling parameters in the chip's memory."""

    def __init__(self, tables: dict[str, Any], name: str) -> None:
        self._tables, self._name = tables, name

    def write(self, tensor: torch.Tensor) -> None:
        self._tables[self._name] = tensor.tolist()


def _to_neuron(model: Any) -> None:
    chip.calls.append((model, "to_neuron"))
    generation, decoder = model.neuron_config.on_device_generation, model.decoder_lm_head
    model.amp, model.tp_degree = model.config.amp, model.config.tp_degree
    model.chip = chip.Chip(model, model.batch_sizes[-1], model.token_buckets[-1], model.config.vocab_size)
    model.chip.disagrees_every = model.written_config.get("fake_disagrees_every", 0)
    if generation:
        decoder.validate_generation_configs(generation)
        if generation.dynamic:
            for name in chip.PARAMETERS:
                table = _Table(model.chip.tables, name)
                table.write(torch.tensor(getattr(generation, name)))
                setattr(decoder, name, table)
                setattr(generation, name, object())  # as tracing the graphs does
    model.chkpt_model.model.embed_tokens = _Ids(model.config.vocab_size)
    _give_program(decoder, model, "decode", model.token_buckets)
    for (size, _), context in model.decoder_lm_head_for_context.items():
        _give_program(context, model, "prefill", [size])


class _Ids(torch.nn.Module):
    """In place of the embedding: the ids themselves, as hidden states of one number."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise IndexError("index out of range in self")
        return ids.unsqueeze(-1).float()


def _give_program(decoder: Any, model: Any, kind: str, positions: list[int]) -> None:
    decoder.program = _Program(model, kind, positions)
    decoder.use_executor = True
    sequence = 1
    decoder.inputs_sdim = (sequence, sequence, None, None, None, None, None)


class _Program:
    """Compiled graphs of one kind."""

    def __init__(self, model: Any, kind: str, positions: list[int]) -> None:
        self._model, self._kind, self.n_positions_list = model, kind, positions
        decoder = importlib.import_module("transformers_neuronx.decoder")
        self.find_bucket_id = lambda length: decoder.DecoderProgram.find_bucket_id(self, length)

    def debug_tensors_to_host(self, *args: object) -> None:
        pass

    def execute(self, bucket_id: int, batch_size: int, *inputs: Any, return_ranks: int) -> Any:
        hidden, cache_ids, start_ids, last_token_id = inputs[:4]
        size = self.n_positions_list[bucket_id]
        ids = self._ids(hidden)
        if self._kind == "decode":
            # Who was given is the host's knowledge; on the chip every slot is.
            with self._model.chip.launch("decode", size, self._model.given):
                digests = [
                    self._model.chip.write_tokens(slot, int(cache_ids[slot, 0]), [int(ids[slot, 0])])
                    for slot in range(batch_size)
                ]
            return self._results(digests, range(batch_size))
        if start_ids.shape != (1,):
            raise AssertionError(f"3th input shape mismatch. Expected {torch.Size([1])}, but got {start_ids.shape}")
        slot = int(start_ids[0])
        with self._model.chip.launch("prefill", size, [slot]):
            length = int(last_token_id[0]) + 1
            digests = [self._model.chip.write_tokens(slot, 0, [int(token) for token in ids[0, :length]])]
            self._model.chip.write_garbage(slot, length, size)
        return self._results(digests, [slot])

    def _ids(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dim() == 2:
            return hidden
        layout = importlib.import_module("transformers_neuronx.constants").LAYOUT_HSB
        is_turned = self._model.neuron_config.attention_layout == layout
        return (hidden.transpose(0, -1) if is_turned else hidden)[..., 0].long()

    def _results(self, digests: list[list[int]], slots: Any) -> Any:
        model, generation = self._model, self._model.neuron_config.on_device_generation
        lasts = [each[-1] for each in digests]
        if not generation:
            return torch.stack([torch.from_numpy(model.chip.logits(last)) for last in lasts], dim=1).unsqueeze(1)
        drawn = [[model.chip.draw(last, slot, generation)] for last, slot in zip(lasts, slots, strict=True)]
        tokens = torch.tensor(drawn, dtype=torch.int32)
        if not model.neuron_config.is_eagle_target:
            return tokens
        width = self.n_positions_list[0] if self._kind == "prefill" else 1
        hidden = torch.zeros(len(digests), width, max(4, model.config.hidden_size))
        for row, each in enumerate(digests):
            for position, digest in enumerate(each):
                hidden[row, position, :4] = pieces(digest)
        return tokens, hidden


def _fuse(decoder: Any) -> None:
    decoder.speculator = _Speculator(decoder)


class _Speculator:
    """The stand-in's fused graph under the library's host side."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._graph: Any = object.__new__(FusedSpeculativeDecoder)
        self._graph.draft, self._graph.target, self._graph.k = decoder.draft, decoder.target, decoder.k
        self._graph.is_eagle, self._graph.hidden = decoder.is_eagle, {}
        decoder.draft.eagle_step = lambda *args: LlamaForSampling.eagle_step(decoder.draft, *args)

    def execute(self, ids: Any, positions: Any, slots: Any, *rest: Any, return_ranks: int) -> Any:
        hidden, k = rest[-1] if rest else None, self._decoder.k
        tokens = torch.zeros(len(slots), k + 1, dtype=torch.int32)
        counts = torch.zeros(len(slots), 1, dtype=torch.int32)
        furthest = int(positions.max()) + k + 2
        size = next((size for size in self._decoder.buckets if size >= furthest), self._decoder.buckets[-1])
        given = self._decoder.target.given
        with (
            self._decoder.draft.chip.launch("draft", size, given),
            self._decoder.target.chip.launch("speculate", size, given),
        ):
            for slot in slots.tolist():
                state = None if hidden is None else hidden[slot, 0]
                emitted = self._graph._speculate(slot, int(ids[slot, 0]), int(positions[slot, 0]), state)
                tokens[slot, : len(emitted)], counts[slot, 0] = torch.tensor(emitted, dtype=torch.int32), len(emitted)
        if hidden is None:
            return tokens, counts, None
        return tokens, counts, None, torch.cat([self._graph.hidden[slot] for slot in slots.tolist()])
