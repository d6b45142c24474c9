"""What of vLLM is not served here: features at start-up, and requests at the door.

A start-up refusal is a `ConfigError`; a request's is a ValueError, which vLLM answers with HTTP 400. Each names key,
value and remedy. Nothing is ignored in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from . import speculation
from .config import NeuronConfig
from .device.base import Capabilities
from .errors import ConfigError
from .parameters import NEED_LOGITS, NEED_OUR_RULE, asked
from .tgi_rules import TgiRules

_V2_KEY = "VLLM_USE_V2_MODEL_RUNNER"


def check(vllm_config: Any) -> None:
    """Everything a `VllmConfig` may ask for that this platform has not."""
    speculation.asked(vllm_config.speculative_config)
    for refused, message in _REFUSALS:
        if refused(vllm_config):
            raise ConfigError(message)


_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda config: os.environ.get(_V2_KEY, "0").strip().lower() in ("1", "true"),
        f"{_V2_KEY}=1: this plugin works with vLLM's V1 model runner; unset it",
    ),
    (
        lambda config: config.model_config.runner_type == "pooling",
        "embeddings and other pooling are not supported: serve a text-generation model (--runner generate)",
    ),
    (
        lambda config: config.model_config.is_multimodal_model,
        "multi-modal models are not supported: serve a text-generation model",
    ),
    (
        lambda config: config.lora_config is not None,
        "--enable-lora is not supported: merge the adapter into the model, and serve that",
    ),
    (
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
        "--pipeline-parallel-size above 1 is not supported: use --tensor-parallel-size for the device's cores",
    ),
    (
        lambda config: (
            config.parallel_config.prefill_context_parallel_size > 1
            or config.parallel_config.decode_context_parallel_size > 1
        ),
        "context parallelism is not supported: use --tensor-parallel-size for the device's cores",
    ),
    (
        lambda config: config.parallel_config.nnodes > 1,
        "--nnodes above 1 is not supported: start one server on each machine",
    ),
    (
        lambda config: config.parallel_config.distributed_executor_backend not in (None, "uni", "mp"),
        "--distributed-executor-backend other than uni and mp is not supported: one worker drives all cores of the "
        "device, whatever --tensor-parallel-size; leave it out",
    ),
    (
        lambda config: config.kv_transfer_config is not None,
        "--kv-transfer-config is not supported: leave it out",
    ),
    (
        lambda config: config.cache_config.cache_dtype not in ("auto", str(config.model_config.dtype)[6:]),
        "--kv-cache-dtype is not supported: the cache has the model's own type; leave it out",
    ),
    (
        lambda config: bool(config.model_config.hf_overrides),
        "--hf-overrides is not supported: the device reads config.json; change it there",
    ),
    (
        lambda config: config.model_config.enable_prompt_embeds,
        "--enable-prompt-embeds is not supported: send text or token ids",
    ),
    (
        lambda config: config.load_config.load_format not in ("auto", "hf", "safetensors"),
        "--load-format: the device reads the model's safetensors and nothing else, no random (dummy) weights either; "
        "leave it out",
    ),
    (
        lambda config: config.model_config.hf_config_path is not None,
        "--hf-config-path is not supported: the device reads the config.json beside the weights",
    ),
    (
        lambda config: (
            config.offload_config.uva.cpu_offload_gb > 0 or config.offload_config.prefetch.offload_group_size
        ),
        "--cpu-offload-gb and --offload-group-size are not supported: the device keeps all weights; leave them out",
    ),
    (
        lambda config: config.parallel_config.worker_cls != "auto",
        "--worker-cls is not supported: this plugin has its own worker; --worker-extension-cls may add to it",
    ),
    (
        lambda config: config.scheduler_config.scheduler_cls is not None,
        "--scheduler-cls is not supported: this plugin has its own scheduler; leave it out",
    ),
    (
        lambda config: config.watermark_config is not None,
        "--watermark-config is not supported: vLLM has it in its V2 model runner alone; leave it out",
    ),
)


def without_effect(vllm_config: Any) -> list[str]:
    """One line for each flag that is accepted and changes nothing."""
    found = (
        (
            vllm_config.model_config.enforce_eager,
            "--enforce-eager has no effect: the device runs static graphs, prepared before the first request",
        ),
        (
            vllm_config.attention_config.backend is not None,
            "--attention-backend has no effect: attention is the device's own",
        ),
    )
    return [line for given, line in found if given]


def check_request(inputs: Mapping[str, Any], params: Any, config: NeuronConfig) -> None:
    """Refuse at the door, so that every accepted request can finish: a step that fails ends its neighbours too."""
    tokens = inputs.get("prompt_token_ids") or ()
    _check_vocabulary(tokens, config.vocab_size)
    _check_length(len(tokens), config)
    _check_prompt_scores(params, config.capabilities)
    TgiRules.of(params)  # a mark that makes no sense is refused here
    if config.samples_by_its_own_rule:
        check_sampling(params, config.capabilities, is_greedy=config.is_greedy_compiled_in)


def check_session(config: NeuronConfig) -> None:
    """A request that waits for more of its prompt keeps its place and is in no decode."""
    if config.capabilities.all_live_rows_in_decode:
        raise ValueError(
            f"a prompt in parts (streaming input): the {config.backend} device decodes every sequence in every step "
            "and loses one that waits; send each turn as a request of its own, with all tokens before it"
        )


def _check_vocabulary(tokens: Any, vocab_size: int) -> None:
    # vLLM asks the tokenizer, which may know more tokens than the model, or not be there at all.
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(f"prompt: token id {wrong} is out of the vocabulary; send ids from 0 to {vocab_size - 1}")


def _check_length(length: int, config: NeuronConfig) -> None:
    largest = config.plan.largest_prompt
    # From max_model_len on the refusal is vLLM's own.
    if largest < length < config.max_model_len:
        raise ValueError(
            f"prompt: {length} tokens, the largest context bucket of the {config.backend} device is {largest}; shorten "
            "the prompt, or add a bucket to NEURON_CONTEXT_LENGTH_BUCKETS and start again"
        )


def _check_prompt_scores(params: Any, capabilities: Capabilities) -> None:
    value = getattr(params, "prompt_logprobs", None)
    if value is not None and not capabilities.prompt_logprobs:
        raise ValueError(
            f"prompt_logprobs={value!r} (or echo with logprobs): the {capabilities.name} device has the logits of a "
            "prompt's last token alone; leave it out"
        )


def check_sampling(params: Any, capabilities: Capabilities, *, is_greedy: bool = False) -> None:
    """On a device that draws tokens by rules compiled into it. `is_greedy`: it can do nothing else."""
    remedy = "or start the server with --neuronserve.sampling host"
    rules = TgiRules.of(params) or TgiRules()
    if found := {**asked(params, {**NEED_LOGITS, **NEED_OUR_RULE}), **rules.asked}:
        what = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ValueError(
            f"{what} needs logits on the host, but sampling is compiled into the {capabilities.name} device; "
            f"leave it out, {remedy}"
        )
    if capabilities.max_top_k is not None and params.top_k > capabilities.max_top_k:
        raise ValueError(
            f"top_k={params.top_k}: the {capabilities.name} device keeps at most {capabilities.max_top_k} candidates; "
            f"ask for fewer, {remedy}"
        )
    if is_greedy and params.temperature > 0 and params.top_k != 1:
        raise ValueError(
            f"temperature={params.temperature}: greedy decoding is compiled into the {capabilities.name} device; "
            "send 0, or start the server without override_neuron_config.on_device_generation"
        )
