"""Which of the library's settings this backend does not drive.

Asked before anything starts and again when a model loads. Imports no torch and no SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import LoadError

KEY = "override_neuron_config"

_NOT_DRIVEN: Mapping[str, tuple[object, str]] = {
    "cache_layout": ("SBH", "its other layout lays prompts end to end and takes one bucket"),
    "padding_side": ("right", "sequences of a batch have lengths of their own"),
    "output_all_logits": (False, "a prompt answers with the logits of its last token"),
    "log_softmax_scores": (False, "logits are returned as they are"),
    "is_eagle_target": (False, "the draft decides it"),
    "is_eagle_draft": (False, "the draft decides it"),
}
"""Fields that change how the library is called, the one value that is served, and why."""

_STORED_BYTES = {"s8": 1, "f16": 2, "bf16": 2, "f8e4m3fn": 1}


def stored_bytes(given: Mapping[str, Any]) -> int | None:
    """Of one number in the cache, where it is stored otherwise than the model computes."""
    quant = given.get("kv_cache_quant")
    return None if quant is None else _STORED_BYTES[quant.get("quant_dtype", "s8")]


def refuse(given: Mapping[str, Any], num_slots: int) -> None:
    """`LoadError` names the first field that is not served. `num_slots`: --max-num-seqs."""
    for name, (served, why) in _NOT_DRIVEN.items():
        if name in given and given[name] != served:
            raise LoadError(f"{KEY}.{name}={given[name]!r} is not served: {why}; leave it out")
    batching = given.get("continuous_batching", {})
    for name in ("optimized_paged_attention", "enable_chunked_prefill"):
        if batching.get(name):
            raise LoadError(f"{KEY}.continuous_batching.{name}: the library's paged cache is not served; leave it out")
    for name in ("max_num_seqs", "batch_size_for_shared_caches"):
        if batching.get(name, num_slots) != num_slots:
            raise LoadError(
                f"{KEY}.continuous_batching.{name}={batching[name]} must be --max-num-seqs ({num_slots}); leave it out"
            )
    refuse_generation(given.get("on_device_generation", {}))


def refuse_generation(fields: Mapping[str, Any]) -> None:
    """A sampler for requests that differ, or one that needs no parameters. What is not named is as we set it: true."""
    is_served = all(fields.get(name, True) for name in ("dynamic", "per_batch_line"))
    if fields.get("do_sample", True) and not is_served:
        raise LoadError(
            f"{KEY}.on_device_generation: each request has parameters of its own, so dynamic and per_batch_line "
            "must be true, or do_sample false for greedy decoding of everything; leave them out"
        )
