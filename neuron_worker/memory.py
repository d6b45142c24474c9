"""How much memory the key-value cache gets.

A device of slots has one per sequence, in its own memory: nothing of the host's and no flag changes that.

On a chip with blocks, in order: `--kv-cache-memory-bytes`, refused where the chip has not as much beside the weights;
else room for every sequence at full length, as far as `--gpu-memory-utilization` of the cores' memory goes.

On a device that lives in the host's memory, in order: `--kv-cache-memory-bytes`; `VLLM_CPU_KVCACHE_SPACE` (GiB); else
room for every sequence at full length, but no more than 4 GiB (or one such sequence, where that is more), than half of
what is free, and than `--gpu-memory-utilization` of it. vLLM's own `--num-gpu-blocks-override` comes after all these.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from neuronserve.bucketing.memory import CORE_BYTES

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
    wanted, least = sequences_bytes(block_bytes, block_size, max_num_seqs, max_model_len)
    free = free_bytes() if free is None else free
    return min(wanted, max(ENOUGH, least), int(free * min(LARGEST_SHARE, utilization)))


def chip_bytes(
    *,
    block_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    given: int | None,
    utilization: float,
    weight_bytes: int,
    cores: int,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """The host's memory does not matter here."""
    if environ.get(VARIABLE):
        logger.warning("%s %s has no effect: the cache is in the chip's memory", VARIABLE, environ[VARIABLE])
    room = cores * CORE_BYTES - weight_bytes
    if given and given > room:
        raise ValueError(
            f"--kv-cache-memory-bytes {given}: the weights leave {room} of {_count(cores, 'core')} with "
            f"{CORE_BYTES // 2**30} GiB each; ask for less, or leave it out for a cache that fits"
        )
    wanted, least = sequences_bytes(block_bytes, block_size, max_num_seqs, max_model_len)
    usable = int(cores * CORE_BYTES * utilization) - weight_bytes
    if not given and usable < least:
        raise ValueError(
            f"one sequence of --max-model-len {max_model_len} needs {least} bytes of cache, {max(usable, 0)} are left "
            f"beside the weights on {_count(cores, 'core')}: shorten it, or raise --gpu-memory-utilization "
            f"{utilization:g}"
        )
    return given or min(wanted, usable)


def sequences_bytes(block_bytes: int, block_size: int, max_num_seqs: int, max_model_len: int) -> tuple[int, int]:
    """(of every sequence at full length, of one). One block more than they need: vLLM keeps block 0 to itself."""
    per_sequence = -(-max_model_len // block_size)
    return (max_num_seqs * per_sequence + 1) * block_bytes, (per_sequence + 1) * block_bytes


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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


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
