"""The device protocol: NumPy arrays in, NumPy arrays out, whatever the backend and wherever it runs.

One call of `Device.run` is one engine step. It has two parts, either of which may be empty: *decode* rows
(token generation, or verification of drafts when the width is above 1) and *prefill* tokens (context
encoding, several prompts or chunks of prompts laid end to end). Arrays have exactly the shape's size;
padding is marked by a length of 0 and its cache writes go to the scratch block 0.

Knows no vLLM, no request ids, no text, no policy of who is scheduled. Imports numpy alone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

SCRATCH_BLOCK = 0
"""Block 0 is vLLM's null block: never given to a request, so padding may write there."""


@dataclass(frozen=True, order=True)
class StepShape:
    """One static graph.

    decode_rows     sequences in the decode part; 0: no decode part
    decode_width    tokens per decode row: 1, or k+1 when verifying k drafts
    prefill_tokens  total prompt tokens in the call, over all its prompts; 0: no prefill part
    context         positions a row may attend to, its own tokens included
    """

    decode_rows: int
    decode_width: int
    prefill_tokens: int
    context: int

    def __post_init__(self) -> None:
        if min(self.decode_rows, self.prefill_tokens) < 0 or self.decode_width < 1 or self.context < 1:
            raise ValueError(f"not a shape: {self}")
        if self.num_tokens == 0:
            raise ValueError("a shape needs decode rows or prefill tokens")

    @property
    def num_tokens(self) -> int:
        """Tokens a call of this shape computes, padding included."""
        return self.decode_rows * self.decode_width + self.prefill_tokens

    @property
    def kind(self) -> Literal["decode", "verify", "prefill", "mixed"]:
        if self.prefill_tokens and self.decode_rows:
            return "mixed"
        if self.prefill_tokens:
            return "prefill"
        return "verify" if self.decode_width > 1 else "decode"


class Want(enum.IntEnum):
    """What the caller wants of one output row."""

    NOTHING = 0  # padding, or a prompt chunk that is not the last
    TOKEN = 1  # a token id, sampled on the device
    LOGITS = 2  # the float32 logits, sampled by the caller


@dataclass(frozen=True)
class DecodePart:
    """R = decode_rows, W = decode_width, C = blocks in a context. Filled by `bucketing.pack`."""

    tokens: Int32  # [R, W]
    positions: Int32  # [R], position of the row's first token; the others follow it
    lengths: Int32  # [R], real tokens in the row, 0 for a padding row
    blocks: Int32  # [R, C], cache blocks of the row in order, SCRATCH_BLOCK where unused


@dataclass(frozen=True)
class PrefillPart:
    """T = prefill_tokens, P = prompts a call may hold, C = blocks in a context. Filled by `bucketing.pack`."""

    tokens: Int32  # [T], the prompts' tokens end to end
    starts: Int32  # [P], where each prompt begins in `tokens`
    lengths: Int32  # [P], its tokens in this call, 0 for an unused place
    positions: Int32  # [P], position of its first token in this call (> 0: a later chunk or a cached prefix)
    blocks: Int32  # [P, C]
    targets: Int32  # [T], the token that follows each prompt token where it is to be scored, else -1


@dataclass(frozen=True)
class RowSampling:
    """How each output row ends: decode rows first, then prompts. N = R + P. Filled by `bucketing.pack`.

    A temperature of 0 is greedy. top_k 0 and top_p 1 mean no limit. `uniforms` are the caller's random
    numbers in [0, 1): the device has no randomness of its own, so a seed is the caller's affair.
    """

    want: Int32  # [N], values of `Want`
    temperature: Float32  # [N]
    top_k: Int32  # [N]
    top_p: Float32  # [N]
    min_p: Float32  # [N]
    uniforms: Float64  # [N, W]


