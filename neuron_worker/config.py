"""One frozen `NeuronConfig`: everything the platform, the scheduler, the worker and the plan need to agree on.

Made once by `resolve`, in the front end or by `neuronserve plan`; it travels as JSON in vLLM's
`additional_config["neuronserve"]`, so every process reads the same values and nothing is decided twice.
Imports neither vLLM nor torch, and decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from neuronserve.bucketing.plan import Plan, PlanRequest, make_plan
from neuronserve.speculative.settings import Speculation

from .device import registry
from .device.base import Capabilities, Device, DeviceOptions

OPTIONS_KEY = "neuronserve"
"""Ours in vLLM's `additional_config`: the options as given, and beside them:"""

ASKED_KEY = "asked"
"""what the user typed for settings that vLLM fills in when they are absent,"""

RESOLVED_KEY = "resolved"
"""and the resolved `NeuronConfig`."""


def user_options(additional_config: Mapping[str, Any]) -> dict[str, Any]:
    """The options alone."""
    ours: Mapping[str, Any] = additional_config.get(OPTIONS_KEY, {})
    return {key: value for key, value in ours.items() if key not in (ASKED_KEY, RESOLVED_KEY)}


@dataclass(frozen=True)
class ServeRequest:
    """What was asked for, in vLLM's words; None: not asked. Filled by the platform, or by the plan command."""

    model_dir: str  # holds config.json
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    local_engines: int = 1  # data-parallel ones on this machine
    options: Mapping[str, object] = field(default_factory=dict)
    override: Mapping[str, object] = field(default_factory=dict)
    speculation: Speculation | None = None
    draft_dir: str | None = None  # holds config.json of the draft


@dataclass(frozen=True)
class NeuronConfig:
    """What is served. Made by `resolve`; read by platform, scheduler, worker and plan."""

    backend: str
    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocab_size: int
    tensor_parallel_size: int
    dtype: str
    quantization: str | None
    quantize_head: bool
    activations: str  # what int8 weights are multiplied with: "int8" or "float32"
    chunk_tokens: int | None  # asked for; the plan has what became of it
    context_buckets: tuple[int, ...] | None
    token_generation_buckets: tuple[int, ...] | None
    chunked_prefill: bool
    prefix_caching: bool
    sampling: str  # "device": what the device can draw itself stays there; "host": all logits to vLLM's sampler
    threads: int | None
    artifacts: str | None  # directory of compiled graphs
    cache_url: str | None  # where machines share them
    require_cached: bool  # never compile
    device_python: str | None
    device_timeout: int | None  # seconds a step may take there
    device_prepare_timeout: int | None  # and each of loading, allocating, compiling
    device_restarts: int  # attempts in a row to bring a lost device back
    step_tokens: int | None  # the user's --max-num-batched-tokens
    overrides: Mapping[str, Any]
    speculation: Speculation | None = None

    @property
    def capabilities(self) -> Capabilities:
        return registry.capabilities(self.backend)

    @property
    def samples_by_its_own_rule(self) -> bool:
        """Whether tokens are drawn by a sampler that was compiled into the device."""
        return self.capabilities.sampling == "fixed" and self.sampling == "device"

    @property
    def is_greedy_compiled_in(self) -> bool:
        return not self.overrides.get("on_device_generation", {}).get("do_sample", True)

    @property
    def one_block_per_sequence(self) -> bool:
        return self.block_size == self.max_model_len

    @property
    def max_num_batched_tokens(self) -> int:
        """What the scheduler may put in one step: where a call may mix, a chunk and every decode row beside it."""
        decode_tokens = self.max_num_seqs * self.decode_width
        if self.step_tokens is not None and self.chunked_prefill:
            return max(self.step_tokens, decode_tokens)
        return self.plan.step_tokens + (decode_tokens if self.plan.mixes else 0)

    @property
    def decode_width(self) -> int:
        """Tokens a decode row may have in a step: the last one and its drafts."""
        return 1 if self.speculation is None else 1 + self.speculation.num_tokens

    @property
    def num_drafts(self) -> int:
        """Tokens that a draft on the device proposes for each row; 0: there is no such draft."""
        return self.speculation.num_tokens if self.speculation is not None and self.speculation.has_draft else 0

    @property
    def is_fused(self) -> bool:
        """Whether each decode call of the device drafts and verifies by itself."""
        return self.num_drafts > 0 and self.capabilities.fused_speculation

    @property
    def plan_request(self) -> PlanRequest:
        return PlanRequest(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            chunk_tokens=self.chunk_tokens,
            context_buckets=self.context_buckets,
            token_generation_buckets=self.token_generation_buckets,
            decode_width=self.decode_width,
        )

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.plan_request, self.capabilities)

    def create_device(self) -> Device:
        """Where the server runs it; it holds nothing yet."""
        return registry.create(self.backend, self.device_python, self.device_timeout, self.device_prepare_timeout)

    def device_options(self) -> DeviceOptions:
        return DeviceOptions(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            prompts_per_call=self.plan.prompts_per_call,
            dtype=self.dtype,
            quantization=self.quantization,
            quantize_head=self.quantize_head,
            activations=self.activations,
            tensor_parallel_size=self.tensor_parallel_size,
            neuron_config=dict(self.overrides),
            threads=self.threads,
            num_drafts=self.num_drafts,
            sampling=self.sampling,
            require_artifacts=self.require_cached,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NeuronConfig:
        lists = {key: tuple(value) for key, value in values.items() if key.endswith("_buckets") and value is not None}
        speculation = Speculation.from_json(values.get("speculation"))
        return cls(**{**values, **lists, "speculation": speculation})

    @classmethod
    def of(cls, vllm_config: Any) -> NeuronConfig:
        """The configuration that the platform left in vLLM's `additional_config`."""
        return cls.from_json(vllm_config.additional_config[OPTIONS_KEY][RESOLVED_KEY])
