"""The C library as Python sees it: the structures of `kernels/cpu.h`, and a session that owns threads and memory.

Knows no model and no engine step; addresses and counts go in, an error text comes out.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, DoesNotFit
from . import build

KINDS = (
    *("embed", "norm", "linear", "head_norm", "place", "attend", "select", "sample", "gather", "score"),
    *("round", "dot", "keep", "recall", "join", "guess", "advance"),
)
CACHES = ("model", "draft")
QUANTIZED = ("int8", "uint8")
"""int8 weights: as they are; and plus 128 in groups of four inputs, for products with int8 activations."""
TYPES = ("float32", "float16", "bfloat16", *QUANTIZED, "float24")
ACTIVATIONS = (None, "silu_gate", "gelu_gate", "gelu", "gelu_tanh")
ROW_SETS = ("tokens", "selected", "slice")
NO_VALUE = -1
SLICE_ROWS = 32
"""Prompt positions whose logits exist at one time."""
READ_AT_ONCE = 128
"""Tokens for which every draft program has room, however small its step."""
MAX_THREADS = 256
ISA_VARIABLE = "NEURONSERVE_CPU_ISA"
SETS = ("avx512vnni", "avx512", "avxvnni", "avx2", "base")

OP = np.dtype(
    [(name, np.int64) for name in ("kind", "rows", "x", "y", "residual", "x_stride", "y_stride", "residual_stride")]
    + [(name, np.int64) for name in ("in", "out", "weight_type", "activation", "layer", "heads", "kv_heads")]
    + [(name, np.int64) for name in ("head_dim", "window", "first_key", "slice", "kind_of_norm")]
    + [(name, np.uint64) for name in ("weight", "scale", "bias", "second")]
    + [("second_type", np.int64), ("number", np.float64)]
)
"""`struct op`. `x`, `y` and `residual` are byte offsets in the workspace; `weight` and its like are addresses."""


class Program(ctypes.Structure):
    _fields_ = (
        ("ops", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("num_ops", "decode_rows", "decode_width", "prefill_tokens", "prompts", "context")
        ),
        *((name, ctypes.c_int64) for name in ("blocks_per_row", "vocab", "queries_per_item", "cache")),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        *((f"decode_{name}", ctypes.c_void_p) for name in ("tokens", "positions", "lengths", "blocks")),
        *((f"prefill_{name}", ctypes.c_void_p) for name in ("tokens", "starts", "lengths", "positions", "blocks")),
        *((name, ctypes.c_void_p) for name in ("targets", "want", "top_k", "temperature", "top_p", "min_p")),
        ("uniforms", ctypes.c_void_p),
        ("top_alternatives", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tokens", "target_logprobs", "target_ranks", "top_ids")),
        ("top_logprobs", ctypes.c_void_p),
        ("num_logit_rows", ctypes.c_int64),
        ("num_scored", ctypes.c_int64),
    )


class Draft(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lengths", "newest", "drafts")),
        ("num_drafts", ctypes.c_int64),
    )


class PackJob(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("first_row", "rows", "in", "gate_half", "is_gate", "type")),
        ("panels", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    )


class NativeMissing(DeviceError):
    """The library cannot be had here; the message says why."""


def address(values: NDArray[Any]) -> int:
    """Of an array that C may read or write: it must be C-contiguous and stay alive as long as C knows it."""
    if not values.flags.c_contiguous:
        raise DeviceError(f"an array of shape {values.shape} and strides {values.strides} is not contiguous")
    return int(values.__array_interface__["data"][0])


@cache
def load() -> ctypes.CDLL:
    """The library, found or compiled once per process."""
    try:
        library = ctypes.CDLL(str(build.find()))
    except (build.BuildFailed, OSError) as error:
        raise NativeMissing(str(error)) from error
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "ns_open": (pointer, (ctypes.c_int, ctypes.c_char_p, ctypes.c_int)),
        "ns_close": (None, (pointer,)),
        "ns_error": (ctypes.c_char_p, (pointer,)),
        "ns_num_joined": (i64, (pointer,)),
        "ns_num_lingered": (i64, (pointer,)),
        "ns_isa": (ctypes.c_char_p, (pointer,)),
        "ns_keeps": (ctypes.c_int, (pointer, i64)),
        "ns_panel_isa": (ctypes.c_char_p, (pointer,)),
        "ns_panel_width": (i64, (pointer,)),
        "ns_layout": (i64, (i64,)),
        "ns_maps": (i64, ()),
        "ns_map": (pointer, (i64,)),
        "ns_unmap": (None, (pointer, i64)),
        "ns_pack": (ctypes.c_int, (pointer, ctypes.POINTER(PackJob))),
        "ns_cache": (ctypes.c_int, (pointer, i64, i64, i64, i64, i64, i64)),
        "ns_features": (ctypes.c_int, (pointer, i64)),
        "ns_block_slots": (i64, (i64,)),
        "ns_copy_blocks": (None, (pointer, pointer, i64)),
        "ns_reserve": (ctypes.c_int, (pointer, i64, i64, i64, i64, i64)),
        "ns_workspace": (pointer, (pointer,)),
        "ns_profile": (None, (pointer, pointer)),
        "ns_run": (ctypes.c_int, (pointer, ctypes.POINTER(Program), ctypes.POINTER(Batch))),
        "ns_draft": (
            ctypes.c_int,
            (pointer, ctypes.POINTER(Program), ctypes.POINTER(Batch), ctypes.POINTER(Draft)),
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    structures = (ctypes.sizeof(kind) for kind in (Program, Batch, PackJob, Draft))
    sizes = (OP.itemsize, *structures, SLICE_ROWS, READ_AT_ONCE, MAX_THREADS)
    found = tuple(library.ns_layout(which) for which in range(len(sizes)))
    if found != sizes:
        raise NativeMissing(f"the library's structures are {found} bytes, expected {sizes}; install again")
    return library


class Memory:
    """Zeroed pages from the library, in large pages where the system has them; freed with the object."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self._library = library
        self.size = size
        self.address: int = library.ns_map(size) or 0
        if not self.address:
            raise DoesNotFit(
                f"{size} bytes of memory are not to be had; use a smaller model, fewer or shorter requests"
            )

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._library.ns_unmap(self.address, self.size)