@dataclass(frozen=True)
class PackedBatch:
    """One step. Arrays are views of buffers the caller reuses: valid for one `run`."""

    shape: StepShape
    decode: DecodePart | None
    prefill: PrefillPart | None
    sampling: RowSampling
    prompt_logprobs: int = 0  # alternatives to report per scored prompt position; 0 and no targets: none


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of prompt tokens, per position of `PrefillPart.tokens`; rows without target are 0."""

    target_logprobs: Float32  # [T]
    target_ranks: Int32  # [T], 1 = most likely
    top_ids: Int32  # [T, K]
    top_logprobs: Float32  # [T, K]


@dataclass(frozen=True)
class DeviceOutput:
    """What one step gives back. Arrays belong to the device and are valid until its next `run`."""

    tokens: Int32  # [N, W], -1 where no token was wanted; a prompt's token is in column 0
    logits: Float32 | None = None  # [M, vocabulary]: rows with Want.LOGITS in order, each giving `length` rows
    # (a decode row one per real token, a prompt one)
    prompt_scores: PromptScores | None = None
    device_seconds: float = 0.0  # time inside the device call, for the host-time metric


@dataclass(frozen=True)
class DraftRequest:
    """After a step: what of it stands, and for which rows the draft shall look ahead. Filled by `bucketing.pack`.

    The draft first reads the tokens of the step's batch that stand, so that its own cache, which lies in the target's
    blocks, is in step with the target's; then the newest token; then it goes on by itself, greedily. What it is not
    asked to go on from it may read later, before it next drafts what follows. It keeps nothing between two calls but
    what lies in these blocks.
    """

    lengths: Int32  # [R], tokens of each decode row of the batch that stand: 1 + accepted drafts; 0 for a padding row
    newest: Int32  # [N], the token that follows the row's last standing one; -1: read only, nothing is drafted


@dataclass(frozen=True)
class Capabilities:
    """What the scheduler and the platform need to know of a backend, as data."""

    name: str
    on_chip: bool  # wrong combinations are an error on a chip, a warning elsewhere
    kv_layout: Literal["blocks", "slots"]
    mixes_prefill_and_decode: bool  # one call may hold both parts
    splits_prompts: bool  # a prompt may come in chunks, or start after a cached prefix
    all_live_rows_in_decode: bool  # a live row left out of a decode is lost
    prompts_per_prefill: int | None  # prompts in one prefill call; None: as many as there are rows
    outputs: tuple[str, ...]  # of "logits", "tokens"
    sampling: Literal["per_step", "fixed"]
    max_top_k: int | None  # largest top_k the device samples itself; None: any
    prompt_logprobs: bool
    drafts: bool  # a draft loaded beside the target runs by `Device.draft`
    fused_speculation: bool
    tensor_parallel_degrees: tuple[int, ...] | None  # None: any number
    default_max_num_seqs: int
    default_max_graphs: int  # the default ladder stays at or below this
    fine_prefill_ladder: bool  # small steps for short prompts are worth a graph each
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    cache_dtype: str | None = None  # of cached keys and values; None: the model's own type
    quantizations: tuple[str, ...] = ("int8",)
    rounds_activations: bool = False  # beside int8 weights; see `DeviceOptions.activations`
    more_architectures: tuple[str, ...] = ()  # served beyond those of `graph`
    saves_graphs: bool = False  # compiled graphs can be kept as files, in `DeviceOptions.artifacts`


@dataclass(frozen=True)
class DeviceOptions:
    """Everything `load` needs besides the directory. JSON-able, so it crosses to another interpreter."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    prompts_per_call: int
    dtype: str = "float32"  # "float32", "float16" or "bfloat16"
    quantization: str | None = None  # "int8": weights, symmetric per output channel
    quantize_head: bool = False  # the language-model head in int8 too
    activations: str = "float32"  # beside int8 weights: "int8" rounds each token's too, in blocks of inputs
    tensor_parallel_size: int = 1
    max_prompt_logprobs: int = 20
    neuron_config: Mapping[str, Any] = field(default_factory=dict)  # validated NeuronConfig overrides
    threads: int | None = None  # None: every core this process may use
    across_processes: bool = False  # the caller is another process, and a step's answer has to reach it
    num_drafts: int = 0  # tokens per `Device.draft` and row, k; 0: no draft
    sampling: str = "host"  # where `Capabilities.sampling` is "fixed": "host" gives logits, "device" token ids
    artifacts: str | None = None  # directory with compiled graphs; what is compiled is added. None: not kept
    require_artifacts: bool = False  # never compile: a graph that `artifacts` lacks is a `LoadError`
    compiler_cache: str | None = None  # directory for what the compiler keeps by itself; None: where it would


@dataclass(frozen=True)
class ModelFacts:
    """What was loaded. Filled by the device, read by the worker."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_kv_token: int  # all layers, keys and values
    weight_bytes: int
    compute_dtype: str
    notes: tuple[str, ...] = ()  # one line each, for the log


class Device(Protocol):
    """Five verbs in this order: load, allocate, compile (each shape), seal, run (each step); close at the end.

    Not thread-safe: one caller at a time. Every method raises `errors.DeviceError` and nothing else.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        """Read a local Hugging Face directory into device memory."""

    def allocate(self, num_blocks: int) -> None:
        """Reserve the KV cache: `num_blocks` blocks of `options.block_size` tokens, the scratch block among them."""

    def compile(self, shape: StepShape) -> None:
        """Prepare one shape: workspace, buffers, one cheap run. After this a step of it allocates nothing."""

    def seal(self) -> None:
        """No more compiling: from here an unknown shape is `UncompiledShape`."""

    def run(self, batch: PackedBatch) -> DeviceOutput:
        """Compute one step."""

    def draft(self, batch: PackedBatch, request: DraftRequest) -> Int32:
        """[N, k] tokens that may follow each row's `newest`, -1 in rows without one. `batch` is that of the last `run`,
        its arrays untouched. Needs a `draft_dir` at `load` and `DeviceOptions.num_drafts`. The array belongs to the
        device and is valid until its next call. A draft that would lie beyond the row's blocks may be any token."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks, source to target (copy on write of a shared prefix). Block-cached devices only."""

    def close(self) -> None:
        """Give everything back. May be called twice."""
