"""How much memory the key-value cache gets.

A device of slots has one per sequence, in its own memory: nothing of the host's and no flag changes that.

On a device that lives in the host's memory, in order: `--kv-cache-memory-bytes`; `VLLM_CPU_KVCACHE_SPACE` (GiB); else
room for every sequence at full length, but no more than 4 GiB (or one such sequence, where that is more), than half of
what is free, and than `--gpu-memory-utilization` of it. vLLM's own `--num-gpu-blocks-override` comes after all these.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
LARGEST_SHARE = 0.5
ENOUGH = 4 * 2**30
"""Requests wait, or are preempted, where this is too little; a laptop has other things to do with its memory."""


def cache_bytes(
    *,
    block_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    given: int | None,
    utilization: float,
    environ: Mapping[str, str] = os.environ,
    free: int | None = None,
) -> int:
    if given:
        return given
    if space := _gibibytes(environ.get(VARIABLE, "")):
        return space
    # One block more than the sequences need: vLLM keeps block 0 to itself.
    per_sequence = -(-max_model_len // block_size)
    wanted, least = ((count * per_sequence + 1) * block_bytes for count in (max_num_seqs, 1))
    free = free_bytes() if free is None else free
    return min(wanted, max(ENOUGH, least), int(free * min(LARGEST_SHARE, utilization)))


def slots_bytes(
    *, block_bytes: int, max_num_seqs: int, given: int | None, environ: Mapping[str, str] = os.environ
) -> int:
    """The graphs hold exactly so many sequences. Block 0 is vLLM's own."""
    asked = {"--kv-cache-memory-bytes": given, VARIABLE: environ.get(VARIABLE)}
    for name, value in asked.items():
        if value:
            logger.warning(
                "%s %s has no effect: this device holds one sequence per place, --max-num-seqs %d of them",
                *(name, value, max_num_seqs),
            )
    return (max_num_seqs + 1) * block_bytes


def _gibibytes(text: str) -> int:
    """In bytes; 0, as vLLM's own default has it, leaves the choice to us."""
    try:
        size = float(text or 0)
    except ValueError:
        size = -1.0
    if size < 0:
        raise ValueError(f"{VARIABLE}={text!r}: expected a number of GiB; unset it for a cache that fits the limits")
    return int(size * 2**30)


def free_bytes() -> int:
    """What this process may still use: the machine's available memory, or its control group's if that is less."""
    available = _meminfo("MemAvailable")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, limit - used)
    return max(available, 0)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {key}")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
