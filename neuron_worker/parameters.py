"""What a request asks of sampling, sorted by what it needs. One table for who decides and for who refuses.

Reads the attributes of vLLM's `SamplingParams` by name; imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEED_LOGITS: Mapping[str, object] = {
    "logprobs": None,
    "logprob_token_ids": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
}
"""Parameters that need a row's logits on the host, and their values when nobody asks."""

NEED_OUR_RULE: Mapping[str, object] = {"seed": None, "min_p": 0.0}
"""Parameters that a device honours where it draws by our rule from our numbers, and not where it draws by its own."""


def asked(params: Any, absent: Mapping[str, object]) -> dict[str, object]:
    """The parameters of the table that were asked for; 0 alternatives are asked for, an empty list is not."""
    values = {name: getattr(params, name, default) for name, default in absent.items()}
    return {name: value for name, value in values.items() if value not in (None, absent[name], [], {})}
