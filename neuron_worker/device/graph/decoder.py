"""The decoder: one text for every architecture, from a specification and a checkpoint to a step's tokens.

`build_model` hands the checkpoint's tensors to a packer, layer by layer; `decode_step` is the graph, in the verbs of
`ops.py`. A draft beside the model (`draft.py`) may have its features kept on the way. Knows no executor, no batch and
no file format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..base import DeviceOptions
from ..errors import DoesNotFit, UnsupportedModel
from ..manifest import Manifest
from .names import NAMES, TensorNames
from .ops import AttentionForm, LinearWeight, Matrix, NormWeight, Ops, Packer, V
from .rope import rope_table
from .spec import ModelSpec, read_spec
from .weights import Checkpoint


class Tensors(Protocol):
    """A model's tensors by name: a `weights.Checkpoint`, or what stands for one."""

    def matrix(self, name: str, shape: tuple[int, int], *, transposed: bool = False) -> Matrix: ...

    def vector(self, name: str, size: int) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Layer:
    attention_norm: NormWeight | None
    qkv: LinearWeight
    head_norms: tuple[NormWeight, NormWeight] | None  # of queries, of keys
    form: AttentionForm
    output: LinearWeight
    mlp_norm: NormWeight
    up: LinearWeight  # with its gate, where there is one
    down: LinearWeight


@dataclass(frozen=True)
class Model:
    """Weights in an executor's own form. Filled by `build_model`."""

    spec: ModelSpec
    embedding: Any
    positions: Any | None  # a learned table
    rope: Any | None  # or rotary positions
    layers: tuple[Layer, ...]
    norm: NormWeight
    head: LinearWeight


class Reader(Protocol):
    """A draft that reads the model's features, kept in the cache by every step."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose input it reads too; their number is the input of one more."""

    def keep(self, ops: Ops[V], model: Model, hidden: V, tapped: Sequence[V]) -> None:
        """`hidden` [T, hidden] is before the final norm, `tapped` before the layers of `taps`."""


def decode_step(ops: Ops[V], model: Model, reader: Reader | None = None) -> None:
    """One step of the batch that `ops` holds. Its results are in `ops` afterwards."""
    x, tapped = hidden_states(ops, model, () if reader is None else reader.taps)
    if reader is not None:
        reader.keep(ops, model, x, tapped)
    ops.finish(ops.select(x), x, model.norm, model.head)


def lean_step(ops: Ops[V], model: Model) -> None:
    """The same where nobody reads features and no prompt is scored: the rows that give nothing are left behind in the
    last layer, once their keys and values are in the cache."""
    x, _ = hidden_states(ops, model, selects=True)
    ops.finish(x, None, model.norm, model.head)


def hidden_states(ops: Ops[V], model: Model, taps: Sequence[int] = (), *, selects: bool = False) -> tuple[V, list[V]]:
    """[T, hidden] after the last layer, before the final norm; and before each of the layers `taps`, in their order.
    `selects`: [N, hidden] of the selected rows alone."""
    tapped: dict[int, V] = {}
    x = ops.embed(model.embedding, model.positions)  # [tokens, hidden]
    for index, layer in enumerate(model.layers):
        if index in taps:
            tapped[index] = x
        read = x if layer.attention_norm is None else ops.norm(x, layer.attention_norm)
        x = run_layer(ops, read, x, index, layer, model, selects=selects and index == len(model.layers) - 1)
    tapped[len(model.layers)] = x
    return x, [tapped[index] for index in taps]


