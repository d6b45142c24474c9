"""What only a whole configuration shows: settings that contradict each other, or that nothing here looks at."""

from __future__ import annotations

from collections.abc import Mapping

from neuronserve.bucketing.plan import CONTEXT_KEY, make_plan
from neuronserve.server.cache.places import places

from . import export_rules, overrides
from .config import NeuronConfig
from .device import registry
from .device.environment import SEVERAL_MACHINES, for_several_machines
from .device.errors import DeviceError
from .device.graph.spec import ModelSpec
from .elsewhere import NotServed
from .errors import ConfigError
from .given import Given
from .served_shapes import OVERRIDDEN

USED_OVERRIDES: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"quant.quant_dtype", "continuous_batching.max_num_seqs", "continuous_batching.max_model_len"}),
}
"""Fields of the override that a backend off the chip looks at; a chip's backend looks at all of them."""

AMPS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

_IN_PROCESS = "without device_python the device is in the server's own process"


def check(config: NeuronConfig, given: Given, environ: Mapping[str, str]) -> None:
    """What only the whole configuration shows."""
    _check_model(config, given.request.model_dir)
    given.notes.extend(_without_effect(config, given.values))
    given.notes.extend(_several_machines(config, environ))
    _check_cache(config, given.request.model_dir, environ)
    _check_override(config, given.spec, given.notes, given.warnings)
    _check_fused_draft(config, given)
    _check_room_for_drafts(config)
    if given.export is not None:
        given.notes.extend(export_rules.check(given.export, given.request.model_dir, config))


def _without_effect(config: NeuronConfig, values: Mapping[str, object]) -> list[str]:
    """Options that were given and that nothing here looks at."""
    on_chip, asked = config.capabilities.on_chip, config.speculation
    rules = (
        (config.quantize_head and config.quantization is None, "quantize_head", "weights are not int8"),
        (values["activations"] is not None and config.quantization is None, "activations", "weights are not int8"),
        (not values["adaptive_depth"] and asked is None, "adaptive_depth", "nothing is drafted"),
        (
            not values["adaptive_depth"] and config.is_fused,
            "adaptive_depth",
            f"the {config.backend} device drafts in every step",
        ),
        (
            not values["lookup_beside_draft"] and (not (asked and asked.has_head) or config.is_fused),
            "lookup_beside_draft",
            "no EAGLE head drafts between the steps",
        ),
        (config.threads is not None and on_chip, "threads", f"the {config.backend} device computes on its cores"),
        (config.artifacts is not None and not on_chip, "artifacts", f"the {config.backend} device compiles no graphs"),
        (
            config.cache_url is not None and not config.capabilities.saves_graphs,
            "cache_url",
            f"the {config.backend} device gives no graphs away",
        ),
        (config.require_cached and not on_chip, "require_cached", f"the {config.backend} device compiles no graphs"),
        (config.device_timeout is not None and config.device_python is None, "device_timeout", _IN_PROCESS),
        (
            config.device_prepare_timeout is not None and config.device_python is None,
            "device_prepare_timeout",
            _IN_PROCESS,
        ),
    )
    return [f"{key} has no effect: {why}" for given, key, why in rules if given]


def _several_machines(config: NeuronConfig, environ: Mapping[str, str]) -> list[str]:
    """Refused before vLLM starts on a chip, which would refuse them once it loads; elsewhere one line."""
    found = for_several_machines(environ)
    if found and config.capabilities.on_chip:
        raise ConfigError(SEVERAL_MACHINES.format(", ".join(found)))
    return (
        [f"{', '.join(found)}: no effect, the {config.backend} device computes on this machine alone"] if found else []
    )


def _check_cache(config: NeuronConfig, model_dir: str, environ: Mapping[str, str]) -> None:
    """Refuse a URL that nothing reads, and a start that could only fail."""
    if not config.capabilities.saves_graphs:
        if config.require_cached and config.capabilities.on_chip:
            raise ConfigError(
                f"require_cached: the {config.backend} device's graphs are compiled by its SDK, which cannot be told "
                "not to, and kept in the SDK's own cache (NEURON_COMPILE_CACHE_URL) alone; leave require_cached out"
            )
        return
    where = places(environ, config.artifacts, config.cache_url).beside(model_dir)
    if config.require_cached and where.local is None and where.export is None:
        why = where.note or "there is no cache to look in"
        raise ConfigError(f"require_cached: {why}; name one with artifacts or cache_url, or leave require_cached out")
    if where.remote is not None and where.is_asked_for:  # others cost the start a line
        from neuronserve.server.cache.store import check_url  # loads the file systems

        check_url(where.remote_from, where.remote)


def _check_override(config: NeuronConfig, spec: ModelSpec, notes: list[str], warnings: list[str]) -> None:
    """The backend's own rules, then the library's: an error on a chip, one warning elsewhere."""
    capabilities = config.capabilities
    try:
        registry.refuse_settings(config.backend, config.overrides, config.max_num_seqs)
    except DeviceError as error:
        raise ConfigError(str(error)) from None
    problems = overrides.problems(config.overrides, _surroundings(config, spec))
    if problems and capabilities.on_chip:
        raise ConfigError(f"{overrides.KEY}: {'; '.join(problems)}")
    if problems:
        warnings.append(f"{overrides.KEY}, refused by a chip and not needed here: {'; '.join(problems)}")
    if not capabilities.on_chip:
        unused = overrides.without_effect(config.overrides, USED_OVERRIDES["cpu"])
        if unused:
            notes.append(f"{overrides.KEY}: no effect on the {config.backend} device: {', '.join(unused)}")
    else:
        notes.extend(overrides.replaced(config.overrides))


def _surroundings(config: NeuronConfig, spec: ModelSpec) -> overrides.Surroundings:
    plan = make_plan(config.plan_request, registry.capabilities(OVERRIDDEN))  # the device may split prompts
    return overrides.Surroundings(
        architecture=spec.architecture,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        hidden_size=spec.hidden_size,
        cores=config.tensor_parallel_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        amp=AMPS[config.dtype],
        context_buckets=tuple(shape.context for shape in plan.shapes if shape.prefill_tokens),
        token_generation_buckets=tuple(shape.context for shape in plan.shapes if shape.decode_rows),
    )


def _check_room_for_drafts(config: NeuronConfig) -> None:
    """vLLM takes a request that joins with one token to compute as a row with all its drafts, or not at all: where that
    is more than a chunk, neither the request nor any behind it would ever be served."""
    chunk, asked = config.plan.chunk_tokens, config.speculation
    if asked is not None and chunk is not None and chunk <= asked.num_tokens:
        raise ConfigError(
            f"num_speculative_tokens={asked.num_tokens} with chunks of {chunk} prompt tokens: a chunk must hold a "
            f"token and its drafts; allow {asked.num_tokens + 1} or draft fewer (a chunk is what "
            f"--neuronserve.chunk_tokens says, at most --max-num-batched-tokens, or the largest of {CONTEXT_KEY})"
        )


def _check_model(config: NeuronConfig, model_dir: str) -> None:
    """By the backend's own rules, as it would refuse it once it loads."""
    try:
        registry.refuse_model(config.backend, model_dir, config.device_options())
    except DeviceError as error:
        raise NotServed(config.backend, str(error)) from None


def _check_fused_draft(config: NeuronConfig, given: Given) -> None:
    """By the backend's own rules, as it would refuse them once it loads."""
    request = given.request
    if not config.is_fused or request.draft_dir is None:
        return
    try:
        registry.refuse_draft(config.backend, request.model_dir, request.draft_dir, config.device_options())
    except DeviceError as error:
        raise ConfigError(str(error)) from None