class Session:
    """Threads, cache and workspace. One caller at a time."""

    def __init__(self, num_threads: int, isa: str = "", *, lingers: bool = False) -> None:
        """`lingers`: a step's answer goes to another process, for which the threads keep their cores awake a moment."""
        self.library = load()
        self.num_threads = num_threads
        self.workspace: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self._workspace_bytes = 0
        self._handle: int | None = self.library.ns_open(num_threads, isa.encode(), lingers)
        if self._handle is None:
            raise NativeMissing(
                f"{ISA_VARIABLE}={isa!r} is not an instruction set of this machine; unset it or use one of "
                f"{', '.join(SETS)} that the processor has"
            )

    @property
    def isa(self) -> str:
        return str(self.library.ns_isa(self._handle).decode())

    @property
    def panel_isa(self) -> str:
        """The set that packed weights are laid out for: sets that differ in int8 products alone share one."""
        return str(self.library.ns_panel_isa(self._handle).decode())

    @property
    def panel_width(self) -> int:
        """Output channels in a panel of packed weights."""
        return int(self.library.ns_panel_width(self._handle))

    def keeps(self, kind: str) -> bool:
        """Whether products of float32 weights in this narrower type are about as fast as in four bytes, or faster.
        "float24" is without a last byte, which is zero."""
        return bool(self.library.ns_keeps(self._handle, TYPES.index(kind)))

    @property
    def kept(self) -> list[str]:
        """All such types."""
        return [kind for kind in TYPES if self.keeps(kind)]

    @property
    def num_joined(self) -> int:
        """How often a thread besides the caller's took part in a step."""
        return int(self.library.ns_num_joined(self._handle))

    @property
    def num_lingered(self) -> int:
        """How often one stayed awake behind it."""
        return int(self.library.ns_num_lingered(self._handle))

    def block_slots(self, block_size: int) -> int:
        """Tokens a block has room for: `block_size`, rounded up to whole vectors of keys."""
        return int(self.library.ns_block_slots(block_size))

    def pack(self, job: PackJob) -> None:
        self._check(self.library.ns_pack(self._handle, job))

    def cache(
        self, num_layers: int, num_blocks: int, block_size: int, num_heads: int, head_dim: int, of: str = "model"
    ) -> None:
        """`of` one of `CACHES`; all have the same blocks."""
        sizes = (num_layers, num_blocks, block_size, num_heads, head_dim)
        self._check(self.library.ns_cache(self._handle, CACHES.index(of), *sizes))

    def features(self, width: int) -> None:
        """Room for a feature of the model per position of the cache."""
        self._check(self.library.ns_features(self._handle, width))

    def reserve(self, workspace: int, scratch: int, num_ops: int, num_tokens: int, num_sequences: int) -> None:
        """Room for a program in the workspace, shared by all programs, which this may move."""
        self._check(self.library.ns_reserve(self._handle, workspace, scratch, num_ops, num_tokens, num_sequences))
        self._workspace_bytes = max(self._workspace_bytes, workspace)
        pages = (ctypes.c_char * self._workspace_bytes).from_address(self.library.ns_workspace(self._handle))
        self.workspace = np.frombuffer(memoryview(pages), dtype=np.float32)

    def run(self, program: Program, batch: Batch) -> None:
        """One step. A thread that the system held up may look at `program` until the next call: keep it that long."""
        self._check(self.library.ns_run(self._handle, program, batch))

    def draft(self, program: Program, batch: Batch, draft: Draft) -> None:
        """After the step of `batch`. As `run`."""
        self._check(self.library.ns_draft(self._handle, program, batch, draft))

    def profile(self, seconds: NDArray[np.float64] | None) -> None:
        """Add up the time of each operation of the programs that run from here on. None: no more."""
        self.library.ns_profile(self._handle, None if seconds is None else address(seconds))

    def copy_blocks(self, pairs: NDArray[np.int64]) -> None:
        self.library.ns_copy_blocks(self._handle, address(pairs), len(pairs))

    def close(self) -> None:
        """Ends the threads and frees all memory but the weights."""
        if self._handle is not None:
            self.library.ns_close(self._handle)
            self._handle, self.workspace = None, np.empty(0, dtype=np.float32)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def _check(self, status: int) -> None:
        if status:
            raise DoesNotFit(self.library.ns_error(self._handle).decode())


def num_threads(wanted: int | None = None) -> int:
    """As many as this process may use at once: affinity and the container's quota, unless `wanted` says otherwise."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    allowed = available if quota is None else min(available, max(1, int(quota)))
    return max(1, min(wanted or allowed, MAX_THREADS))


def _cpu_quota() -> float | None:
    """CPUs that the control group grants, version 2 then 1; None: no limit."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") as file:
            microseconds = int(file.read())
        with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as file:
            return microseconds / int(file.read()) if microseconds > 0 else None
    except (OSError, ValueError):
        return None
