"""Whether a device answers what the model does: every size of prompt, every position, every graph, against `reference`.

The device is fed the reference's texts, so that one wrong answer does not change what comes after it. Logits are
compared where the device gives them; a token stands when the reference has none that is likelier by more than rounding.
A check gives the largest difference it has seen, for the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuronserve.bucketing.pack import RowOutput

from .checks import Bench, Failed, Skipped
from .device.base import Float32, Want
from .reference import NoReference, apart, below_the_likeliest
from .trial import Request, token_of

GAP = 3.0
"""So many times what a logit may differ, a token may be below the likeliest: both may have moved."""


def every_prompt(bench: Bench) -> str:
    """prompts that fill each size"""
    texts = _Texts(bench)
    for size in texts.prompt_sizes:
        prompts = texts.prompts(size, texts.logits)
        texts.step([(prompt, len(prompt.request.tokens)) for prompt in prompts])
        texts.close(prompts)
    return texts.summary


def every_position(bench: Bench) -> str:
    """each position to the last, decoded"""
    texts = _Texts(bench)
    live = texts.read([texts.open(0, 1), texts.open(1, 1, texts.logits)])
    while live[0].request.computed < texts.longest:
        texts.step([(reader, 1) for reader in live])
    return texts.summary


def every_graph(bench: Bench) -> str:
    """each number of rows at each context, alone and beside prompts of each size"""
    texts, plan = _Texts(bench), bench.config.plan
    for rows in texts.row_counts:
        for before in (1, *plan.contexts[:-1]):  # the next position is the first that needs the larger context
            live = texts.read(texts.rows(rows, before))
            texts.step([(reader, 1) for reader in live])
            texts.close(live)
    for rows in texts.row_counts if plan.mixes else ():
        for size in texts.prompt_sizes:
            live = texts.read(texts.rows(min(rows, plan.max_num_seqs - 1), 1))
            prompts = texts.prompts(size, beside=len(live))
            texts.step([(row, 1) for row in live] + [(prompt, len(prompt.request.tokens)) for prompt in prompts])
            texts.close([*live, *prompts])
    return texts.summary


CHECKS = (every_prompt, every_position, every_graph)


@dataclass
class _Reader:
    """A request that reads a text of the reference, whatever it generates."""

    request: Request
    text: Sequence[int]
    expected: Float32  # [tokens of the text, vocabulary]


class _Texts:
    """The reference's texts on the device under test, each answer compared as it comes."""

    def __init__(self, bench: Bench) -> None:
        try:
            self._reference = bench.reference()
        except NoReference as why:
            raise Skipped(str(why)) from None
        self._config, self._trial, self._plan = bench.config, bench.trial, bench.config.plan
        self._worst: float | None = None
        self._worst_token = 0.0
        self.longest = min(len(self._reference.texts[0]), self._plan.largest_prompt)

    @property
    def logits(self) -> Want | None:
        """Asked for where the device gives them."""
        return None if self._config.samples_by_its_own_rule else Want.LOGITS

    @property
    def prompt_sizes(self) -> list[int]:
        return [size for size in self._plan.prefill_tokens if size]

    @property
    def row_counts(self) -> list[int]:
        return [count for count in self._plan.decode_rows if count]

    @property
    def summary(self) -> str:
        by, allowed = self._reference.by, self._reference.allowed
        if self._worst is None:
            return f"tokens at most {self._worst_token:.1g} below the likeliest by {by}, {GAP * allowed:g} allowed"
        return f"logits within {self._worst:.1g} of {by}, {allowed:g} allowed"

    def open(self, index: int, length: int, want: Want | None = None) -> _Reader:
        text = self._reference.texts[index % len(self._reference.texts)]
        expected = self._reference.logits[index % len(self._reference.texts)]
        return _Reader(self._trial.open(text[:length], want), text, expected)

    def rows(self, count: int, length: int) -> list[_Reader]:
        """Every other one asked for its logits, the others for what a server asks."""
        return [self.open(index, length, self.logits if index % 2 else None) for index in range(count)]

    def prompts(self, size: int, want: Want | None = None, beside: int = 0) -> list[_Reader]:
        """As many tokens in one call as it holds, in as few prompts as that takes."""
        readers: list[_Reader] = []
        most = min(self._plan.prompts_per_call, self._plan.max_num_seqs - beside)
        while size and len(readers) < most:
            length = min(size, self.longest)
            readers.append(self.open(len(readers), length, want))
            size -= length
        return readers

    def read(self, readers: list[_Reader]) -> list[_Reader]:
        for reader in readers:
            self._trial.read(reader.request)
            self._compare(reader)
        return readers

    def step(self, work: Sequence[tuple[_Reader, int]]) -> None:
        self._trial.step([(reader.request, count) for reader, count in work])
        for reader, _ in work:
            self._compare(reader)

    def close(self, readers: Sequence[_Reader]) -> None:
        self._trial.close(*(reader.request for reader in readers))

    def _compare(self, reader: _Reader) -> None:
        """The newest answer; then the text's own token takes its place."""
        request, output = reader.request, reader.request.output
        assert output is not None
        self._judge(output, reader.expected[request.computed - 1], request)
        if request.computed < len(reader.text):
            request.tokens[-1] = reader.text[request.computed]

    def _judge(self, output: RowOutput, expected: Float32, request: Request) -> None:
        by, allowed = self._reference.by, self._reference.allowed
        token = token_of(output)
        below = below_the_likeliest(token, expected)
        where = f"after {request.computed} tokens, {request.num_prompt} of them the prompt"
        if output.logits is not None:
            distance = apart(output.logits[-1], expected)
            self._worst = max(self._worst or 0.0, distance)
            if distance > allowed:
                raise Failed(f"{where}: logits are {distance:.2g} of their spread from {by}, {allowed:g} is allowed")
        self._worst_token = max(self._worst_token, below)
        if below > GAP * allowed:
            raise Failed(
                f"{where}: token {token} is {below:.2g} of the logits' spread below the likeliest by {by}, "
                f"{GAP * allowed:g} is allowed"
            )
