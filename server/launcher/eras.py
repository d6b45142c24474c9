"""The rules that the documents of TGI on static batches give, each with the document it comes from. Pure.

A static batch has fixed dimensions, [batch_size, max_length]; max_tokens is their product. The documents say how TGI's
limits follow from them, and disagree. `broken` answers for one document; the launcher itself refuses only what no
document allows (`checks`), so whoever follows any of them is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """As a deployment gives them; None: not given."""

    batch_size: int  # of the export, or what stands for it
    max_length: int
    concurrent_requests: int | None = None
    max_batch_size: int | None = None
    input_length: int | None = None
    total_tokens: int | None = None
    batch_prefill_tokens: int | None = None
    batch_total_tokens: int | None = None

    @property
    def max_tokens(self) -> int:
        return self.batch_size * self.max_length


@dataclass(frozen=True)
class Rule:
    limit: str  # the field of `Limits` it speaks of
    says: str  # the document's words
    holds: Callable[[Limits], bool]


@dataclass(frozen=True)
class Era:
    document: str
    rules: tuple[Rule, ...]

    def broken(self, limits: Limits) -> list[Rule]:
        """Of the rules about limits that were given."""
        return [rule for rule in self.rules if getattr(limits, rule.limit) is not None and not rule.holds(limits)]


_TOTAL = Rule(
    "total_tokens",
    "`--max-total-tokens` must be set to `max_length` (it is per-request)",
    lambda limits: limits.total_tokens == limits.max_length,
)
_STRICTLY_LOWER = Rule(
    "input_length",
    "`--max-input-length` must be lower than `max_length`",
    lambda limits: (limits.input_length or 0) < limits.max_length,
)
_CONCURRENT = Rule(
    "concurrent_requests",
    "`--max-concurrent-requests` must be set to `batch size`",
    lambda limits: limits.concurrent_requests == limits.batch_size,
)
_BATCH_TOTAL = Rule(
    "batch_total_tokens",
    "`--max-batch-total-tokens` must be set to `max_tokens`",
    lambda limits: limits.batch_total_tokens == limits.max_tokens,
)

DOCKER_README = Era(
    "the README of the Neuron Docker image up to 0.0.19",
    (
        _CONCURRENT,
        _STRICTLY_LOWER,
        _TOTAL,
        Rule(
            "batch_prefill_tokens",
            "`--max-batch-prefill-tokens` must be lower than `max_tokens`",
            lambda limits: (limits.batch_prefill_tokens or 0) < limits.max_tokens,
        ),
        _BATCH_TOTAL,
    ),
)

SAGEMAKER_BLOG = Era(
    "the tutorial of Inferentia2 on SageMaker, image 0.0.17",
    (
        Rule(
            "concurrent_requests",
            "`MAX_CONCURRENT_REQUESTS`: Equal to the batch size that was used to compile the model.",
            _CONCURRENT.holds,
        ),
        Rule(
            "input_length",
            "`MAX_INPUT_LENGTH`: Less than or equal to the sequence length that was used to compile the model.",
            lambda limits: (limits.input_length or 0) <= limits.max_length,
        ),
        Rule(
            "total_tokens",
            "`MAX_TOTAL_TOKENS`: Equal to the sequence length that was used to compile the model.",
            _TOTAL.holds,
        ),
        Rule(
            "batch_prefill_tokens",
            "`MAX_BATCH_PREFILL_TOKENS`: half of the maximum number of tokens `[batch_size * sequence_length] / 2`",
            lambda limits: limits.batch_prefill_tokens == limits.max_tokens // 2,
        ),
        Rule(
            "batch_total_tokens",
            "`MAX_BATCH_TOTAL_TOKENS`: Equal to the maximum number of tokens `[batch_size * sequence_length]`",
            _BATCH_TOTAL.holds,
        ),
    ),
)

XLA_README = Era(
    "the README of the XLA/TPU Docker image",
    (
        _CONCURRENT,
        _STRICTLY_LOWER,
        _TOTAL,
        Rule(
            "batch_prefill_tokens",
            "`--max-batch-prefill-tokens` must be set to `batch_size * max_input_length`",
            lambda limits: limits.batch_prefill_tokens == limits.batch_size * (limits.input_length or 0),
        ),
        _BATCH_TOTAL,
    ),
)

BACKEND_PAGE = Era(
    "TGI's page of the Neuron backend, from 0.0.20 on",
    (
        Rule(
            "max_batch_size",
            "`--max-batch-size` must be set to `batch size`",
            lambda limits: limits.max_batch_size == limits.batch_size,
        ),
        _STRICTLY_LOWER,
        _TOTAL,
        Rule(
            "batch_prefill_tokens",
            "`--max-batch-prefill-tokens` should be set to `batch_size` * `max-input-length`",
            XLA_README.rules[3].holds,
        ),
    ),
)

ERAS = (BACKEND_PAGE, DOCKER_README, SAGEMAKER_BLOG, XLA_README)
