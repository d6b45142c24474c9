"""The operations a model graph is written in, so that one text of the graph serves every way of running it.

`decoder.py` calls these verbs; `torch_ops.py` answers them with tensors (the reference, and what a chip's
compiler traces); `cpu/native_ops.py` answers them by recording a static program for the C kernels.
A value `V` is opaque to the graph. The token axis is the step's: decode tokens first, then prefill tokens.

Knows no checkpoint names, no shapes of a plan, no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

V = TypeVar("V")

FloatType = Literal["float32", "float16", "bfloat16"]

Activation = Literal["silu_gate", "gelu_gate", "gelu", "gelu_tanh"]
"""`*_gate`: the weight's rows are the gate's then the up's; the result is act(gate) * up, half as wide."""


@dataclass(frozen=True)
class AttentionForm:
    """One layer's attention. `qkv` values are [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: q, k, v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token attends to itself and the window - 1 positions before it
    first_key: int = 0  # positions before it are attended by themselves alone


@dataclass(frozen=True)
class NormWeight:
    kind: Literal["rms", "layer"]
    epsilon: float
    weight: Any  # float32 [width]
    bias: Any | None = None  # float32 [width]


@dataclass(frozen=True)
class LinearWeight:
    """`packed` is the executor's own form; float32 or narrower values, or int8 with a float32 scale per row."""

    in_features: int
    out_features: int
    packed: Any
    bias: Any | None = None  # float32 [out_features]


class Matrix(Protocol):
    """A checkpoint's matrix [rows, columns], not yet read. `weights.py` makes them; a packer reads them piecewise."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> FloatType:
        """As stored in the checkpoint."""

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Rows `start` to `stop` as a new C-contiguous float32 array. A few rows at a time keep the peak low."""

    def mapped(self) -> NDArray[Any] | None:
        """The stored values without a copy, read-only: float32, float16, or bfloat16's bits as uint16.
        None where the file holds the matrix transposed or unaligned."""


class Packer(Protocol):
    """Turns a checkpoint's tensors into an executor's own weights. Called once per weight, in the order of the layers;
    at most one matrix beside what is already packed should be in memory at a time."""

    def linear(
        self,
        parts: Sequence[Matrix],
        bias: NDArray[np.float32] | None = None,
        *,
        quantize: bool = False,
        gate: bool = False,
    ) -> LinearWeight:
        """The `parts` [out, in] stacked by rows. `bias` is as long as all rows together. `quantize`: int8 per row.
        `gate`: two parts of one size, the gate's rows and the up's, to be used with a `*_gate` activation."""

    def norm(
        self,
        kind: Literal["rms", "layer"],
        epsilon: float,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None = None,
    ) -> NormWeight: ...

    def table(self, matrix: Matrix) -> Any:
        """A look-up table for `Ops.embed`: exact in the model's type, never int8. A tied head is packed apart."""

    def rope_table(self, table: NDArray[np.float32]) -> Any:
        """For `Ops.rope`; [positions, head_dim], cosines then sines."""


class Ops(Protocol[V]):
    def embed(self, table: Any, position_table: Any | None = None) -> V:
        """Rows of `table` for the step's token ids, plus rows of `position_table` for their positions. [T, hidden]"""

    def norm(self, x: V, weight: NormWeight) -> V:
        """RMS or layer norm over the last axis, in float32."""

    def linear(
        self, x: V, weight: LinearWeight, *, activation: Activation | None = None, residual: V | None = None
    ) -> V:
        """act(x @ W.T + bias) + residual; float32 accumulation. [T, out] (half of it for a gate)"""

    def head_norm(self, qkv: V, form: AttentionForm, query: NormWeight, key: NormWeight) -> V:
        """RMS norm of each query and key head on its own (Qwen3); values pass."""

    def rope(self, qkv: V, form: AttentionForm, table: Any) -> V:
        """Rotate query and key heads, the two halves of a head being the pairs. `table` [positions, head_dim]:
        cosines of the head_dim / 2 frequencies, then sines."""

    def attend(self, qkv: V, layer: int, form: AttentionForm) -> V:
        """Write keys and values of the step's tokens to the cache of `layer`, then causal attention over each row's
        blocks up to the token's own position. [T, num_heads * head_dim]"""

    def select(self, x: V) -> V:
        """The rows that need logits: every decode token, the last token of each prompt. [N, hidden]"""

    def finish(self, x: V, hidden: V | None, norm: NormWeight, head: LinearWeight) -> None:
        """Final norm and head of the selected rows `x`, and what each row wants of it: a sampled token or its logits.
        `hidden` [T, hidden], before the final norm, serves the scores of prompt tokens; None: none are scored."""

    # -- for a draft: `keep` in the model's step, the others in the draft's own

    def keep(self, x: V) -> None:
        """A feature of every token, [T, width], into the cache beside its keys and values."""

    def recall(self, width: int) -> V:
        """For each token the feature kept at the position before it, zeros for the first. From the second round of a
        draft on: what the draft carried over. [T, width]"""

    def join(self, left: V, right: V) -> V:
        """Side by side. [T, left + right]"""

    def guess(self, x: V, head: LinearWeight, token_ids: NDArray[np.int32] | None, carried: V | None) -> None:
        """The likeliest token of each selected row `x`, which ends a round. `token_ids`: what the head's rows stand
        for, where they are not all ids in order. `carried` [N, width] is the next round's `recall`."""
