"""EAGLE heads: one decoder layer that goes on from the model's own features, in the two published forms.

An entry of the head stands at the position of its token and reads two things: the token's embedding, and the feature of
the position before it. The first token of a request has no feature before it: published heads have no entry for it,
and here no other entry attends to the one that it has.

    EAGLE-1   feature  the model's hidden state after its final norm
              entry    x = fc [embedding; feature], a layer without a norm before its attention
              token    the likeliest by the model's head; the layer's result is the next feature
    EAGLE-3   feature  fc of the hidden states before three layers of the model
              entry    attention over [norm(embedding); norm(feature)], added to the feature
              token    by a norm and a head of its own; the layer's result before that norm is the next feature

A reduced draft vocabulary is a list of the tokens that the head's rows stand for. Knows no executor and no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ..base import DeviceOptions, Int32
from ..errors import LoadError
from .config_json import ConfigJson
from .decoder import Builder, Layer, Model, run_layer
from .names import NAMES
from .ops import LinearWeight, NormWeight, Ops, Packer, V
from .spec import ModelSpec, read_head_spec
from .weights import Checkpoint, GatheredRows

_FIRST_ENTRY = 1
_PREFIX = "model."  # some files have it before a head's names


@dataclass(frozen=True)
class EagleHead:
    """EAGLE-1. Its embeddings and its head's rows are the model's, unless the checkpoint has embeddings of its own."""

    spec: ModelSpec
    embedding: Any
    rope: Any
    fc: LinearWeight
    layer: Layer
    head: LinearWeight
    token_ids: Int32 | None
    taps: tuple[int, ...] = ()

    @property
    def feature_width(self) -> int:
        return self.spec.hidden_size

    def keep(self, ops: Ops[V], model: Model, hidden: V, tapped: Sequence[V]) -> None:
        ops.keep(ops.norm(hidden, model.norm))

    def guess(self, ops: Ops[V]) -> None:
        x = ops.linear(ops.join(ops.embed(self.embedding), ops.recall(self.feature_width)), self.fc)
        read = x if self.layer.attention_norm is None else ops.norm(x, self.layer.attention_norm)
        made = run_layer(ops, read, x, 0, self.layer, self, selects=True)
        ops.guess(made, self.head, self.token_ids, carried=made)


@dataclass(frozen=True)
class Eagle3Head:
    spec: ModelSpec
    embedding: Any
    rope: Any
    fc: LinearWeight  # of the model's hidden states
    feature_norm: NormWeight
    layer: Layer  # its attention's norm is that of embeddings
    norm: NormWeight
    head: LinearWeight
    token_ids: Int32 | None
    taps: tuple[int, ...]
    adds_to_normed: bool  # attention is added to the feature after its norm

    @property
    def feature_width(self) -> int:
        return self.spec.hidden_size

    def keep(self, ops: Ops[V], model: Model, hidden: V, tapped: Sequence[V]) -> None:
        first, *rest = tapped
        for states in rest:
            first = ops.join(first, states)
        ops.keep(ops.linear(first, self.fc))

    def guess(self, ops: Ops[V]) -> None:
        assert self.layer.attention_norm is not None
        embedded = ops.norm(ops.embed(self.embedding), self.layer.attention_norm)
        feature = ops.recall(self.feature_width)
        normed = ops.norm(feature, self.feature_norm)
        base = normed if self.adds_to_normed else feature
        made = run_layer(ops, ops.join(embedded, normed), base, 0, self.layer, self, selects=True)
        ops.guess(ops.norm(made, self.norm), self.head, self.token_ids, carried=made)


@dataclass(frozen=True)
class Target:
    """The model that a head was trained for, loaded from its directory."""

    directory: str
    model: Model

    def head_of(self, rows: Int32, options: DeviceOptions, packer: Packer) -> LinearWeight:
        """The model's head, of these tokens alone; from the checkpoint, as what is packed cannot be taken apart."""
        spec = self.model.spec
        with Checkpoint(self.directory, NAMES[spec.family].prefix) as checkpoint:
            builder = Builder(spec, checkpoint, packer, options)
            return packer.linear([GatheredRows(builder.head_rows(), rows)], quantize=builder.quantize)


def load_eagle(draft_dir: str, target: Target, options: DeviceOptions, packer: Packer) -> EagleHead:
    with _Loading(draft_dir, target, options, packer) as loading:
        spec, builder = loading.spec, loading.builder
        loading.check_width(spec.hidden_size)
        norm = None
        if loading.checkpoint.has("model.layers.0.input_layernorm.weight"):
            norm = builder.norm("model.layers.0.input_layernorm", spec.hidden_size)
        token_ids = loading.token_ids()
        return EagleHead(
            spec=spec,
            embedding=loading.embedding(),
            rope=builder.rope(),
            fc=loading.fc(2 * spec.hidden_size),
            layer=loading.layer("model.layers.0.", norm),
            head=loading.models_head(token_ids),
            token_ids=token_ids,
        )