class Body(Protocol):
    """What a layer shares with the others of its model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def rope(self) -> Any | None: ...


def run_layer(ops: Ops[V], read: V, x: V, index: int, layer: Layer, body: Body, *, selects: bool = False) -> V:
    """Attention over `read`, then the MLP, each added to `x`. `selects`: only the selected rows go on after the
    attention, for which all rows leave their keys and values."""
    qkv = ops.linear(read, layer.qkv)
    if layer.head_norms is not None:
        qkv = ops.head_norm(qkv, layer.form, *layer.head_norms)
    if body.rope is not None:
        qkv = ops.rope(qkv, layer.form, body.rope)
    attended = ops.attend(qkv, index, layer.form)  # [tokens, heads * head_dim]
    if selects:
        attended, x = ops.select(attended), ops.select(x)
    x = ops.linear(attended, layer.output, residual=x)
    inner = ops.linear(ops.norm(x, layer.mlp_norm), layer.up, activation=body.spec.activation)
    return ops.linear(inner, layer.down, residual=x)


def load_model(model_dir: str | Path, options: DeviceOptions, packer: Packer) -> Model:
    """The model of a local Hugging Face directory, packed."""
    manifest = Manifest.read(model_dir)
    if manifest is not None:  # an export: its files are what they were, or they are not read
        manifest.check(model_dir, ["config.json", *manifest.plain_weights])
    spec = read_spec(model_dir)
    with Checkpoint(model_dir, NAMES[spec.family].prefix) as checkpoint:
        return build_model(spec, checkpoint, packer, options)


def build_model(spec: ModelSpec, checkpoint: Tensors, packer: Packer, options: DeviceOptions) -> Model:
    """Reads and packs every tensor once. The checkpoint may be closed afterwards."""
    if spec.rope is None and options.max_model_len > spec.max_positions:
        raise DoesNotFit(
            f"max_model_len is {options.max_model_len}, but {spec.architecture} here has learned positions for "
            f"{spec.max_positions} tokens; use --max-model-len {spec.max_positions} or less"
        )
    return Builder(spec, checkpoint, packer, options).model()


class Builder:
    """Reads and packs a model's parts by their names."""

    def __init__(self, spec: ModelSpec, checkpoint: Tensors, packer: Packer, options: DeviceOptions) -> None:
        if options.quantization not in (None, "int8"):
            raise UnsupportedModel(f"quantization is {options.quantization!r}; supported is int8")
        self.spec = spec
        self.names: TensorNames = NAMES[spec.family]
        self.checkpoint = checkpoint
        self.packer = packer
        self.quantize = options.quantization == "int8"
        self.quantize_head = self.quantize and options.quantize_head
        self.num_positions = options.max_model_len

    def model(self) -> Model:
        spec, names = self.spec, self.names
        return Model(
            spec=spec,
            embedding=self.packer.table(self.vocabulary(names.embedding)),
            positions=self.positions(),
            rope=self.rope(),
            layers=tuple(self.layer(index) for index in range(spec.num_layers)),
            norm=self.norm(names.norm, spec.hidden_size),
            head=self.packer.linear([self.head_rows()], quantize=self.quantize_head),
        )

    def vocabulary(self, name: str) -> Matrix:
        """[vocabulary, hidden]"""
        return self.checkpoint.matrix(name + ".weight", (self.spec.vocab_size, self.spec.hidden_size))

    def head_rows(self) -> Matrix:
        return self.vocabulary(self.names.embedding if self.spec.tied_head else self.names.head)

    def layer(self, index: int) -> Layer:
        at = self.names.layer.format(index)
        return self.layer_at(at, index, self.norm(at + self.names.attention_norm, self.spec.hidden_size))

    def layer_at(self, at: str, index: int, attention_norm: NormWeight | None, inputs: int | None = None) -> Layer:
        """`inputs`: the width that its attention reads, where that is not the model's."""
        spec, names = self.spec, self.names
        qkv_rows = (spec.query_size, spec.kv_size, spec.kv_size) if len(names.qkv) == 3 else (spec.qkv_size,)
        up_rows = (spec.intermediate_size,) * len(names.up)
        head_norms = None
        if spec.head_norm:
            head_norms = self.norm(at + names.query_norm, spec.head_dim), self.norm(at + names.key_norm, spec.head_dim)
        return Layer(
            attention_norm=attention_norm,
            qkv=self.linear([at + name for name in names.qkv], qkv_rows, inputs or spec.hidden_size, spec.qkv_bias),
            head_norms=head_norms,
            form=self.form(index),
            output=self.linear([at + names.output], (spec.hidden_size,), spec.query_size, spec.output_bias),
            mlp_norm=self.norm(at + names.mlp_norm, spec.hidden_size),
            up=self.linear([at + name for name in names.up], up_rows, spec.hidden_size, spec.mlp_bias, spec.is_gated),
            down=self.linear([at + names.down], (spec.hidden_size,), spec.intermediate_size, spec.mlp_bias),
        )

    def form(self, index: int) -> AttentionForm:
        spec = self.spec
        return AttentionForm(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scales[index], spec.windows[index]
        )

    def linear(
        self, names: list[str], rows: tuple[int, ...], columns: int, has_bias: bool, gate: bool = False
    ) -> LinearWeight:
        transposed = self.names.transposed
        parts = [
            self.checkpoint.matrix(name + ".weight", (count, columns), transposed=transposed)
            for name, count in zip(names, rows, strict=True)
        ]
        bias: NDArray[np.float32] | None = None
        if has_bias:
            vectors = [self.checkpoint.vector(name + ".bias", n) for name, n in zip(names, rows, strict=True)]
            bias = np.concatenate(vectors)
        return self.packer.linear(parts, bias, quantize=self.quantize, gate=gate)

    def norm(self, name: str, size: int) -> NormWeight:
        weight = self.checkpoint.vector(name + ".weight", size)
        bias = self.checkpoint.vector(name + ".bias", size) if self.spec.norm == "layer" else None
        return self.packer.norm(self.spec.norm, self.spec.epsilon, weight, bias)

    def positions(self) -> Any | None:
        if self.spec.rope is not None:
            return None
        shape = (self.spec.max_positions, self.spec.hidden_size)
        return self.packer.table(self.checkpoint.matrix(self.names.positions + ".weight", shape))

    def rope(self) -> Any | None:
        if self.spec.rope is None:
            return None
        return self.packer.rope_table(rope_table(self.spec.rope, self.spec.head_dim, self.num_positions))
