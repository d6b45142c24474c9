"""From what was asked to what is served.

    ServeRequest (vLLM's flags) + options + environment + config.json ── resolve ──▶ NeuronConfig, notes, warnings

The order is command line, environment, default. What cannot be served is a `ConfigError` that names key, value and
remedy; what a chip would refuse and the embedded device does not need is a warning. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from neuronserve.bucketing.errors import BucketError
from neuronserve.bucketing.memory import MemoryFacts
from neuronserve.bucketing.plan import CHUNK_TOKENS, FINE_CHUNK_TOKENS, TOKEN_GENERATION_KEY, Plan, make_plan
from neuronserve.bucketing.report import render
from neuronserve.server.cache.places import places
from neuronserve.speculative.settings import Speculation

from . import draft_rules, elsewhere, environment, export_rules, machine, options, overrides, picking
from .config import NeuronConfig, ServeRequest
from .device import registry
from .device.base import Capabilities
from .device.cpu.library import num_threads as usable_cores
from .device.environment import ONE_CORE, SEVERAL_MACHINES, for_several_machines
from .device.errors import DeviceError, UnsupportedModel
from .device.graph.spec import ModelSpec, read_spec
from .draft_directory import refuse_as_target
from .elsewhere import NotServed
from .environment import Environment
from .errors import ConfigError
from .exported import ExportSettings, read_settings
from .footprint import DraftShape, memory_facts
from .machine import Machine
from .picking import Asked, Pick

CORE_COUNTS = (1, 2, 4, 8, 12, 24, 32)
"""How many cores can work as one on some Neuron instance."""

BLOCK_SIZE = 16
QUANTIZATIONS = {"s8": "int8", "f8e4m3fn": "f8e4m3fn"}

OVERRIDDEN = "transformers-neuronx"
"""Whose NeuronConfig it is that the override changes."""

USED_OVERRIDES: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"quant.quant_dtype", "continuous_batching.max_num_seqs", "continuous_batching.max_model_len"}),
}
"""Fields of the override that a backend off the chip looks at; a chip's backend looks at all of them."""

