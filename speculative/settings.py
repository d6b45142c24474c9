"""What speculation was asked for, as one frozen value that travels with the configuration. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NGRAM = "ngram"
METHODS = (NGRAM,)
"""What is built."""


@dataclass(frozen=True)
class Speculation:
    """Filled by the platform from vLLM's speculative configuration."""

    method: str
    num_tokens: int  # most drafts per step, k
    shortest_match: int = 1  # of prompt lookup, in tokens
    longest_match: int = 3

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Speculation | None:
        return None if values is None else cls(**values)
