"""What speculation was asked for, as one frozen value that travels with the configuration. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NGRAM = "ngram"
DRAFT_MODEL = "draft_model"
EAGLE = "eagle"
EAGLE3 = "eagle3"

BY_A_DRAFT = (DRAFT_MODEL, EAGLE, EAGLE3)
"""Those that load a second checkpoint beside the target's."""

METHODS = (NGRAM, *BY_A_DRAFT)
"""What is built, in vLLM's names."""


@dataclass(frozen=True)
class Speculation:
    """Filled by the platform from vLLM's speculative configuration."""

    method: str
    num_tokens: int  # most drafts per step, k
    shortest_match: int = 1  # of prompt lookup, in tokens
    longest_match: int = 8
    model: str | None = None  # the draft, a directory or a hub id; None: there is none
    revision: str | None = None  # of a hub id
    max_length: int | None = None  # a longer sequence is not drafted for; None: all are
    is_adaptive: bool = True  # drafts only where that pays
    looks_up_first: bool = False  # and asks the draft for what does not repeat itself

    @property
    def has_draft(self) -> bool:
        return self.method in BY_A_DRAFT

    @property
    def has_head(self) -> bool:
        return self.method in (EAGLE, EAGLE3)

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Speculation | None:
        return None if values is None else cls(**values)
