"""The plan of shapes: every static graph that will be compiled, decided before anything is loaded.

A function of the limits a user gave and the device's capabilities alone, so that platform, scheduler, worker
and the `plan` command agree without talking to each other. On the hot path, `Plan.choose` picks the cheapest
compiled shape that holds a step.

Knows no vLLM, no weights and no requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from neuronserve.neuron_worker.device.base import Capabilities, StepShape

from . import ladder
from .axes import Axes
from .errors import BadBuckets, DoesNotFit, TooManyShapes
from .shape import StepDemand, holds

MAX_GRAPHS = 256
"""More are refused even when asked for."""

SMALLEST_CONTEXT = 128
FINE_CHUNK_TOKENS = 256
CHUNK_TOKENS = 512

CONTEXT_KEY = "NEURON_CONTEXT_LENGTH_BUCKETS"
TOKEN_GENERATION_KEY = "NEURON_TOKEN_GEN_BUCKETS"


@dataclass(frozen=True)
class PlanRequest:
    """The user's limits. Filled by the platform from vLLM's configuration; None: the default."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    chunk_tokens: int | None = None  # largest prefill part of a step, where prompts can be split
    context_buckets: tuple[int, ...] | None = None
    token_generation_buckets: tuple[int, ...] | None = None
    decode_width: int = 1  # k+1 when verifying k drafts

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "block_size", "chunk_tokens", "decode_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadBuckets(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class Plan:
    """Made by `make_plan`, in every process anew from the same values."""

    shapes: tuple[StepShape, ...]  # sorted
    max_num_seqs: int
    max_model_len: int
    block_size: int
    prompts_per_call: int
    chunk_tokens: int | None  # None: a prompt goes whole, in one call
    notes: tuple[str, ...] = ()  # one line each, for the log
    _chosen: dict[tuple[int, int, int, int], StepShape | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def decode_rows(self) -> tuple[int, ...]:
        """0 among them: a step without decode rows has no width, so `_find` must tell it apart."""
        return _distinct((0, *(shape.decode_rows for shape in self.shapes)))

    @cached_property
    def decode_widths(self) -> tuple[int, ...]:
        return _distinct(shape.decode_width for shape in self.shapes if shape.decode_rows)

    @cached_property
    def prefill_tokens(self) -> tuple[int, ...]:
        return _distinct(shape.prefill_tokens for shape in self.shapes)

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        return _distinct(shape.context for shape in self.shapes)

    def decode_rows_of(self, count: int) -> int:
        """What a step of so many decode rows is compiled for."""
        return self.decode_rows[min(bisect_left(self.decode_rows, count), len(self.decode_rows) - 1)]

    @property
    def max_decode_rows(self) -> int:
        return self.decode_rows[-1]

    @property
    def max_decode_width(self) -> int:
        return self.decode_widths[-1]

    @property
    def max_prefill_tokens(self) -> int:
        """Prompt tokens one call may hold."""
        return self.prefill_tokens[-1]

    @property
    def largest_prompt(self) -> int:
        """The longest prompt (a preempted one counts with its output) that can be served."""
        return self.max_model_len if self.chunk_tokens is not None else self.max_prefill_tokens

    @property
    def step_tokens(self) -> int:
        """What the scheduler may put in one step, decode and prompt tokens together."""
        prefill = self.max_model_len if self.chunk_tokens is None else self.chunk_tokens
        return max(prefill, self.max_decode_rows * self.max_decode_width)

    @cached_property
    def mixes(self) -> bool:
        """Whether one call may hold decode rows and prompt tokens."""
        return any(shape.kind == "mixed" for shape in self.shapes)

    def choose(self, demand: StepDemand) -> StepShape:
        """The cheapest compiled shape that holds `demand`: fewest tokens, then the shortest context."""
        shape = self._find(demand)
        if shape is None:
            raise DoesNotFit(self._why_not(demand))
        return shape

    def covers(self, demand: StepDemand) -> bool:
        """Whether one call can compute `demand`."""
        return self._find(demand) is not None

    def _find(self, demand: StepDemand) -> StepShape | None:
        # Shapes differ only in ladder sizes, so every demand between two sizes has the same answer.
        rows = bisect_left(self.decode_rows, demand.decode_rows)
        width = bisect_left(self.decode_widths, demand.decode_width) if rows else 0
        tokens = bisect_left(self.prefill_tokens, demand.prefill_tokens)
        key = (rows, width, tokens, bisect_left(self.contexts, demand.context))
        try:
            return self._chosen[key]
        except KeyError:
            found = min((shape for shape in self.shapes if holds(shape, demand)), key=cost, default=None)
            return self._chosen.setdefault(key, found)

    def _why_not(self, demand: StepDemand) -> str:
        if demand.decode_rows and demand.prefill_tokens and not self.mixes:
            return f"this device computes decode rows and prompts in separate calls; split the step ({demand})"
        limits = (
            ("decode rows", demand.decode_rows, self.max_decode_rows, "raise --max-num-seqs"),
            ("tokens per decode row", demand.decode_width, self.max_decode_width, "draft fewer tokens"),
            ("prompt tokens", demand.prefill_tokens, self.max_prefill_tokens, f"add a bucket to {CONTEXT_KEY}"),
            ("positions", demand.context, self.contexts[-1], f"add a bucket to {TOKEN_GENERATION_KEY}"),
        )
        for what, wanted, largest, remedy in limits:
            if wanted > largest:
                return f"{wanted} {what}, largest compiled size is {largest}; {remedy} or shorten the input"
        return f"no compiled shape holds {demand}; split the step"


def cost(shape: StepShape) -> tuple[int, int, StepShape]:
    """Order of preference: linear layers see every token, attention every position; ties are broken for good."""
    return (shape.num_tokens, shape.context, shape)


def make_plan(request: PlanRequest, capabilities: Capabilities) -> Plan:
    """The shapes for `request` on a device of these capabilities."""
    prompts = _prompts_per_call(request, capabilities)
    notes: list[str] = []
    contexts = _context_ladder(request, notes)
    chunk, prefill = _prefill_ladder(request, capabilities, prompts, notes)
    axes = Axes(
        contexts=contexts,
        decode_rows=_row_ladder(request, capabilities),
        decode_widths=_width_ladder(request, capabilities),
        prefill=prefill,
        mixes=capabilities.mixes_prefill_and_decode,
        max_context=request.max_model_len,
        whole_prompts=chunk is None,
        given=frozenset(
            name
            for name, buckets in (("contexts", request.token_generation_buckets), ("prefill", request.context_buckets))
            if buckets is not None
        ),
    ).thinned(capabilities.default_max_graphs, MAX_GRAPHS)
    if axes.num_graphs > MAX_GRAPHS:
        raise TooManyShapes(
            f"{axes.num_graphs} graphs ({axes.describe()}), at most {MAX_GRAPHS} are compiled; "
            f"give fewer values in {CONTEXT_KEY} and {TOKEN_GENERATION_KEY}"
        )
    return Plan(
        shapes=axes.shapes(),
        max_num_seqs=request.max_num_seqs,
        max_model_len=request.max_model_len,
        block_size=request.block_size,
        prompts_per_call=prompts,
        chunk_tokens=chunk,
        notes=tuple(notes),
    )


def _prompts_per_call(request: PlanRequest, capabilities: Capabilities) -> int:
    return min(request.max_num_seqs, capabilities.prompts_per_prefill or request.max_num_seqs)


def _row_ladder(request: PlanRequest, capabilities: Capabilities) -> tuple[int, ...]:
    # A chip reads all weights whatever the number of rows: one batch size, graphs are better spent on lengths.
    if capabilities.all_live_rows_in_decode or capabilities.on_chip:
        return (request.max_num_seqs,)
    return ladder.powers_of_two(request.max_num_seqs)


def _width_ladder(request: PlanRequest, capabilities: Capabilities) -> tuple[int, ...]:
    """Where drafts are made inside a call, every call makes them."""
    if request.decode_width == 1 or capabilities.fused_speculation:
        return (request.decode_width,)
    return (1, request.decode_width)


def _context_ladder(request: PlanRequest, notes: list[str]) -> tuple[int, ...]:
    """Positions a decode may attend to. A row may reach max_model_len, so a bucket must."""
    limit = request.max_model_len
    if request.token_generation_buckets is None:
        return ladder.powers_of_two(limit, SMALLEST_CONTEXT)
    given = ladder.as_given(request.token_generation_buckets, TOKEN_GENERATION_KEY)
    if given[-1] < limit:
        raise BadBuckets(
            f"{TOKEN_GENERATION_KEY}={_text(given)}: none is large enough for --max-model-len {limit}; "
            f"add {limit}, or serve with --max-model-len {given[-1]}"
        )
    return _lowered(given, limit, TOKEN_GENERATION_KEY, notes)


def _prefill_ladder(
    request: PlanRequest, capabilities: Capabilities, prompts: int, notes: list[str]
) -> tuple[int | None, tuple[int, ...]]:
    """(chunk width or None, sizes of the prefill part)."""
    limit = request.max_model_len
    given = request.context_buckets
    if given is not None:
        given = _lowered(ladder.as_given(given, CONTEXT_KEY), limit, CONTEXT_KEY, notes)
    if not capabilities.splits_prompts:
        if request.chunk_tokens is not None:
            notes.append(f"chunk_tokens={request.chunk_tokens} has no effect: {capabilities.name} takes prompts whole")
        if given is not None and given[-1] < limit:
            notes.append(
                f"prompts above {given[-1]} tokens will be refused: {CONTEXT_KEY}={_text(given)} on {capabilities.name}"
            )
        return None, given or ladder.powers_of_two(limit, SMALLEST_CONTEXT)
    if given is not None:
        return _given_chunks(request.chunk_tokens, given, notes)
    default = FINE_CHUNK_TOKENS if capabilities.fine_prefill_ladder else CHUNK_TOKENS
    chunk = min(request.chunk_tokens or default, limit * prompts)
    sizes = ladder.fine(chunk) if capabilities.fine_prefill_ladder else ladder.powers_of_two(chunk, 32)
    return chunk, sizes


def _given_chunks(chunk: int | None, given: tuple[int, ...], notes: list[str]) -> tuple[int, tuple[int, ...]]:
    """Where prompts are split, the user's context buckets are chunk widths."""
    if chunk is None or chunk == given[-1]:
        return given[-1], given
    if chunk > given[-1]:
        notes.append(f"chunks of {given[-1]} tokens, not {chunk}: the largest of {CONTEXT_KEY}={_text(given)}")
        return given[-1], given
    kept = given[: bisect_left(given, chunk) + 1]
    if kept != given:
        notes.append(f"{CONTEXT_KEY}: {_text(given[len(kept) :])} not used with chunks of {chunk} tokens")
    return chunk, kept


def _lowered(given: tuple[int, ...], limit: int, key: str, notes: list[str]) -> tuple[int, ...]:
    """Buckets above the limit do what one of exactly the limit does."""
    kept = tuple(size for size in given if size <= limit)
    if len(kept) == len(given):
        return given
    notes.append(f"{key}: {_text(given[len(kept) :])} lowered to --max-model-len {limit}")
    return kept if kept and kept[-1] == limit else (*kept, limit)


def _text(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))
