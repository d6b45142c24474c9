"""The graph's verbs, answered by recording: a model's graph becomes a flat program once, and is bound to a shape later.

A recorded value is a number and a width; `Recording.bind` gives each one a place in the workspace for the time it
lives, and returns the array of operations that the C library runs. The sets of rows (all tokens, the selected ones, a
slice of scored ones) have their size from the shape here, and their real length in every step.
Knows no checkpoint and no tensor: addresses and offsets only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..base import Float32, StepShape
from ..errors import DeviceError
from ..graph.ops import Activation, AttentionForm, LinearWeight, NormWeight
from .library import ACTIVATIONS, KINDS, NO_VALUE, OP, READ_AT_ONCE, ROW_SETS, SLICE_ROWS, TYPES
from .packer import Panels, Table, pointer

_ROWS_PER_ITEM = 48  # (query, head) rows that attend together: four tiles of twelve
_SCORES_PER_ITEM = 96 << 10  # floats, well within a core's second-level cache
_SCORE_MARGIN = 96  # floats beyond a row's scores, see `attention.h`
_LANES = 16
_WIDEST_PANEL = 32
_GROUP, _DOT_BLOCK = 4, 64  # a rounded row: words for each group of inputs, two for each block; see `dot.h`


Fields = dict[str, float | int]
"""Of `OP`, by name; what is not named is 0."""


@dataclass(frozen=True)
class Value:
    index: int
    width: int
    rows: str  # one of `library.ROW_SETS`

    @property
    def stride(self) -> int:
        """Floats from row to row. Rows a page apart would fall on the same lines of the cache."""
        padded = _round_up(self.width, _WIDEST_PANEL)
        return padded + _LANES if padded % 512 == 0 else padded


@dataclass(frozen=True)
class Recorded:
    """One operation: `OP` fields as they are, and the values it reads and writes."""

    kind: str
    rows: str
    fields: Fields
    x: Value | None = None
    y: Value | None = None
    residual: Value | None = None


@dataclass(frozen=True)
class Bound:
    """A recording in its places for one shape."""

    ops: NDArray[np.void]  # of `OP`
    workspace_bytes: int
    scratch_bytes: int  # of each thread
    queries_per_item: int
    logits_offset: int = 0  # bytes
    logits_stride: int = 0  # floats


_ADVANCE = Recorded("advance", "tokens", {})


class NativeOps:
    """See `graph.ops.Ops`. After `decoder.decode_step`, `recording` holds the graph."""

    def __init__(self) -> None:
        self.recording = Recording()

    def embed(self, table: Table, position_table: Table | None = None) -> Value:
        y = self._value(table.width, "tokens")
        fields: Fields = {"weight": pointer(table.values), "weight_type": TYPES.index(table.type), "out": table.width}
        if position_table is not None:
            fields["second"] = pointer(position_table.values)
            fields["second_type"] = TYPES.index(position_table.type)
        return self._record("embed", fields, y=y)

    def norm(self, x: Value, weight: NormWeight) -> Value:
        fields: Fields = {
            "weight": pointer(weight.weight),
            "bias": pointer(weight.bias),
            "in": x.width,
            "number": weight.epsilon,
            "kind_of_norm": ("rms", "layer").index(weight.kind),
        }
        return self._record("norm", fields, x=x, y=self._value(x.width, x.rows))

    def linear(
        self, x: Value, weight: LinearWeight, *, activation: Activation | None = None, residual: Value | None = None
    ) -> Value:
        packed: Panels = weight.packed
        fields: Fields = {
            "weight": packed.address,
            "weight_type": TYPES.index(packed.type),
            "scale": pointer(packed.scale),
            "bias": pointer(weight.bias),
            "in": weight.in_features,
            "out": weight.out_features,
            "activation": ACTIVATIONS.index(activation),
        }
        is_gate = activation in ("silu_gate", "gelu_gate")
        y = self._value(weight.out_features // 2 if is_gate else weight.out_features, x.rows)
        if packed.type == "uint8":
            return self._record("dot", fields, x=self._rounded(x), y=y, residual=residual)
        return self._record("linear", fields, x=x, y=y, residual=residual)

    def _rounded(self, x: Value) -> Value:
        """`x` in int8. A norm right before becomes part of the rounding."""
        groups, blocks = -(-x.width // _GROUP), -(-x.width // _DOT_BLOCK)
        rounded = self._value(2 * groups + 2 * blocks, x.rows)
        last = self.recording.ops[-1]
        if last.kind == "norm" and last.y == x and last.x is not None:
            self.recording.ops.pop()
            self.recording.absorbed.add(x)
            return self._record("round", last.fields, x=last.x, y=rounded)
        return self._record("round", {"in": x.width}, x=x, y=rounded)

    def head_norm(self, qkv: Value, form: AttentionForm, query: NormWeight, key: NormWeight) -> Value:
        fields = {**_heads(form), "weight": pointer(query.weight), "second": pointer(key.weight)}
        fields["number"] = query.epsilon
        return self._record("head_norm", fields, x=qkv, y=qkv)

    def rope(self, qkv: Value, form: AttentionForm, table: Float32) -> Value:
        """Taken along by `attend`, which touches the same numbers right after."""
        self.recording.rope_of = (qkv, pointer(table))
        return qkv

    def attend(self, qkv: Value, layer: int, form: AttentionForm) -> Value:
        of, table = self.recording.rope_of or (None, 0)
        if of is not None and of != qkv:
            raise DeviceError("the graph rotates one value and attends to another; the recorder expects the same")
        self.recording.rope_of = None
        place = {**_heads(form), "layer": layer, "weight": table}
        self._record("place", place, x=qkv, y=qkv)
        fields = {**_heads(form), "layer": layer, "number": form.scale, "window": form.window or 0}
        fields["first_key"] = form.first_key
        return self._record("attend", fields, x=qkv, y=self._value(form.num_heads * form.head_dim, "tokens"))

    def select(self, x: Value) -> Value:
        return self._record("select", {"in": x.width}, x=x, y=self._value(x.width, "selected"))

    def finish(self, x: Value, hidden: Value | None, norm: NormWeight, head: LinearWeight) -> None:
        logits = self.linear(self.norm(x, norm), head)
        self._record("sample", {"in": head.out_features}, x=logits, y=None)
        self.recording.logits = logits
        self.recording.slice_start = len(self.recording.ops)
        if hidden is None:
            return
        rows = self._record("gather", {"in": hidden.width}, x=hidden, y=self._value(hidden.width, "slice"))
        scores = self.linear(self.norm(rows, norm), head)
        self._record("score", {"in": head.out_features}, x=scores, y=None)

    def keep(self, x: Value) -> None:
        self._record("keep", {"in": x.width}, x=x)

    def recall(self, width: int) -> Value:
        """Its `x`, what the round before carried over, is known at the end of the recording."""
        return self._record("recall", {"in": width}, y=self._value(width, "tokens"))

    def join(self, left: Value, right: Value) -> Value:
        fields: Fields = {"in": left.width, "out": right.width}
        y = self._value(left.width + right.width, left.rows)
        return self._record("join", fields, x=left, y=y, residual=right)

    def guess(self, x: Value, head: LinearWeight, token_ids: NDArray[np.int32] | None, carried: Value | None) -> None:
        logits = self.linear(x, head)
        self._record("guess", {"in": head.out_features, "second": pointer(token_ids)}, x=logits)
        recording = self.recording
        recording.carried = carried
        recording.ops = [replace(op, x=carried) if op.kind == "recall" else op for op in recording.ops]

    def _value(self, width: int, rows: str) -> Value:
        value = Value(len(self.recording.values), width, rows)
        self.recording.values.append(value)
        return value

    def _record(
        self,
        kind: str,
        fields: Fields,
        x: Value | None = None,
        y: Value | None = None,
        residual: Value | None = None,
    ) -> Value:
        known = y or x
        assert known is not None
        if self.recording.absorbed.intersection((x, residual)):
            raise DeviceError("the graph reads a norm again that int8 products took in; there is one reader")
        self.recording.ops.append(Recorded(kind, known.rows, fields, x, y, residual))
        return known


@dataclass
class Recording:
    """A graph, whatever the shape. Filled by `NativeOps`."""

    values: list[Value] = field(default_factory=list)
    ops: list[Recorded] = field(default_factory=list)
    rope_of: tuple[Value, int] | None = None
    absorbed: set[Value | None] = field(default_factory=set)  # norms that exist in int8 alone
    logits: Value | None = None
    slice_start: int = 0  # the operations from here on are repeated for each slice of scored positions
    carried: Value | None = None  # from one round of a draft to the next

    def bind(self, shape: StepShape, num_prompts: int) -> Bound:
        assert self.logits is not None
        num_slices = -(-shape.prefill_tokens // SLICE_ROWS)
        ops = self.ops if num_slices else self.ops[: self.slice_start]
        num_rows = {
            "tokens": shape.num_tokens,
            "selected": shape.decode_rows * shape.decode_width + (num_prompts if shape.prefill_tokens else 0),
            "slice": SLICE_ROWS,
        }
        offsets, workspace_bytes = self._place_values(ops, num_rows)
        array = np.array([_fields(op, offsets) for op in ops], dtype=OP)
        if num_slices:
            slices = [array[: self.slice_start]]
            for index in range(num_slices):
                piece = array[self.slice_start :].copy()
                piece["slice"] = index
                slices.append(piece)
            array = np.concatenate(slices)
        bound = self._bound(array, workspace_bytes, shape.context)
        return replace(bound, logits_offset=int(offsets[self.logits.index]), logits_stride=self.logits.stride)

    def bind_draft(self, shape: StepShape, num_prompts: int, num_drafts: int) -> Bound:
        """A draft after a step of `shape`: the recording once for every round. The first reads what the draft has not
        read of each row that it is asked for, and the newest token, the others one token of each row."""
        num_rows = {
            "tokens": draft_tokens(shape, num_prompts),
            "selected": shape.decode_rows + (num_prompts if shape.prefill_tokens else 0),
        }
        offsets, workspace_bytes = self._place_values(self.ops, num_rows)
        rounds = [*self.ops, *[_ADVANCE, *self.ops] * (num_drafts - 1)]
        array = np.array([_fields(op, offsets) for op in rounds], dtype=OP)
        return self._bound(array, workspace_bytes, shape.context)

    def _bound(self, ops: NDArray[np.void], workspace_bytes: int, context: int) -> Bound:
        queries = self._queries_per_item(context)
        return Bound(ops, workspace_bytes, 4 * self._scratch_floats(queries, context), queries)

    def _place_values(self, ops: Sequence[Recorded], num_rows: dict[str, int]) -> tuple[NDArray[np.int64], int]:
        """A place for each value from the operation that makes it to the last that reads it; the logits stay,
        as does what every slice reads, and what is carried from round to round has its place all the time."""
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, op in enumerate(ops):
            for value in (op.x, op.y, op.residual):
                if value is not None:
                    born.setdefault(value.index, at)
                    last[value.index] = at
        for stays in (self.logits, self.carried, *self._read_by_every_slice()):
            if stays is not None:
                last[stays.index] = len(ops)
        if self.carried is not None:
            born[self.carried.index] = -1
        offsets = np.full(len(self.values), NO_VALUE, dtype=np.int64)
        living: list[tuple[int, int, int]] = []  # start, end, last
        end_of_all = 0
        for index, at in sorted(born.items(), key=lambda item: item[1]):
            value = self.values[index]
            size = num_rows[value.rows] * value.stride * 4 + 64  # 64: no two values start on the same cache set
            living = sorted(place for place in living if place[2] >= at)
            start = 0
            for begin, end, _ in living:
                if begin - start >= size:
                    break
                start = max(start, end)
            offsets[index] = start
            living.append((start, start + size, last[index]))
            end_of_all = max(end_of_all, start + size)
        return offsets, end_of_all

    def _read_by_every_slice(self) -> set[Value | None]:
        """Made before the first slice; the last one reads it too."""
        read = {value for op in self.ops[self.slice_start :] for value in (op.x, op.residual)}
        return read & {op.y for op in self.ops[: self.slice_start]}

    def _queries_per_item(self, context: int) -> int:
        group = max((_group(op) for op in self.ops if op.kind == "attend"), default=1)
        rows = min(_ROWS_PER_ITEM, _SCORES_PER_ITEM // (context + _SCORE_MARGIN))
        return max(1, rows // group)

    def _scratch_floats(self, queries: int, context: int) -> int:
        needs = [0]
        for op in self.ops:
            if op.kind == "linear" and op.fields["weight_type"] != TYPES.index("float32"):
                needs.append(int(op.fields["in"]) * _WIDEST_PANEL)
            elif op.kind == "round":
                needs.append(_round_up(int(op.fields["in"]), _LANES))
            elif op.kind == "attend":
                rows, dim = queries * _group(op), int(op.fields["head_dim"])
                needs.append(rows * (2 * _round_up(dim, 2 * _WIDEST_PANEL) + context + _SCORE_MARGIN) + _LANES)
            elif op.kind in ("sample", "score"):
                needs.append(4 * _round_up(int(op.fields["in"]), _LANES))
        return max(needs)


def draft_tokens(shape: StepShape, num_prompts: int) -> int:
    """Most tokens of a round: all of the step's, and a newest one for each row; or what a draft reads at once of what
    it has left unread."""
    prompts = shape.prefill_tokens and shape.prefill_tokens + num_prompts
    return max(shape.decode_rows * (shape.decode_width + 1) + prompts, READ_AT_ONCE)


def _fields(op: Recorded, offsets: NDArray[np.int64]) -> tuple[float | int, ...]:
    fields: Fields = {"kind": KINDS.index(op.kind), "rows": ROW_SETS.index(op.rows), **op.fields}
    fields["residual"] = NO_VALUE
    for name, value in (("x", op.x), ("y", op.y), ("residual", op.residual)):
        if value is not None:
            fields[name] = int(offsets[value.index])
            fields[f"{name}_stride"] = value.stride
    assert OP.names is not None
    return tuple(fields.get(name, 0) for name in OP.names)


def _heads(form: AttentionForm) -> Fields:
    return {"heads": form.num_heads, "kv_heads": form.num_kv_heads, "head_dim": form.head_dim}


def _group(op: Recorded) -> int:
    return int(op.fields["heads"]) // int(op.fields["kv_heads"])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
