"""Sequences on a device of slots, step by step, as the runner drives it: slots from a free list, the plan's shapes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neuronserve.bucketing.pack import RowOutput, StepPacker, unpack
from neuronserve.bucketing.plan import Plan, PlanRequest, make_plan
from neuronserve.bucketing.row import Row, demand_of
from neuronserve.bucketing.split import Part, split
from neuronserve.neuron_worker.device.base import DeviceOptions, PackedBatch, StepShape, Want
from neuronserve.neuron_worker.device.transformers_neuronx.capabilities import CAPABILITIES
from neuronserve.neuron_worker.device.transformers_neuronx.device import NeuronxDevice

VOCABULARY = 64
NUM_SLOTS = 3
LONGEST = 64

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def write_model(directory: Path, **changes: Any) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in {**CONFIG, **changes}.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(values))
    header = b"{}"
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(directory)


@dataclass
class Running:
    """One request."""

    prompt: list[int]
    slot: int
    sampling: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)  # drawn so far

    @property
    def all(self) -> list[int]:
        return self.prompt + self.tokens


class Server:
    def __init__(
        self,
        directory: str,
        *,
        draft: str | None = None,
        num_drafts: int = 0,
        context_buckets: tuple[int, ...] | None = (8, 16, 32),
        token_generation_buckets: tuple[int, ...] | None = (16, 32, LONGEST),
        environ: dict[str, str] | None = None,
        max_num_seqs: int = NUM_SLOTS,
        max_model_len: int = LONGEST,
        **options: Any,
    ) -> None:
        request = PlanRequest(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=max_model_len,
            context_buckets=context_buckets,
            token_generation_buckets=token_generation_buckets,
        )
        self.plan: Plan = make_plan(request, CAPABILITIES)
        self.num_tokens = num_drafts + 1
        self.packer = StepPacker(max_model_len, max_num_seqs)
        self.environ = {} if environ is None else environ
        self.device = NeuronxDevice(environ=self.environ)
        self.options = DeviceOptions(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=max_model_len,
            prompts_per_call=max_num_seqs,
            **{"tensor_parallel_size": 2, **options},
        )
        self.facts = self.device.load(directory, self.options, draft)
        self.device.allocate(max_num_seqs + 1)
        for shape in self.plan.shapes:
            self.packer.prepare(self._shape(shape))
            self.device.compile(self._shape(shape))
        self.device.seal()
        self.free = list(range(max_num_seqs))
        self.running: list[Running] = []

    def _shape(self, shape: StepShape) -> StepShape:
        """With a draft, every decode is k+1 tokens wide."""
        width = self.num_tokens if shape.decode_rows else 1
        return StepShape(shape.decode_rows, width, shape.prefill_tokens, shape.context)

    # -- requests

    def start(self, prompt: list[int], **sampling: Any) -> Running:
        [request] = self.start_together([prompt], **sampling)
        return request

    def start_together(self, prompts: list[list[int]], **sampling: Any) -> list[Running]:
        """Prompts read in one step: in one call, as far as they fit."""
        requests = [Running(list(prompt), self.free.pop(0), sampling) for prompt in prompts]
        waiting = list(requests)
        given = [self.row(request, request.prompt, 0, is_decode=False) for request in requests]
        for rows, _ in split(Part.of(given), self.plan):
            self.call(list(rows), [waiting.pop(0) for _ in rows])
        self.running += requests
        return requests

    def decode(self, requests: list[Running] | None = None) -> None:
        """One token more, of every running request unless told otherwise."""
        requests = self.running if requests is None else requests
        rows = [self.row(request, request.all[-1:], len(request.all) - 1, is_decode=True) for request in requests]
        self.call(rows, requests)

    def end(self, request: Running) -> None:
        self.running.remove(request)
        self.free.append(request.slot)

    def generate(self, prompt: list[int], count: int, **sampling: Any) -> list[int]:
        """With whoever else is running."""
        request = self.start(prompt, **sampling)
        while len(request.tokens) < count:
            self.decode()
        self.end(request)
        return request.tokens[:count]

    # -- one call of the device

    def shape_of(self, rows: list[Row]) -> StepShape:
        return self._shape(self.plan.choose(demand_of(rows)))

    def packed(self, rows: list[Row]) -> PackedBatch:
        """In arrays of its own, which no later call reuses."""
        packer, shape = StepPacker(self.options.block_size, self.options.prompts_per_call), self.shape_of(rows)
        packer.prepare(shape)
        return packer.pack(rows, shape)

    def prompt_row(self, prompt: list[int], slot: int) -> Row:
        return self.row(Running(prompt, slot), prompt, 0, is_decode=False)

    def row(self, request: Running, tokens: list[int], position: int, *, is_decode: bool) -> Row:
        return Row(
            tokens=np.array(tokens, np.int32),
            position=position,
            blocks=np.array([request.slot + 1], np.int32),
            is_decode=is_decode,
            **{"want": Want.TOKEN, **request.sampling},
        )

    def call(self, rows: list[Row], requests: list[Running] | None = None) -> list[RowOutput]:
        shape = self.shape_of(rows)
        output = self.device.run(self.packer.pack(rows, shape))
        for place, request in self._places(rows, requests or [], shape):
            request.tokens += [int(token) for token in output.tokens[place] if token >= 0]
        return unpack(output, rows, shape)

    @staticmethod
    def _places(rows: list[Row], requests: list[Running], shape: StepShape) -> list[tuple[int, Running]]:
        first = 0 if rows[0].is_decode else shape.decode_rows
        return list(enumerate(requests, first))