DTYPES = {
    **dict.fromkeys(("float32", "float", "fp32", "f32"), "float32"),
    **dict.fromkeys(("float16", "half", "fp16", "f16"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
"""Every spelling of a type, those of the classic library among them."""

_IN_PROCESS = "without device_python the device is in the server's own process"

AMPS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Resolution:
    """A configuration and what the user should hear about it, one line each."""

    config: NeuronConfig
    plan: Plan
    spec: ModelSpec
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    device: str  # one line: which, and why
    machine: Machine
    draft: DraftShape | None = None

    @property
    def memory_facts(self) -> MemoryFacts:
        return memory_facts(self.config, self.spec, self.plan, self.draft)

    @property
    def report(self) -> str:
        """Shapes, padding and memory, as `neuronserve plan` prints them."""
        return render(self.plan, self.memory_facts)


def spell_dtype(value: object) -> object:
    """`fp16` and the like as vLLM spells them; what is no spelling of a type is left for others to refuse."""
    return DTYPES.get(value.strip().lower(), value) if isinstance(value, str) else value


def backend_name(given: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """The backend these options ask for."""
    values, _ = options.read(given, environ)
    return picked(values, Environment.read(environ), _look(values, environ)).backend


def device_line(given: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """Which backend these options ask for, and why."""
    values, _ = options.read(given, environ)
    return _line(picked(values, Environment.read(environ), _look(values, environ)))


def _line(choice: Pick) -> str:
    return f"device: {choice.backend} ({choice.why})"


def _look(values: Mapping[str, object], environ: Mapping[str, str]) -> Machine:
    return machine.look(environ, _optional_text(values["device_python"]))


@dataclass(frozen=True)
class _Given:
    """What a configuration is decided from, and the lines that deciding leaves. Filled by `resolve`."""

    request: ServeRequest
    values: Mapping[str, object]  # of the options
    env: Environment
    override: Mapping[str, Any]
    backend: str
    capabilities: Capabilities
    spec: ModelSpec
    export: ExportSettings | None
    notes: list[str]
    warnings: list[str]


def resolve(request: ServeRequest, environ: Mapping[str, str], here: Machine | None = None) -> Resolution:
    """`here`: the machine that serves; None: this one."""
    here = here or _look(options.read(request.options, environ)[0], environ)
    try:
        return _resolve(request, environ, here)
    except NotServed as refused:
        remedy = elsewhere.remedy(refused, request, here, lambda other: _resolve(other, environ, here))
        raise ConfigError(f"{refused}{remedy}") from None


def _resolve(request: ServeRequest, environ: Mapping[str, str], here: Machine) -> Resolution:
    values, warnings = options.read(request.options, environ)
    env = Environment.read(environ)
    override = overrides.read(request.override)
    choice = picked(values, env, here)
    capabilities = _capabilities(choice.backend)
    spec, export = _spec(request.model_dir, capabilities), read_settings(request.model_dir)
    notes = [*env.notes, *choice.notes]
    given = _Given(request, values, env, override, choice.backend, capabilities, spec, export, notes, warnings)
    config = _config(given)
    plan = _plan(config)
    _check(config, given, environ)
    draft = draft_rules.size_of(config.speculation, request.draft_dir, capabilities)
    return Resolution(config, plan, spec, tuple(notes), tuple(warnings), _line(choice), here, draft)


def _config(given: _Given) -> NeuronConfig:
    request, values, env, capabilities = given.request, given.values, given.env, given.capabilities
    length = _length(request.max_model_len, given.spec, given.warnings)
    block_size = _block_size(request.block_size, length, capabilities, given.notes)
    chunk, chunked = _chunks(request, values, length, capabilities, env, given.notes, given.warnings)
    quantization = _quantization(request, values, given.override, env, capabilities, given.export)
    return NeuronConfig(
        backend=given.backend,
        max_num_seqs=request.max_num_seqs or capabilities.default_max_num_seqs,
        max_model_len=length,
        block_size=block_size,
        vocab_size=given.spec.vocab_size,
        tensor_parallel_size=_cores(request.tensor_parallel_size, capabilities, given.warnings),
        dtype=_dtype(request.dtype, given.spec, capabilities),
        quantization=quantization,
        quantize_head=bool(values["quantize_head"]),
        activations=_activations(request, values, quantization, capabilities),
        chunk_tokens=chunk,
        context_buckets=env.context_buckets,
        token_generation_buckets=_token_generation_buckets(given, length),
        chunked_prefill=chunked,
        prefix_caching=_prefix_caching(request, block_size == length, capabilities, given.notes),
        sampling=_sampling(given),
        threads=_threads(_optional_int(values["threads"]), request.local_engines, capabilities, given.notes),
        artifacts=_optional_text(values["artifacts"]),
        cache_url=_optional_text(values["cache_url"]),
        require_cached=bool(values["require_cached"]),
        device_python=_optional_text(values["device_python"]),
        device_timeout=_optional_int(values["device_timeout"]),
        device_prepare_timeout=_optional_int(values["device_prepare_timeout"]),
        device_restarts=_optional_int(values["device_restarts"]) or 0,
        step_tokens=request.max_num_batched_tokens,
        overrides=given.override,
        speculation=_speculation(given, length),
    )


def _token_generation_buckets(given: _Given, length: int) -> tuple[int, ...] | None:
    """Where cores share the positions of a sequence, a cache line has one length in all graphs: the longest."""
    asked = given.env.token_generation_buckets
    if given.backend != OVERRIDDEN or not given.override.get("shard_over_sequence"):
        return asked
    if unused := [size for size in asked or () if size != length]:
        given.notes.append(
            f"{TOKEN_GENERATION_KEY}: {', '.join(map(str, unused))} not used with shard_over_sequence: every decode is "
            f"at --max-model-len {length}"
        )
    return (length,)


def _check(config: NeuronConfig, given: _Given, environ: Mapping[str, str]) -> None:
    """What only the whole configuration shows."""
    _check_model(config, given.request.model_dir)
    given.notes.extend(_without_effect(config, given.values))
    given.notes.extend(_several_machines(config, environ))
    _check_cache(config, given.request.model_dir, environ)
    _check_override(config, given.spec, given.notes, given.warnings)
    _check_fused_draft(config, given)
    if given.export is not None:
        given.notes.extend(export_rules.check(given.export, given.request.model_dir, config))


def picked(values: Mapping[str, object], env: Environment, here: Machine) -> Pick:
    """The device for these options on this machine."""
    asked = Asked(
        backend=str(values["backend"]),
        framework=env.framework,
        device_flag=values["device"] == "neuron",
        require_chip=bool(values["require_chip"]),
    )
    return picking.pick(asked, here)


def _capabilities(backend: str) -> Capabilities:
    try:
        return registry.capabilities(backend)
    except DeviceError as error:
        raise ConfigError(str(error)) from None


def _spec(model_dir: str, capabilities: Capabilities) -> ModelSpec:
    try:
        refuse_as_target(model_dir)
        return read_spec(model_dir, capabilities.more_architectures)
    except UnsupportedModel as error:
        raise NotServed(capabilities.name, str(error)) from None
    except DeviceError as error:
        raise ConfigError(str(error)) from None


def _length(asked: int | None, spec: ModelSpec, warnings: list[str]) -> int:
    if asked is None or asked <= spec.longest:
        return asked or spec.longest
    problem = f"--max-model-len {asked}: {spec.architecture} here has positions for {spec.longest} tokens"
    if spec.rope is None:
        raise ConfigError(f"{problem}, a learned table; use --max-model-len {spec.longest} or less")
    warnings.append(f"{problem}; vLLM serves beyond them only with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1")
    return asked


def _block_size(asked: int | None, length: int, capabilities: Capabilities, notes: list[str]) -> int:
    if capabilities.kv_layout == "slots":
        if asked not in (None, length):
            notes.append(
                f"--block-size {asked}: blocks are whole slots of {length} tokens on the {capabilities.name} device"
            )
        return length
    if asked is None:
        return min(BLOCK_SIZE, length)
    if length % asked == 0:
        return asked
    divisor = max(size for size in range(1, min(asked, length) + 1) if length % size == 0)
    rounded = f" --max-model-len {length // asked * asked}," if asked < length else ""
    raise ConfigError(
        f"--block-size {asked} does not divide --max-model-len {length}: use{rounded} --block-size {divisor}, "
        f"or --block-size {length} for one block per sequence"
    )


def _chunks(
    request: ServeRequest,
    values: Mapping[str, object],
    length: int,
    capabilities: Capabilities,
    env: Environment,
    notes: list[str],
    warnings: list[str],
) -> tuple[int | None, bool]:
    """(tokens of a chunk that were asked for, whether prompts may be split)."""
    chunk, budget = _optional_int(values["chunk_tokens"]), request.max_num_batched_tokens
    if not capabilities.splits_prompts:
        given = {"--max-num-batched-tokens": budget, "--enable-chunked-prefill": request.enable_chunked_prefill}
        notes += [
            f"{flag} has no effect: the {capabilities.name} device takes prompts whole"
            for flag, value in given.items()
            if value
        ]
        return chunk, False
    if request.enable_chunked_prefill is False and not _has_narrow_buckets(env, length, warnings):
        if chunk is not None:
            notes.append(f"chunk_tokens={chunk} has no effect with --no-enable-chunked-prefill")
        return length, False
    if budget is None:
        return chunk, True
    chunk = chunk or _default_chunk(capabilities, env)
    if budget > chunk + (request.max_num_seqs or capabilities.default_max_num_seqs):
        notes.append(
            f"--max-num-batched-tokens {budget}: a step holds every decode row and at most {chunk} prompt tokens; "
            f"--neuronserve.chunk_tokens {budget} raises that"
        )
    return min(budget, chunk), True


def _has_narrow_buckets(env: Environment, length: int, warnings: list[str]) -> bool:
    if not env.context_buckets or env.context_buckets[-1] >= length:
        return False
    warnings.append(
        f"--no-enable-chunked-prefill: prompts above {env.context_buckets[-1]} tokens, the largest context "
        "bucket, still go in chunks"
    )
    return True


def _default_chunk(capabilities: Capabilities, env: Environment) -> int:
    if env.context_buckets:
        return env.context_buckets[-1]
    return FINE_CHUNK_TOKENS if capabilities.fine_prefill_ladder else CHUNK_TOKENS


def _prefix_caching(request: ServeRequest, one_block: bool, capabilities: Capabilities, notes: list[str]) -> bool:
    if request.enable_prefix_caching is False:
        return False
    if one_block or capabilities.kv_layout == "slots" or not capabilities.splits_prompts:
        if request.enable_prefix_caching:
            why = "a block is a whole sequence" if one_block else f"the {capabilities.name} device takes prompts whole"
            notes.append(f"--enable-prefix-caching has no effect: {why}; choose a smaller --block-size")
        return False
    return True


def _cores(asked: int, capabilities: Capabilities, warnings: list[str]) -> int:
    known = capabilities.tensor_parallel_degrees or CORE_COUNTS
    if asked not in known:
        if known == (1,):
            raise ConfigError(ONE_CORE.format(asked, capabilities.name))
        problem = f"--tensor-parallel-size {asked}: cores work as one in groups of {', '.join(map(str, known))}"
        if capabilities.on_chip:
            raise ConfigError(f"{problem}; choose one of these")
        warnings.append(f"{problem}; a chip would refuse this, the {capabilities.name} device does not need it")
    return asked


def _dtype(asked: str, spec: ModelSpec, capabilities: Capabilities) -> str:
    dtype = spec.checkpoint_dtype if asked == "auto" else str(spell_dtype(asked))
    if dtype not in capabilities.dtypes:
        known = ", ".join(capabilities.dtypes)
        raise ConfigError(f"--dtype {asked}: the {capabilities.name} device computes in {known}; use one of these")
    return dtype


def _quantization(
    request: ServeRequest,
    values: Mapping[str, object],
    override: Mapping[str, Any],
    env: Environment,
    capabilities: Capabilities,
    export: ExportSettings | None,
) -> str | None:
    asked = _asked_quantization(values, override, env)
    choice = values["quantization"]
    if "quant" in override and asked is not None and choice in ("none", "int8") and choice != QUANTIZATIONS[asked[1]]:
        ours = options.spelled("quantization", request.options)
        raise ConfigError(f"{ours}={choice} and {asked[0]}={asked[1]} contradict each other: leave one of them out")
    if asked is None:
        said = options.spelled("quantization", request.options) if choice == "none" else None
        return export_rules.quantization(export, request.model_dir, None, said)
    key, dtype = asked
    name = QUANTIZATIONS[dtype]
    if name not in capabilities.quantizations:
        stored = " or ".join(capabilities.quantizations) or "the model's own type only"
        raise ConfigError(
            f"{key}={dtype}: the {capabilities.name} device stores weights as {stored}; use s8 (int8) or leave it out"
        )
    return export_rules.quantization(export, request.model_dir, name, key)


def _asked_quantization(
    values: Mapping[str, object], override: Mapping[str, Any], env: Environment
) -> tuple[str, str] | None:
    """(key that decides, classic name of the type)."""
    choice = values["quantization"]
    if "quant" in override:
        return f"{overrides.KEY}.quant.quant_dtype", override["quant"].get("quant_dtype", "s8")
    if choice == "none":
        return None
    if choice == "int8":
        return "quantization", "s8"
    if env.quant_dtype is not None or choice == "neuron_quant":
        return environment.QUANT_KEY, env.quant_dtype or "s8"
    return None


def _activations(
    request: ServeRequest, values: Mapping[str, object], quantization: str | None, capabilities: Capabilities
) -> str:
    asked = _optional_text(values["activations"])
    if quantization is None:
        return "float32"
    if asked == "int8" and not capabilities.rounds_activations:
        raise ConfigError(
            f"{options.spelled('activations', request.options)}=int8: the {capabilities.name} device multiplies int8 "
            "weights with float activations; leave it out"
        )
    return asked or ("int8" if capabilities.rounds_activations else "float32")


def _sampling(given: _Given) -> str:
    asked, env, capabilities = str(given.values["sampling"]), given.env, given.capabilities
    if capabilities.sampling == "fixed" and (compiler := _what_compiles_sampling_in(given)) is not None:
        if asked == "host" or (asked == "auto" and env.host_sampling):
            key = "neuronserve.sampling=host" if asked == "host" else f"{environment.HOST_SAMPLING_KEY}=1"
            raise ConfigError(
                f"{compiler} compiles sampling into the device, and {key} asks for logits: leave one of them out"
            )
        return "device"
    if asked != "auto":
        return asked
    # Rules that are compiled in cannot give logprobs, seeds or grammars: the host can.
    return "host" if env.host_sampling or capabilities.sampling == "fixed" else "device"


def _what_compiles_sampling_in(given: _Given) -> str | None:
    """The setting that leaves no choice."""
    speculation = given.request.speculation
    if speculation is not None and speculation.has_draft and given.capabilities.fused_speculation:
        return f"speculative_model={speculation.model!r}, verified inside a step,"
    return f"{overrides.KEY}.on_device_generation" if "on_device_generation" in given.override else None


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


def _threads(asked: int | None, engines: int, capabilities: Capabilities, notes: list[str]) -> int | None:
    """Of each engine. None: every core it may use; more threads than cores would make all of them slow."""
    if asked is not None or engines == 1 or capabilities.on_chip:
        return asked
    cores = usable_cores()
    notes.append(f"threads: {shared(cores, engines)} for each of {engines} engines, which share {cores} cores")
    return shared(cores, engines)


def shared(cores: int, engines: int) -> int:
    """Cores of each; what is left over is for the servers before them."""
    return max(1, cores // engines)


def _plan(config: NeuronConfig) -> Plan:
    try:
        return config.plan
    except BucketError as error:
        raise ConfigError(str(error)) from None


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


def _speculation(given: _Given, length: int) -> Speculation | None:
    asked, request, capabilities = given.request.speculation, given.request, given.capabilities
    if asked is not None and asked.model is None and capabilities.fused_speculation:
        raise ConfigError(
            f"speculative_config: the {capabilities.name} device verifies drafts of a model inside it and no others; "
            "give a draft model or an EAGLE head, or leave it out"
        )
    if asked is not None and asked.num_tokens >= length:
        raise ConfigError(
            f"num_speculative_tokens={asked.num_tokens}: a sequence has at most {length} tokens (max_model_len), its "
            "drafts among them; give fewer, such as 4"
        )
    if asked is not None and request.draft_dir is not None:
        pair = draft_rules.Pair(asked, request.draft_dir, request.model_dir, given.spec, length)
        given.notes.extend(draft_rules.check(pair, capabilities))
    if asked is None:
        return None
    looks_up = asked.has_head and bool(given.values["lookup_beside_draft"])
    return replace(asked, is_adaptive=bool(given.values["adaptive_depth"]), looks_up_first=looks_up)


def _check_model(config: NeuronConfig, model_dir: str) -> None:
    """By the backend's own rules, as it would refuse it once it loads."""
    try:
        registry.refuse_model(config.backend, model_dir, config.device_options())
    except DeviceError as error:
        raise NotServed(config.backend, str(error)) from None


def _check_fused_draft(config: NeuronConfig, given: _Given) -> None:
    """By the backend's own rules, as it would refuse them once it loads."""
    request = given.request
    if not config.is_fused or request.draft_dir is None:
        return
    try:
        registry.refuse_draft(config.backend, request.model_dir, request.draft_dir, config.device_options())
    except DeviceError as error:
        raise ConfigError(str(error)) from None


def _optional_int(value: object) -> int | None:
    return None if value is None else int(str(value))


def _optional_text(value: object) -> str | None:
    return None if value is None else str(value)
