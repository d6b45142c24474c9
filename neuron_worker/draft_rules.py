"""Whether a draft fits the model it is to draft for: each rule's error has both values in one line.

Reads config.json and tokenizer.json of both; knows no weights. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neuronserve.speculative.settings import DRAFT_MODEL, EAGLE, EAGLE3, Speculation

from .device.base import Capabilities
from .device.errors import DeviceError
from .device.graph.config_json import ConfigJson
from .device.graph.spec import ModelSpec, read_head_spec, read_spec
from .errors import ConfigError
from .footprint import DraftShape, HeadShape

TOKENIZER = "tokenizer.json"
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of tokenizers that are not compared."""
NUM_TAPS = 3  # layers whose hidden states an EAGLE-3 head reads


@dataclass(frozen=True)
class Pair:
    """A draft and its target, as they are to be served. Filled by `resolve`."""

    speculation: Speculation
    draft_dir: str
    target_dir: str
    target: ModelSpec
    max_model_len: int

    @property
    def draft(self) -> str:
        """As errors call it."""
        return f"speculative_model={self.speculation.model!r}"


def check(pair: Pair, capabilities: Capabilities) -> list[str]:
    """Refuse what cannot work; one line for each setting that has no effect."""
    if not (capabilities.drafts or capabilities.fused_speculation):
        raise ConfigError(
            f"{pair.draft}: the {capabilities.name} device runs no draft beside the model; leave it out, or use "
            "--speculative-model ngram"
        )
    try:
        if pair.speculation.method == DRAFT_MODEL:
            spec = read_spec(pair.draft_dir, capabilities.more_architectures)
            _check_model(pair, spec, may_stop_early=capabilities.drafts)
        elif pair.speculation.method == EAGLE3 and not capabilities.drafts:
            raise ConfigError(
                f"{pair.draft} is an EAGLE-3 head: the {capabilities.name} device reads EAGLE's first form alone "
                "(is_eagle: true in its config.json); give such a head, or a draft model"
            )
        else:
            _check_head(pair, ConfigJson.in_directory(pair.draft_dir))
    except DeviceError as error:
        raise ConfigError(f"{pair.draft}: {error}") from None
    return [*_check_tokenizer(pair), *_notes(pair, may_stop_early=capabilities.drafts)]


def size_of(speculation: Speculation | None, draft_dir: str | None, capabilities: Capabilities) -> DraftShape | None:
    """For a plan, of a draft that `check` has let pass."""
    if speculation is None or draft_dir is None:
        return None
    method = speculation.method
    if method == DRAFT_MODEL:
        return DraftShape(read_spec(draft_dir, capabilities.more_architectures))
    config = ConfigJson.in_directory(draft_dir)
    spec = read_head_spec(config)
    kept = config.whole("draft_vocab_size", default=spec.vocab_size)
    rows = 0 if kept == spec.vocab_size and method == EAGLE else kept
    width = config.whole("target_hidden_size", default=spec.hidden_size)
    return DraftShape(spec, HeadShape(NUM_TAPS * width if method == EAGLE3 else 2 * spec.hidden_size, rows))


def _check_model(pair: Pair, draft: ModelSpec, *, may_stop_early: bool) -> None:
    """`may_stop_early`: whether a sequence that is too long for the draft is decoded without it."""
    _check_vocabulary(pair, draft.vocab_size)
    length = pair.max_model_len
    limit = pair.speculation.max_length if may_stop_early else None
    if draft.longest >= length or (draft.rope is not None and limit is not None and limit <= draft.longest):
        return
    if draft.rope is None or not may_stop_early:
        remedy = f"use --max-model-len {draft.longest} or less"
    else:
        remedy = f"use --max-model-len {draft.longest}, or --speculative-max-model-len {draft.longest}"
        remedy += ", above which a sequence is decoded without drafts"
    raise ConfigError(
        f"{pair.draft} has positions for {draft.longest} tokens, the model is served with {length}: {remedy}"
    )


def _check_head(pair: Pair, head: ConfigJson) -> None:
    """An EAGLE head shares the target's positions, and reads its hidden states."""
    spec = read_head_spec(head)
    _check_vocabulary(pair, spec.vocab_size)
    width = spec.hidden_size
    if pair.speculation.method == EAGLE3:
        width = head.whole("target_hidden_size", default=width)
    if width != pair.target.hidden_size:
        raise ConfigError(
            f"{pair.draft} is a head for hidden states of {width} numbers, those of the model have "
            f"{pair.target.hidden_size}: give a head that was trained for this model"
        )


def _check_vocabulary(pair: Pair, vocab_size: int) -> None:
    if vocab_size != pair.target.vocab_size:
        raise ConfigError(
            f"{pair.draft} has a vocabulary of {vocab_size}, the model one of {pair.target.vocab_size}: give a draft "
            "with the model's own vocabulary"
        )


def _check_tokenizer(pair: Pair) -> list[str]:
    """Without the added tokens: models of one family name those that they do not use as they like. A line where a
    draft has a tokenizer that nothing here can compare; a head mostly has none, and is believed."""
    own, other = (Path(directory) / TOKENIZER for directory in (pair.draft_dir, pair.target_dir))
    if not own.is_file() or not other.is_file():
        if not any((own.parent / name).is_file() for name in (TOKENIZER, *OTHER_TOKENIZERS)):
            return []
        missing = other if own.is_file() else own
        return [f"{pair.draft}: its tokenizer is not compared with the model's, there is no {missing}"]
    if own.read_bytes() == other.read_bytes():
        return []
    draft, target = _tokens(own), _tokens(other)
    if draft == target:
        return []
    id = min(id for id in draft.keys() | target.keys() if draft.get(id) != target.get(id))
    raise ConfigError(
        f"{pair.draft} has another tokenizer: token {id} is {_shown(draft, id)} in {own} and {_shown(target, id)} in "
        f"{other}; give a draft of the same family"
    )


def _tokens(path: Path) -> dict[int, str]:
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=False)
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{path} is no tokenizer that can be read ({error}); download it again") from None
    return {id: token for token, id in vocabulary.items()}


def _shown(tokens: Mapping[int, str], id: int) -> str:
    return repr(tokens[id]) if id in tokens else "none"


def _notes(pair: Pair, *, may_stop_early: bool) -> list[str]:
    limit, longest = pair.speculation.max_length, pair.max_model_len
    if limit is None or limit == longest or (limit < longest and may_stop_early):
        return []
    why = f"no sequence is longer than {longest} tokens" if limit > longest else "every step of this device drafts"
    return [f"--speculative-max-model-len {limit} has no effect: {why}"]
