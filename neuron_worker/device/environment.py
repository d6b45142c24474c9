"""The SDK's environment variables, read and completed before the SDK is imported.

The runtime reads them once, when it starts. Cores are claimed per process: without a limit the first server would
claim all of an instance, so a server claims what it uses and the rest stays free for another. Work over several
machines is refused by the names of its variables. Knows no model.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, MutableMapping

from . import core_claims
from .errors import LoadError

VISIBLE_KEY = "NEURON_RT_VISIBLE_CORES"
COUNT_KEY = "NEURON_RT_NUM_CORES"
FLAGS_KEY = "NEURON_CC_FLAGS"
COMPILER_CACHE_KEY = "NEURON_COMPILE_CACHE_URL"

_WRAPPER_FLAGS = ("--cache_dir", "--cache-dir", "--log_level")
_WRAPPER_SWITCHES = ("--no_cache", "--no-cache", "--retry_failed_compilation")
"""Of the compiler's wrapper, with a value and without: where and how it compiles, nothing of what comes out."""

_ALONE = {
    "NEURON_RANK_ID": ("", "0"),
    "NEURON_LOCAL_TP": ("",),
    "NEURON_PP_STAGES": ("", "1"),
    "CPU_COMM_ID": ("",),
    "NEURON_RT_ROOT_COMM_ID": ("",),
    "ENABLE_NEURON_MULTI_NODE": ("", "0", "false"),
}
"""Variables of a server over several machines, and their values on one."""

SEVERAL_MACHINES = (
    "{}: a model over several machines is not supported; unset these, and start one server on each machine"
)

ONE_CORE = (
    "--tensor-parallel-size {}: the {} device uses one core; serve with --tensor-parallel-size 1 and start more "
    f"servers, each with a {VISIBLE_KEY} of its own, or use several cores as one with the transformers-neuronx device "
    "(Inf2, Trn1)"
)


def compiler_flags(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What of NEURON_CC_FLAGS decides a compiled graph."""
    try:
        words = iter(shlex.split(environ.get(FLAGS_KEY, "")))
    except ValueError as error:
        raise LoadError(f"{FLAGS_KEY}={environ[FLAGS_KEY]!r}: {error}; check its quotes") from None
    found = []
    for word in words:
        name, equals, _ = word.partition("=")
        if name in _WRAPPER_FLAGS:
            if not equals:
                next(words, None)
        elif name not in _WRAPPER_SWITCHES:
            found.append(word)
    return tuple(found)


def prepare(environ: MutableMapping[str, str], num_cores: int, compiler_cache: str | None = None) -> None:
    """Refuse what cannot be served, and claim as many cores as the model is spread over."""
    _refuse_several_machines(environ)
    if compiler_cache is not None:
        environ.setdefault(COMPILER_CACHE_KEY, compiler_cache)
    visible = environ.get(VISIBLE_KEY, "").strip()
    count = environ.get(COUNT_KEY, "").strip()
    if visible:
        _check_count(VISIBLE_KEY, visible, len(cores(visible)), num_cores)
        core_claims.claim(cores(visible), f"{VISIBLE_KEY}={visible}")
    elif count:
        _check_count(COUNT_KEY, count, _whole(COUNT_KEY, count), num_cores)
    else:
        environ[COUNT_KEY] = str(num_cores)


def cores(text: str) -> tuple[int, ...]:
    """The cores that "0-3,8" lists."""
    found: list[int] = []
    for part in text.split(","):
        first, last = _range(text, part.strip())
        found += range(first, last + 1)
    if (different := len(set(found))) < len(found):
        raise LoadError(f"{VISIBLE_KEY}={text} names {len(found)} cores, {different} different ones: name each once")
    return tuple(found)


def _range(text: str, part: str) -> tuple[int, int]:
    first, dash, last = (word.strip() for word in part.partition("-"))
    if not first.isdigit() or (dash and not last.isdigit()):
        raise LoadError(f"{VISIBLE_KEY}={text!r}: {part!r} is no core and no range; give cores such as 0-3 or 0,1")
    ends = int(first), int(last if dash else first)
    if ends[1] < ends[0]:
        raise LoadError(f"{VISIBLE_KEY}={text!r}: {part!r} ends before it starts; write {ends[1]}-{ends[0]}")
    return ends


def _whole(key: str, text: str) -> int:
    if not text.strip().isdigit():
        raise LoadError(f"{key}={text!r} is no number of cores; give one such as 2")
    return int(text)


def _check_count(key: str, value: str, available: int, wanted: int) -> None:
    if available < wanted:
        raise LoadError(
            f"{key}={value} leaves {available} cores, --tensor-parallel-size is {wanted}: make {wanted} cores visible, "
            f"or serve with --tensor-parallel-size {available}"
        )


def for_several_machines(environ: Mapping[str, str]) -> list[str]:
    """Variables, with their values, that ask for a server over several machines."""
    return [
        f"{name}={environ[name]}"
        for name, alone in _ALONE.items()
        if environ.get(name, "").strip().lower() not in alone
    ]


def _refuse_several_machines(environ: Mapping[str, str]) -> None:
    if found := for_several_machines(environ):
        raise LoadError(SEVERAL_MACHINES.format(", ".join(found)))
