"""The shell: variables the classic guides set, what each means here, and the defaults this product adds.

`set_defaults` runs before vLLM reads its own variables; `Environment.read` gives typed values of the classic ones;
`leftovers` answers, one line each, what an old shell may still hold. `NEURONSERVE_*` is read by `options`.
Imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from neuronserve.bucketing.errors import BadBuckets
from neuronserve.bucketing.ladder import parse as parse_buckets
from neuronserve.bucketing.plan import CONTEXT_KEY, TOKEN_GENERATION_KEY

from .errors import ConfigError
from .values import boolean, one_of, parse

QUANT_KEY = "NEURON_QUANT_DTYPE"
HOST_SAMPLING_KEY = "NEURON_ON_DEVICE_SAMPLING_DISABLED"
FRAMEWORK_KEY = "VLLM_NEURON_FRAMEWORK"
ARTIFACTS_KEY = "NEURON_COMPILED_ARTIFACTS"
V1_KEY = "VLLM_USE_V1"

DEFAULTS = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its contract between scheduler and worker is another one
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Set where the user has not."""

ANSWERED = frozenset({V1_KEY, FRAMEWORK_KEY})
"""VLLM_* variables that vLLM does not know and would warn about; we answer them ourselves."""

FORWARDED = (CONTEXT_KEY, TOKEN_GENERATION_KEY, QUANT_KEY, HOST_SAMPLING_KEY, "NEURON_CC_FLAGS", "NEURON_RT_LOG_LEVEL")
"""What a worker on another machine needs of this shell."""

FRAMEWORKS = {
    "transformers-neuronx": "transformers-neuronx",
    "neuronx-distributed-inference": "torch-neuronx",
}


def set_defaults(environ: MutableMapping[str, str]) -> None:
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)


@dataclass(frozen=True)
class Environment:
    """The classic variables, typed; None where unset or blank."""

    context_buckets: tuple[int, ...] | None = None
    token_generation_buckets: tuple[int, ...] | None = None
    quant_dtype: str | None = None  # "s8" or "f8e4m3fn"
    host_sampling: bool = False
    framework: str | None = None  # a backend's name
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Environment:
        buckets = {key: _buckets(environ, key) for key in (CONTEXT_KEY, TOKEN_GENERATION_KEY)}
        read = [f"{key}: {', '.join(map(str, sizes))}" for key, sizes in buckets.items() if sizes]
        return cls(
            context_buckets=buckets[CONTEXT_KEY],
            token_generation_buckets=buckets[TOKEN_GENERATION_KEY],
            quant_dtype=_quant_dtype(environ),
            host_sampling=bool(parse(HOST_SAMPLING_KEY, environ.get(HOST_SAMPLING_KEY, ""), boolean)),
            framework=FRAMEWORKS.get(environ.get(FRAMEWORK_KEY, "").strip().lower()),
            notes=(*read, *leftovers(environ)),
        )


def leftovers(environ: Mapping[str, str]) -> list[str]:
    """One line for each variable of an older guide that means nothing here any more."""
    notes = []
    if environ.get(V1_KEY, "1").strip() not in ("", "1"):
        notes.append(f"{V1_KEY}={environ[V1_KEY]} is ignored: this vLLM has its V1 engine only")
    if environ.get(ARTIFACTS_KEY):
        notes.append(f"{ARTIFACTS_KEY} is ignored: --neuronserve.artifacts DIRECTORY keeps compiled graphs")
    framework = environ.get(FRAMEWORK_KEY, "").strip()
    if framework and framework.lower() not in FRAMEWORKS:
        notes.append(f"{FRAMEWORK_KEY}={framework} is ignored: the frameworks are {' and '.join(FRAMEWORKS)}")
    return notes


def _buckets(environ: Mapping[str, str], key: str) -> tuple[int, ...] | None:
    try:
        return parse_buckets(environ.get(key, ""), key)
    except BadBuckets as error:
        raise ConfigError(str(error)) from None


def _quant_dtype(environ: Mapping[str, str]) -> str | None:
    value = environ.get(QUANT_KEY, "").strip()
    if not value:
        return None
    return str(parse(QUANT_KEY, value, one_of("s8", "f8e4m3fn", aliases={"int8": "s8"})))
