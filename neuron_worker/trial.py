"""A device brought up as a server brings it up, and requests taken through it greedily, without vLLM.

    Trial(device, config) ── bring_up(model_dir) ── read, advance ──▶ tokens

The plan, the packer and the calls are the server's own; only the scheduler is missing, and whoever holds a `Trial`
says what each step has in it. For `verify`. Knows no text and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from neuronserve.bucketing.pack import RowOutput, StepPacker, unpack
from neuronserve.bucketing.row import Row, int32
from neuronserve.bucketing.split import Part, split

from .config import NeuronConfig
from .device.base import Device, ModelFacts, Want
from .warmup import warm_up


@dataclass
class Request:
    tokens: list[int]  # the prompt, then what was generated
    blocks: list[int]
    want: Want | None = None  # of its last token; None: what a server asks for a greedy one
    computed: int = 0
    num_prompt: int = field(init=False)
    output: RowOutput | None = field(init=False, default=None)  # of the last step that gave a token

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Trial:
    def __init__(self, device: Device, config: NeuronConfig) -> None:
        self.device = device
        self.config = config
        self.plan = config.plan
        self.blocks_per_request = -(-config.max_model_len // config.block_size)
        self.num_blocks = 1 + config.max_num_seqs * self.blocks_per_request
        self.facts: ModelFacts
        self._packer = StepPacker(self.plan.block_size, self.plan.prompts_per_call)
        self.reset()

    def reset(self) -> None:
        """Forget every request."""
        self._free = list(range(1, self.num_blocks))

    def bring_up(self, model_dir: str) -> float:
        """Load, allocate, compile everything, seal; the seconds of the last two."""
        self.facts = self.device.load(model_dir, self.config.device_options())
        self.device.allocate(self.num_blocks)
        for shape in self.plan.shapes:
            self._packer.prepare(shape)
        return warm_up(self.device, self.plan.shapes, lambda line: None)

    def open(self, prompt: Sequence[int], want: Want | None = None) -> Request:
        taken, self._free = self._free[: self.blocks_per_request], self._free[self.blocks_per_request :]
        return Request(list(prompt), taken, want)

    def close(self, *requests: Request) -> None:
        for request in requests:
            self._free += request.blocks

    def step(self, work: Sequence[tuple[Request, int]]) -> None:
        """So many tokens of each request, in as many calls as the device needs."""
        works = sorted(work, key=lambda item: not _decodes(item[0]))  # decode rows come first
        outputs = self.run([self._row(request, count) for request, count in works])
        for (request, count), output in zip(works, outputs, strict=True):
            request.computed += count
            if request.computed == len(request.tokens):
                request.output = output
                request.tokens.append(token_of(output))

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        outputs = []
        for call, demand in split(Part.of(rows), self.plan):
            shape = self.plan.choose(demand)
            found = unpack(self.device.run(self._packer.pack(call, shape)), call, shape)
            # The device's arrays are its own until the next call.
            outputs += [_copied(output) for output in found]
        return outputs

    def read(self, request: Request, chunk: int | None = None) -> None:
        """The whole prompt, in one call where the device can, and its first token."""
        largest = chunk or self.plan.chunk_tokens or len(request.tokens)
        while not request.generated:
            self.step([(request, min(largest, len(request.tokens) - request.computed))])

    def advance(self, requests: Sequence[Request], count: int = 1) -> None:
        for _ in range(count):
            self.step([(request, 1) for request in requests])

    def alone(self, prompt: Sequence[int], count: int, chunk: int | None = None) -> list[int]:
        """`count` tokens after the prompt, with nobody beside it."""
        request = self.open(prompt)
        self.read(request, chunk)
        self.advance([request], count - 1)
        self.close(request)
        return request.generated

    def _row(self, request: Request, count: int) -> Row:
        end = request.computed + count
        wanted = request.want or (Want.LOGITS if self.config.sampling == "host" else Want.TOKEN)
        return Row(
            tokens=int32(request.tokens[request.computed : end]),
            position=request.computed,
            blocks=int32(request.blocks),
            is_decode=_decodes(request),
            want=wanted if end == len(request.tokens) else Want.NOTHING,
        )


def _decodes(request: Request) -> bool:
    return request.computed >= request.num_prompt


def token_of(output: RowOutput) -> int:
    return output.tokens[-1] if output.logits is None else int(np.argmax(output.logits[-1]))


def _copied(output: RowOutput) -> RowOutput:
    logits = None if output.logits is None else output.logits.copy()
    return RowOutput(output.tokens, logits, output.prompt_scores)
