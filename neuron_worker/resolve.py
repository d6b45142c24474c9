"""From what was asked to what is served.

    ServeRequest (vLLM's flags) + options + environment + config.json ── resolve ──▶ NeuronConfig, notes, warnings

The order is command line, environment, default. What cannot be served is a `ConfigError` that names key, value and
remedy; what a chip would refuse and the embedded device does not need is a warning. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from neuronserve.bucketing.errors import BucketError
from neuronserve.bucketing.memory import MemoryFacts
from neuronserve.bucketing.plan import Plan
from neuronserve.bucketing.report import render
from neuronserve.speculative.settings import Speculation

from . import (
    config_checks,
    draft_rules,
    elsewhere,
    environment,
    machine,
    options,
    overrides,
    picking,
    served_shapes,
    served_types,
)
from .config import NeuronConfig, ServeRequest
from .device import registry
from .device.base import Capabilities
from .device.cpu.library import num_threads as usable_cores
from .device.environment import ONE_CORE
from .device.errors import DeviceError, UnsupportedModel
from .device.graph.spec import ModelSpec, read_spec
from .draft_directory import refuse_as_target
from .elsewhere import NotServed
from .environment import Environment
from .errors import ConfigError
from .exported import read_settings
from .footprint import DraftShape, memory_facts
from .given import Given, optional_text
from .machine import Machine
from .picking import Asked, Pick

CORE_COUNTS = (1, 2, 4, 8, 12, 24, 32)
"""How many cores can work as one on some Neuron instance."""


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
    return machine.look(environ, optional_text(values["device_python"]))


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
    given = Given(request, values, env, override, choice.backend, capabilities, spec, export, notes, warnings)
    config = _config(given)
    plan = _plan(config)
    config_checks.check(config, given, environ)
    draft = draft_rules.size_of(config.speculation, request.draft_dir, capabilities)
    return Resolution(config, plan, spec, tuple(notes), tuple(warnings), _line(choice), here, draft)


def _config(given: Given) -> NeuronConfig:
    request, values = given.request, given.values
    length = served_shapes.length(given)
    block_size = served_shapes.block_size(given, length)
    chunk, chunked = served_shapes.chunks(given, length)
    quantization = served_types.quantization(given)
    return NeuronConfig(
        backend=given.backend,
        max_num_seqs=request.max_num_seqs or given.capabilities.default_max_num_seqs,
        max_model_len=length,
        block_size=block_size,
        vocab_size=given.spec.vocab_size,
        tensor_parallel_size=_cores(given),
        dtype=served_types.dtype(given),
        quantization=quantization,
        quantize_head=bool(values["quantize_head"]),
        activations=served_types.activations(given, quantization),
        chunk_tokens=chunk,
        context_buckets=given.env.context_buckets,
        token_generation_buckets=served_shapes.token_generation_buckets(given, length),
        chunked_prefill=chunked,
        prefix_caching=served_shapes.prefix_caching(given, block_size == length),
        sampling=_sampling(given),
        threads=_threads(given),
        artifacts=given.text("artifacts"),
        cache_url=given.text("cache_url"),
        require_cached=bool(values["require_cached"]),
        device_python=given.text("device_python"),
        device_timeout=given.number("device_timeout"),
        device_prepare_timeout=given.number("device_prepare_timeout"),
        device_restarts=given.number("device_restarts") or 0,
        step_tokens=request.max_num_batched_tokens,
        overrides=given.override,
        speculation=_speculation(given, length),
    )


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


def _cores(given: Given) -> int:
    asked, capabilities = given.request.tensor_parallel_size, given.capabilities
    known = capabilities.tensor_parallel_degrees or CORE_COUNTS
    if asked not in known:
        if known == (1,):
            raise ConfigError(ONE_CORE.format(asked, capabilities.name))
        problem = f"--tensor-parallel-size {asked}: cores work as one in groups of {', '.join(map(str, known))}"
        if capabilities.on_chip:
            raise ConfigError(f"{problem}; choose one of these")
        given.warnings.append(f"{problem}; a chip would refuse this, the {capabilities.name} device does not need it")
    return asked


def _sampling(given: Given) -> str:
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


def _what_compiles_sampling_in(given: Given) -> str | None:
    """The setting that leaves no choice."""
    speculation = given.request.speculation
    if speculation is not None and speculation.has_draft and given.capabilities.fused_speculation:
        return f"speculative_model={speculation.model!r}, verified inside a step,"
    return f"{overrides.KEY}.on_device_generation" if "on_device_generation" in given.override else None


def _threads(given: Given) -> int | None:
    """Of each engine. None: every core it may use; more threads than cores would make all of them slow."""
    asked, engines, capabilities = given.number("threads"), given.request.local_engines, given.capabilities
    if asked is not None or engines == 1 or capabilities.on_chip:
        return asked
    cores = usable_cores()
    given.notes.append(f"threads: {shared(cores, engines)} for each of {engines} engines, which share {cores} cores")
    return shared(cores, engines)


def shared(cores: int, engines: int) -> int:
    """Cores of each; what is left over is for the servers before them."""
    return max(1, cores // engines)


def _plan(config: NeuronConfig) -> Plan:
    try:
        return config.plan
    except BucketError as error:
        raise ConfigError(str(error)) from None


def _speculation(given: Given, length: int) -> Speculation | None:
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