def load_eagle3(draft_dir: str, target: Target, options: DeviceOptions, packer: Packer) -> Eagle3Head:
    with _Loading(draft_dir, target, options, packer) as loading:
        spec, builder, config = loading.spec, loading.builder, loading.config
        width = config.whole("target_hidden_size", default=spec.hidden_size)
        loading.check_width(width)
        _refuse_variants(config)
        at = "model.midlayer." if loading.checkpoint.has("model.midlayer.hidden_norm.weight") else "model.layers.0."
        taps = _taps(config, target.model.spec)
        token_ids = loading.token_ids()
        return Eagle3Head(
            spec=spec,
            embedding=loading.embedding(),
            rope=builder.rope(),
            fc=loading.fc(len(taps) * width),
            feature_norm=builder.norm(at + "hidden_norm", spec.hidden_size),
            layer=loading.layer(at, builder.norm(at + "input_layernorm", spec.hidden_size), 2 * spec.hidden_size),
            norm=builder.norm("model.norm", spec.hidden_size),
            head=loading.own_head(token_ids),
            token_ids=token_ids,
            taps=taps,
            adds_to_normed=config.flag("norm_before_residual", default=False),
        )


class _Loading:
    """What both forms do. A context manager, as a checkpoint is."""

    def __init__(self, draft_dir: str, target: Target, options: DeviceOptions, packer: Packer) -> None:
        self.config = ConfigJson.in_directory(draft_dir)
        self.spec = read_head_spec(self.config)
        self._draft_dir, self._target = draft_dir, target
        self._options, self._packer = options, packer
        self.check("a vocabulary of {} tokens", self.spec.vocab_size, target.model.spec.vocab_size)
        self.checkpoint = Checkpoint(draft_dir, _PREFIX, or_older=True)
        self.builder = Builder(self.spec, self.checkpoint, packer, options)

    def __enter__(self) -> _Loading:
        return self

    def __exit__(self, *exception: object) -> None:
        self.checkpoint.close()

    def check(self, what: str, heads: int, models: int) -> None:
        if heads != models:
            raise LoadError(
                f"the head {self._draft_dir} is for {what.format(heads)}, the model {self._target.directory} has "
                f"{models}; give a head that was trained for this model"
            )

    def check_width(self, width: int) -> None:
        self.check("hidden states of {} numbers", width, self._target.model.spec.hidden_size)

    def embedding(self) -> Any:
        if self.checkpoint.has("model.embed_tokens.weight"):
            return self._packer.table(self.builder.vocabulary("model.embed_tokens"))
        self.check_width(self.spec.hidden_size)
        return self._target.model.embedding

    def fc(self, inputs: int) -> LinearWeight:
        has_bias = self.checkpoint.has("model.fc.bias")
        return self.builder.linear(["model.fc"], (self.spec.hidden_size,), inputs, has_bias)

    def layer(self, at: str, norm: NormWeight | None, inputs: int | None = None) -> Layer:
        layer = self.builder.layer_at(at, 0, norm, inputs)
        return replace(layer, form=replace(layer.form, first_key=_FIRST_ENTRY))

    def token_ids(self) -> Int32 | None:
        """What the head's rows stand for; None: every token."""
        vocab_size = self.spec.vocab_size
        count = self.config.whole("draft_vocab_size", default=vocab_size)
        if count == vocab_size and not self.checkpoint.has("model.d2t"):
            return None
        ids = np.arange(count) + self.checkpoint.integers("model.d2t", count)
        if not 0 <= ids.min() <= ids.max() < vocab_size:
            raise LoadError(
                f"d2t in {self._draft_dir} leads to tokens {ids.min()} to {ids.max()}, the vocabulary has 0 to "
                f"{vocab_size - 1}; download it again"
            )
        return cast(Int32, ids.astype(np.int32))

    def models_head(self, token_ids: Int32 | None) -> LinearWeight:
        if token_ids is None:
            return self._target.model.head
        return self._target.head_of(token_ids, self._options, self._packer)

    def own_head(self, token_ids: Int32 | None) -> LinearWeight:
        if not self.checkpoint.has("lm_head.weight"):
            self.check_width(self.spec.hidden_size)
            return self.models_head(token_ids)
        count = self.spec.vocab_size if token_ids is None else len(token_ids)
        return self.builder.linear(["lm_head"], (count,), self.spec.hidden_size, has_bias=False)


def _taps(config: ConfigJson, model: ModelSpec) -> tuple[int, ...]:
    section = config.section("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    listed = config.get(key) or (section.get(key) if section is not None else None)
    if listed is None:
        layers = model.num_layers
        listed = [2, layers // 2, layers - 3]
    if not isinstance(listed, list) or not all(
        isinstance(layer, int) and 0 <= layer <= model.num_layers for layer in listed
    ):
        raise config.malformed(key, listed, f"a list of layers of the model, which has {model.num_layers}")
    return tuple(listed)


def _refuse_variants(config: ConfigJson) -> None:
    section = config.section("eagle_config")
    for key, usual in (("norm_before_fc", False), ("fc_norm", False), ("norm_output", False)):
        value = config.get(key) if section is None or section.get(key) is None else section.get(key)
        if value not in (None, usual):
            raise LoadError(f"{key} is {value!r} in {config.path}; EAGLE-3 heads with it are not supported")
    if section is not None and section.get("use_aux_hidden_state") is False:
        raise LoadError(f"use_aux_hidden_state is False in {config.path}; EAGLE-3 heads with it are not supported")
    if config.get("logit_scale") not in (None, 1, 1.0):
        raise LoadError(f"logit_scale is {config.get('logit_scale')!r} in {config.path}; it is not supported")
