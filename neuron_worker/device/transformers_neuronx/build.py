"""From shapes and options to compiled models: what the library is asked to build, and building it.

A context graph is as long as its shape's context: prompts run one by one, so the tokens a call may hold together do
not matter. Cache lines are `max_model_len` long; with a draft, k+1 positions longer, because a row at the last
position still drafts, and past its last bucket the library would write outside the cache without a word.

Where cores share the positions of a sequence (`shard_over_sequence`), those whose turn it is not write to the last
places of the bucket all the same. Only the last bucket has places to spare for that, so it is the only one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base import DeviceOptions, StepShape
from ..errors import DeviceError, DoesNotFit, LoadError
from . import draft_pair, neuron_config
from .artifacts import Artifacts, identity
from .checkpoint import Checkpoint
from .engine import PADDING, Engine, FusedEngine, PlainEngine, bring_up
from .neuron_config import AMPS, Role, Values
from .prompts import NARROWEST_WITH_EAGLE
from .sdk import Sdk

logger = logging.getLogger(__name__)


@dataclass
class Blueprint:
    """Made at `load`; takes shapes until it is built."""

    sdk: Sdk
    options: DeviceOptions
    target: Checkpoint
    draft: Checkpoint | None
    environ: Mapping[str, str]
    _context: set[int] = field(default_factory=set)
    _token_generation: set[int] = field(default_factory=set)
    _num_drafts: int = 0

    @classmethod
    def of(
        cls,
        sdk: Sdk,
        options: DeviceOptions,
        target: Checkpoint,
        draft: Checkpoint | None,
        environ: Mapping[str, str],
    ) -> Blueprint:
        if draft is not None:
            draft_pair.check(target, draft, options)
        blueprint = cls(sdk, options, target, draft, environ)
        _ = blueprint.fields(blueprint.target_role)  # refuses what is not served, before anything is read
        return blueprint

    # -- what is built

    @property
    def target_role(self) -> Role:
        if self.draft is None:
            return "alone"
        return "eagle_target" if self.draft.is_eagle else "target"

    @property
    def draft_role(self) -> Role:
        return "eagle_draft" if self.draft is not None and self.draft.is_eagle else "draft"

    @property
    def context_buckets(self) -> list[int]:
        return sorted(self._context)

    @property
    def positions(self) -> list[int]:
        """Token-generation buckets; the last is the length of a cache line."""
        longest = self.options.max_model_len
        past = self._num_drafts + 1 if self._num_drafts else 0
        if self._shares_sequences:
            return [longest + past]
        return [*sorted(size for size in self._token_generation if size < longest), longest + past]

    @property
    def _shares_sequences(self) -> bool:
        return bool(self.options.neuron_config.get("shard_over_sequence"))

    @property
    def sampling(self) -> Values | None:
        """The compiled sampler's fields; None: logits come back."""
        found: Values | None = self.fields(self.target_role).get("on_device_generation")
        return found

    def fields(self, role: Role) -> Values:
        checkpoint = self.draft if self.draft is not None and role == self.draft_role else self.target
        return neuron_config.values(self.options, checkpoint.hidden_size, role, checkpoint.architecture.layout)

    @property
    def notes(self) -> tuple[str, ...]:
        options, architecture = self.options, self.target.architecture
        notes = [f"weights are read and graphs compiled together, once all shapes are known, on {_cores(options)}"]
        if architecture.is_experimental:
            notes.append(f"{architecture.name} is experimental: the library's documents do not list it for serving")
        if self.sampling is not None:
            notes.append(
                f"sampling is compiled into the device: a top_k above {self.sampling.get('global_top_k')}, or none, "
                "keeps as many; no seeds, penalties, min_p, logprobs or grammars"
            )
        if self._shares_sequences:
            notes.append(
                "shard_over_sequence: every decode is at the longest token-generation bucket, as shorter ones would be "
                "overwritten at their ends"
            )
        obstacle = neuron_config.weight_tiling_obstacle(self.target.hidden_size)
        if options.quantization is not None and obstacle is not None:
            notes.append(f"int8 weights are not tiled: {obstacle}")
        if options.quantize_head:
            notes.append("quantize_head has no effect: the library keeps the head in the model's own type")
        return tuple(notes)

    # -- shapes

    def add(self, shape: StepShape) -> bool:
        """Whether the shape needs a graph that no shape before it needed."""
        self._check(shape)
        before = (self.context_buckets, self.positions)
        if shape.prefill_tokens:
            self._context.add(max(NARROWEST_WITH_EAGLE, shape.context))
        else:
            self._num_drafts = shape.decode_width - 1
            self._token_generation.add(shape.context)
        return (self.context_buckets, self.positions) != before

    def _check(self, shape: StepShape) -> None:
        options = self.options
        if shape.kind == "mixed":
            raise DeviceError(f"{shape}: the library reads prompts and decodes in separate calls; give two shapes")
        if shape.decode_rows > options.max_num_seqs:
            raise DoesNotFit(f"{shape} has more rows than --max-num-seqs ({options.max_num_seqs})")
        if shape.context > options.max_model_len:
            raise DoesNotFit(f"{shape} is longer than --max-model-len ({options.max_model_len})")
        if shape.decode_rows and self.draft is None and shape.decode_width > 1:
            raise DeviceError(f"{shape}: drafts are verified inside the device only; load a draft, or use a width of 1")
        if shape.decode_rows and self.draft is not None:
            self._check_drafts(shape)

    def _check_drafts(self, shape: StepShape) -> None:
        if shape.decode_width < 2 or (self._num_drafts and shape.decode_width != self._num_drafts + 1):
            raise DeviceError(f"{shape}: with a draft every decode shape is k+1 tokens wide, for one k of at least 1")

    # -- building

    def build(self) -> Engine:
        logger.info("compiling graphs: context %s, token generation %s", self.context_buckets, self.positions)
        target = self._model(self.target, self.target_role)
        if self.draft is None:
            return PlainEngine(target)
        draft = self._model(self.draft, self.draft_role)
        try:
            decoder = self.sdk.fused_decoder()(draft, target, self._num_drafts, pad_token_id=PADDING)
            decoder.to_neuron()
        except Exception as error:
            raise LoadError(f"the library refused the draft: {type(error).__name__}: {error}") from error
        return FusedEngine(decoder, self._num_drafts, is_eagle=self.draft.is_eagle)

    def _model(self, checkpoint: Checkpoint, role: Role) -> Any:
        fields, options = self.fields(role), self.options
        arguments = {
            "batch_size": options.max_num_seqs,
            "amp": AMPS[options.dtype],
            "tp_degree": options.tensor_parallel_size,
            "n_positions": self.positions,
            "context_length_estimate": self.context_buckets or 0,  # None would be half of the positions
        }
        architecture = checkpoint.architecture
        model_class = self.sdk.model_class(architecture.family, architecture.model_class)
        config = {**checkpoint.config, **checkpoint.changes}
        kept = Artifacts(
            options.artifacts,
            identity(config, fields, arguments, self.sdk.versions, self.environ),
            may_compile=not options.require_artifacts,
        )
        with checkpoint.as_the_library_reads_it() as directory:
            return bring_up(
                lambda: model_class.from_pretrained(
                    directory, neuron_config=neuron_config.build(self.sdk, fields), **arguments
                ),
                kept,
            )

    def generation_config(self, fields: Mapping[str, Any]) -> Any:
        return neuron_config.generation_config(self.sdk, fields)


def _cores(options: DeviceOptions) -> str:
    count = options.tensor_parallel_size
    return f"{count} cores" if count > 1 else "1 core"
