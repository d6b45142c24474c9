"""Drafts beside a model: what is loaded for one, and its graph in the verbs of `ops.py`.

Two kinds: a model of its own (`DraftModel`), and an EAGLE head, which reads the model's features (`eagle.py`). Both
cache keys and values in the model's blocks. Knows no executor and no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..base import DeviceOptions
from ..draft_rows import check_draft_options
from ..errors import LoadError
from .config_json import ConfigJson
from .decoder import Model, hidden_states, load_model
from .eagle import Target, load_eagle, load_eagle3
from .ops import Ops, Packer, V
from .spec import ModelSpec


class Draft(Protocol):
    @property
    def spec(self) -> ModelSpec:
        """Of what it caches."""

    @property
    def feature_width(self) -> int:
        """Of the model's features that it reads; 0: none."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    def keep(self, ops: Ops[V], model: Model, hidden: V, tapped: Sequence[V]) -> None: ...

    def guess(self, ops: Ops[V]) -> None:
        """One round: reads the tokens that `ops` holds, and guesses what follows each selected row."""


@dataclass(frozen=True)
class DraftModel:
    """A model like any other."""

    model: Model
    feature_width: int = 0
    taps: tuple[int, ...] = ()

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def keep(self, ops: Ops[V], model: Model, hidden: V, tapped: Sequence[V]) -> None:
        """Reads no features."""

    def guess(self, ops: Ops[V]) -> None:
        hidden, _ = hidden_states(ops, self.model, selects=True)
        ops.guess(ops.norm(hidden, self.model.norm), self.model.head, None, None)


def form_of(config: ConfigJson) -> Literal["model", "eagle", "eagle3"]:
    """What a draft's config.json says it is, whatever its directory is called."""
    names = [str(name) for name in config.get("architectures") or ()]
    if any("eagle3" in name.lower() for name in names):
        return "eagle3"
    if config.flag("is_eagle", default=False) or any("eagle" in name.lower() for name in names):
        return "eagle"
    return "eagle3" if config.has("draft_vocab_size") else "model"


def load_draft(draft_dir: str, model_dir: str, model: Model, options: DeviceOptions, packer: Packer) -> Draft:
    """The draft in `draft_dir` for the model, which is loaded; `LoadError` with both values where they do not fit."""
    check_draft_options(draft_dir, options)
    form = form_of(ConfigJson.in_directory(draft_dir))
    if form == "eagle":
        return load_eagle(draft_dir, Target(model_dir, model), options, packer)
    if form == "eagle3":
        return load_eagle3(draft_dir, Target(model_dir, model), options, packer)
    draft = DraftModel(load_model(draft_dir, options, packer))
    if draft.spec.vocab_size != model.spec.vocab_size:
        raise LoadError(
            f"the draft {draft_dir} has a vocabulary of {draft.spec.vocab_size}, the model {model_dir} one of "
            f"{model.spec.vocab_size}; give a draft with the model's vocabulary"
        )
    return draft
