"""A device whose answers can be worked out on paper, for tests. numpy alone, no weights.

It keeps the token ids themselves in the cache it is given, block by block, and answers from what it reads
back. With the context t_0 ... t_n (position n is the row's last token), the next token is

    RESERVED + (1 * t_0 + 2 * t_1 + ... + (n + 1) * t_n)  mod  (vocabulary - RESERVED)

so [3, 4] in a vocabulary of 103 gives 3 + (3 + 8) mod 100 = 14. A wrong block, a wrong position, another row's
token or padding written into a request's cache changes the answer; cache that was never written is poison.
Ids below RESERVED (padding, begin, end) are never the most likely answer.

Its distribution is known too: from the answer upwards, around the vocabulary, each id is half as likely as
the one before: 1/2, 1/4, 1/8, ...

A draft may be loaded beside it: `arithmetic_cache.ArithmeticDraft`, right three times of four.

The same class plays a device of whole slots that neither mixes nor splits prompts: pass `SLOT_CAPABILITIES`.
It refuses whatever its capabilities say it cannot do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from .arithmetic_cache import ArithmeticDraft, Int64, TokenCache
from .base import (
    SCRATCH_BLOCK,
    Capabilities,
    DecodePart,
    DeviceOptions,
    DeviceOutput,
    DraftRequest,
    Float32,
    Int32,
    ModelFacts,
    PackedBatch,
    PrefillPart,
    PromptScores,
    RowSampling,
    StepShape,
    Want,
)
from .draft_rows import check_draft_options, draft_rows, no_draft, not_the_last
from .errors import DeviceError, DoesNotFit, LoadError, UncompiledShape

RESERVED = 3

CAPABILITIES = Capabilities(
    name="arithmetic",
    on_chip=False,
    kv_layout="blocks",
    mixes_prefill_and_decode=True,
    splits_prompts=True,
    all_live_rows_in_decode=False,
    prompts_per_prefill=None,
    outputs=("logits", "tokens"),
    sampling="per_step",
    max_top_k=None,
    prompt_logprobs=True,
    drafts=True,
    fused_speculation=False,
    tensor_parallel_degrees=None,
    default_max_num_seqs=8,
    default_max_graphs=64,
    fine_prefill_ladder=True,
)

SLOT_CAPABILITIES = replace(
    CAPABILITIES,
    name="arithmetic-slots",
    kv_layout="slots",
    mixes_prefill_and_decode=False,
    splits_prompts=False,
    all_live_rows_in_decode=True,
    prompts_per_prefill=1,
    drafts=False,
    default_max_graphs=8,
    fine_prefill_ladder=False,
)


def answer(context: Sequence[int] | Int64, vocab_size: int) -> int:
    """The rule above, for whoever checks the device."""
    tokens = np.asarray(context, dtype=np.int64)
    weights = np.arange(1, len(tokens) + 1, dtype=np.int64)
    return RESERVED + int((tokens * weights).sum()) % (vocab_size - RESERVED)


def sample(logits: Float32, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Temperature, min_p, top_k, top_p, then the inverse of the cumulative distribution in order of token ids."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)  # the likeliest is 1
    weights[weights < min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]  # likelier than the token, in total
        weights[order[(before >= top_p * weights.sum()) & (before > 0)]] = 0
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


class ArithmeticDevice:
    def __init__(self, capabilities: Capabilities = CAPABILITIES) -> None:
        self._capabilities = capabilities
        self._options: DeviceOptions | None = None
        self._cache: TokenCache | None = None
        self._draft: ArithmeticDraft | None = None
        self._draft_cache: TokenCache | None = None
        self._shapes: set[StepShape] = set()
        self._ran: StepShape | None = None
        self._sealed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        if draft_dir is not None and not self._capabilities.drafts:
            raise LoadError(f"draft={draft_dir!r}: the {self._capabilities.name} device loads no draft; leave it out")
        config = self._read_config(Path(model_dir))
        self._vocab_size = int(config["vocab_size"])
        self._draft = None if draft_dir is None else self._make_draft(model_dir, draft_dir, options)
        self._options = options
        self._ramp = (-np.log(2) * np.arange(self._vocab_size)).astype(np.float32)
        return ModelFacts(
            architecture="Arithmetic",
            vocab_size=self._vocab_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            bytes_per_kv_token=8 if self._draft is None else 16,
            weight_bytes=0,
            compute_dtype="float32",
            notes=(f"the {self._capabilities.name} device reads no weights and computes no model",),
        )

    def _make_draft(self, model_dir: str, draft_dir: str, options: DeviceOptions) -> ArithmeticDraft:
        check_draft_options(draft_dir, options)
        vocab_size = int(self._read_config(Path(draft_dir))["vocab_size"])
        if vocab_size != self._vocab_size:
            raise LoadError(
                f"the draft {draft_dir} has a vocabulary of {vocab_size}, the model {model_dir} one of "
                f"{self._vocab_size}; give a draft with the model's vocabulary"
            )
        return ArithmeticDraft(lambda context: answer(context, vocab_size), vocab_size, options.num_drafts)

    @staticmethod
    def _read_config(model_dir: Path) -> dict[str, int]:
        path = model_dir / "config.json"
        try:
            config: dict[str, int] = json.loads(path.read_text())
            config["vocab_size"] = int(config["vocab_size"])
        except (OSError, ValueError, KeyError) as error:
            raise LoadError(f"{path}: no readable vocab_size ({error}); give a Hugging Face model directory") from error
        return config

    def allocate(self, num_blocks: int) -> None:
        if self._options is None:
            raise DeviceError("the cache cannot be allocated before a model is loaded; call load first")
        self._cache = TokenCache(num_blocks, self._options.block_size)
        self._draft_cache = TokenCache(num_blocks, self._options.block_size) if self._draft is not None else None
        self._live_slots: set[int] = set()

    def compile(self, shape: StepShape) -> None:
        if self._sealed:
            raise UncompiledShape(f"{shape} cannot be compiled after the device was sealed")
        if self._options is None:
            raise DeviceError(f"{shape} cannot be compiled before a model is loaded; call load first")
        self._shapes.add(shape)

    def seal(self) -> None:
        self._sealed = True

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._allocated().copy(pairs)
        if self._draft_cache is not None:
            self._draft_cache.copy(pairs)

    def close(self) -> None:
        self._shapes.clear()

    def draft(self, batch: PackedBatch, request: DraftRequest) -> Int32:
        self._check(batch)
        if self._draft is None or self._draft_cache is None:
            raise no_draft()
        if self._ran != batch.shape:
            raise not_the_last(batch.shape)
        return self._draft.run(self._draft_cache, draft_rows(batch, request, self._vocab_size))

    def _allocated(self) -> TokenCache:
        if self._cache is None:
            raise DeviceError("run before allocate: there is no cache")
        return self._cache

    def run(self, batch: PackedBatch) -> DeviceOutput:
        started = time.perf_counter()
        self._check(batch)
        self._ran = batch.shape
        rows = self._write(batch)
        contexts = [self._allocated().context(blocks, start + length) for blocks, start, length in rows]
        answers = [self._answers(context, length) for context, (_, _, length) in zip(contexts, rows, strict=True)]
        tokens, logits = self._end_rows(batch, answers)
        scores = self._score_prompts(batch, answers)
        return DeviceOutput(tokens, logits, scores, device_seconds=time.perf_counter() - started)

    def _check(self, batch: PackedBatch) -> None:
        shape, can = batch.shape, self._capabilities
        if shape not in self._shapes:
            raise UncompiledShape(f"{shape} was not compiled; compiled: {sorted(self._shapes)}")
        self._allocated()
        if batch.decode is not None and batch.decode.tokens.shape != (shape.decode_rows, shape.decode_width):
            raise DeviceError(f"decode tokens are {batch.decode.tokens.shape}, the shape is {shape}")
        if batch.prefill is not None and batch.prefill.tokens.shape != (shape.prefill_tokens,):
            raise DeviceError(f"prefill tokens are {batch.prefill.tokens.shape}, the shape is {shape}")
        if shape.kind == "mixed" and not can.mixes_prefill_and_decode:
            raise DeviceError(f"{can.name} cannot mix prefill and decode in one call: {shape}")
        if batch.prefill is not None:
            self._check_prompts(batch.prefill)

    def _check_prompts(self, prefill: PrefillPart) -> None:
        can, real = self._capabilities, prefill.lengths > 0
        if not can.splits_prompts and prefill.positions[real].any():
            raise DeviceError(f"{can.name} cannot start a prompt at position {prefill.positions[real].max()}")
        if can.prompts_per_prefill is not None and real.sum() > can.prompts_per_prefill:
            raise DeviceError(f"{can.name} takes {can.prompts_per_prefill} prompts in a call, got {real.sum()}")

    def _write(self, batch: PackedBatch) -> list[tuple[Int32, int, int]]:
        """Store the step's tokens; the rows in order as (blocks, first position, length), length 0 for padding."""
        rows: list[tuple[Int32, int, int]] = []
        if (decode := batch.decode) is not None:
            for row, (start, length) in enumerate(zip(decode.positions.tolist(), decode.lengths.tolist(), strict=True)):
                self._store(decode.blocks[row], start, decode.tokens[row, :length], batch.shape)
                rows.append((decode.blocks[row], start, length))
            self._lose_slots_left_out(decode)
        if (prefill := batch.prefill) is not None:
            places = zip(prefill.starts.tolist(), prefill.positions.tolist(), prefill.lengths.tolist(), strict=True)
            for row, (begin, start, length) in enumerate(places):
                self._store(prefill.blocks[row], start, prefill.tokens[begin : begin + length], batch.shape)
                rows.append((prefill.blocks[row], start, length))
                if length:
                    self._live_slots.add(int(prefill.blocks[row][0]))
        self._allocated().spoil(SCRATCH_BLOCK)  # where a real device's padding writes
        return rows

    def _store(self, blocks: Int32, start: int, tokens: Int32, shape: StepShape) -> None:
        if start + len(tokens) > shape.context:
            raise DoesNotFit(f"position {start + len(tokens) - 1} is outside a context of {shape.context}")
        self._allocated().store(blocks, start, tokens)

    def _lose_slots_left_out(self, decode: DecodePart) -> None:
        if not self._capabilities.all_live_rows_in_decode:
            return
        present = set(decode.blocks[decode.lengths > 0, 0].tolist())
        for slot in self._live_slots - present:
            self._allocated().spoil(slot)
        self._live_slots &= present

    def _answers(self, context: Int64, length: int) -> Int64:
        """The next token after each of the last `length` tokens of a context."""
        weighted = np.cumsum(context * np.arange(1, len(context) + 1))
        answers: Int64 = RESERVED + weighted[len(context) - length :] % (self._vocab_size - RESERVED)
        return answers

    def _logits(self, answers: Int64) -> Float32:
        ids = np.arange(self._vocab_size)
        logits: Float32 = self._ramp[(ids - answers[:, None]) % self._vocab_size]
        return logits

    def _end_rows(self, batch: PackedBatch, answers: list[Int64]) -> tuple[Int32, Float32 | None]:
        """Decode rows end once per token, prompts once, at their last."""
        how, width = batch.sampling, batch.shape.decode_width
        tokens = np.full((len(answers), width), -1, dtype=np.int32)
        wanted: list[Int64] = []
        for row, found in enumerate(answers):
            ends = found if row < batch.shape.decode_rows else found[-1:]
            if how.want[row] == Want.LOGITS:
                wanted.append(ends)
            elif how.want[row] == Want.TOKEN:
                tokens[row, : len(ends)] = [self._pick(how, row, i, int(end)) for i, end in enumerate(ends)]
        return tokens, self._logits(np.concatenate(wanted)) if wanted else None

    def _pick(self, how: RowSampling, row: int, column: int, likeliest: int) -> int:
        if how.temperature[row] == 0:
            return likeliest
        logits = self._logits(np.array([likeliest]))[0]
        top_k, top_p, min_p = int(how.top_k[row]), float(how.top_p[row]), float(how.min_p[row])
        return sample(logits, float(how.temperature[row]), top_k, top_p, min_p, float(how.uniforms[row, column]))

    def _score_prompts(self, batch: PackedBatch, answers: list[Int64]) -> PromptScores | None:
        prefill = batch.prefill
        if prefill is None or not (prefill.targets >= 0).any():
            return None
        total, kept = len(prefill.tokens), batch.prompt_logprobs
        scores = PromptScores(
            np.zeros(total, np.float32),
            np.zeros(total, np.int32),
            np.zeros((total, kept), np.int32),
            np.zeros((total, kept), np.float32),
        )
        for row, begin in enumerate(prefill.starts.tolist()):
            for offset, found in enumerate(answers[batch.shape.decode_rows + row]):
                if (target := int(prefill.targets[begin + offset])) >= 0:
                    self._score(scores, begin + offset, target, int(found))
        return scores

    def _score(self, scores: PromptScores, place: int, target: int, likeliest: int) -> None:
        distance = (target - likeliest) % self._vocab_size
        kept = scores.top_ids.shape[1]
        scores.target_logprobs[place] = -np.log(2) * (distance + 1)
        scores.target_ranks[place] = distance + 1
        scores.top_ids[place] = (likeliest + np.arange(kept)) % self._vocab_size
        scores.top_logprobs[place] = -np.log(2) * np.arange(1, kept + 1)
