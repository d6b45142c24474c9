"""vLLM's platform: what this device is, and the configuration bent to what it can do.

`check_and_update_config` runs in the front end and again in the engine process: the first run resolves what was asked
into a `NeuronConfig` and leaves it in `additional_config`, every run applies it. What is refused is refused here,
before anything is loaded. Decides no shapes; knows no tensors and no model code.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from neuronserve.neuron_worker import (
    endpoint_plugin,
    environment,
    first_line,
    legacy_args,
    overrides,
    refusals,
    speculation,
)
from neuronserve.neuron_worker.config import (
    ASKED_KEY,
    OPTIONS_KEY,
    RESOLVED_KEY,
    NeuronConfig,
    ServeRequest,
    user_options,
)
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.model_files import check_weights, config_directory
from neuronserve.neuron_worker.picking import check_room
from neuronserve.neuron_worker.resolve import Resolution, resolve

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.inputs import EngineInput
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = logging.getLogger(__name__)

WORKER = "neuronserve.neuron_worker.worker.NeuronWorker"
SCHEDULER = "neuronserve.neuron_worker.scheduler.NeuronScheduler"
EXECUTOR = "neuronserve.neuron_worker.executor.NeuronExecutor"


class NeuronPlatform(Platform):
    _enum = PlatformEnum.OOT
    # vLLM's own tensors live on the host; "neuron" would have to be a device torch knows.
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    ray_device_key = "neuron_cores"
    device_control_env_var = "NEURON_RT_VISIBLE_CORES"
    additional_env_vars: list[str] = list(environment.FORWARDED)  # noqa: RUF012  (vLLM's own declaration)
    simple_compile_backend = "eager"  # inductor would compile for many seconds at the first sampled logprob

    serving: NeuronConfig | None = None
    """Of this front end, for `validate_request`, which vLLM calls with nothing but the request. Everything else reads
    the configuration it is given."""

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]  # the first: what "auto" makes of a float32 checkpoint

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "neuron"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        return 0.0

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def import_kernels(cls) -> None:
        """None of vLLM's: they may be built for another processor, and nothing here calls them."""

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode(mode=True)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """The device has no current one."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        return int(device_id.split("-")[0])  # "0-3" is a range of cores

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        if parser is not None:
            legacy_args.add_flags(parser)
            endpoint_plugin.switch_on(os.environ)

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        answered = {name: os.environ.pop(name) for name in environment.ANSWERED if name in os.environ}
        try:
            super().validate_environ(hard_fail)
        finally:
            os.environ.update(answered)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        raise ConfigError(
            f"quantization={quant}: weights quantised in the checkpoint, or by vLLM, are not supported; use the float "
            "checkpoint, and int8 by --quantization neuron_quant or NEURON_QUANT_DTYPE=s8"
        )

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode

        vllm_config.compilation_config.mode = CompilationMode.NONE  # the graphs are ours, torch.compile has none

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.model_config is None:
            return
        extra = _additional_config(vllm_config)
        ours = extra.get(OPTIONS_KEY, {})
        if RESOLVED_KEY not in ours:
            refusals.check(vllm_config)
            resolution = resolve(_request(vllm_config, extra), os.environ)
            check_room(resolution.config, resolution.memory_facts, resolution.machine)
            resolved = {RESOLVED_KEY: resolution.config.to_json()}
            vllm_config.additional_config = {**extra, OPTIONS_KEY: {**ours, **resolved}}
            if _speaks(vllm_config.parallel_config):
                _announce(resolution, refusals.without_effect(vllm_config))
        config = NeuronConfig.of(vllm_config)
        _apply(config, vllm_config)
        cls.serving = config

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """The block size is decided by then, and no attention backend has a say."""

    @classmethod
    def validate_request(cls, processed_inputs: EngineInput, params: SamplingParams | PoolingParams) -> None:
        from vllm.exceptions import VLLMValidationError

        if cls.serving is None:
            return
        try:
            refusals.check_request(processed_inputs, params, cls.serving)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None  # of anything else vLLM makes an empty 500


def _additional_config(vllm_config: VllmConfig) -> dict[str, Any]:
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        raise ConfigError(f"additional_config={extra!r}: expected a dictionary")
    return extra


def _request(vllm_config: VllmConfig, extra: Mapping[str, Any]) -> ServeRequest:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    download_dir = vllm_config.load_config.download_dir
    directory = config_directory(model.model, model.revision, download_dir)
    check_weights(directory, download_dir)
    asked = speculation.asked(vllm_config.speculative_config)
    return ServeRequest(
        model_dir=directory,
        max_model_len=model.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        dtype=str(model.dtype).removeprefix("torch."),
        local_engines=vllm_config.parallel_config.data_parallel_size_local,
        block_size=cache.block_size if cache.user_specified_block_size else None,
        options=user_options(extra),
        override=extra.get(overrides.KEY, {}),
        speculation=asked,
        draft_dir=speculation.draft_directory(asked, download_dir),
        **extra.get(OPTIONS_KEY, {}).get(ASKED_KEY, {}),
    )


def _speaks(parallel: ParallelConfig) -> bool:
    """Of several API servers none: the process that starts them resolves the configuration first."""
    return parallel._api_process_rank == (0 if parallel._api_process_count == 1 else -1)


def _announce(resolution: Resolution, without_effect: Sequence[str]) -> None:
    first_line.say(resolution.device)
    for warning in resolution.warnings:
        logger.warning("%s", warning)
    for note in (*resolution.notes, *without_effect):
        logger.info("%s", note)
    if logger.isEnabledFor(logging.INFO):
        print(resolution.report, file=sys.stderr, flush=True)  # a table: a log's prefix on every line would bury it


def _apply(config: NeuronConfig, vllm_config: VllmConfig) -> None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    parallel.worker_cls = WORKER
    parallel.distributed_executor_backend = EXECUTOR  # one worker drives all cores: tensor parallelism is the device's
    parallel.disable_custom_all_reduce = True
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = SCHEDULER
    scheduler.async_scheduling = False
    scheduler.max_num_seqs = config.max_num_seqs
    scheduler.enable_chunked_prefill = config.chunked_prefill
    scheduler.max_num_batched_tokens = config.max_num_batched_tokens
    if (drafts := vllm_config.speculative_config) is not None:
        scheduler.max_num_scheduled_tokens = config.max_num_batched_tokens  # vLLM has set it already, to another
        # vLLM takes places of a draft's own off this one, a step's tokens are counted without them.
        scheduler.max_num_batched_tokens += drafts.max_num_new_slots_for_drafting * config.max_num_seqs
    scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_size = config.max_num_batched_tokens
    cache.block_size = config.block_size
    cache.enable_prefix_caching = config.prefix_caching
    vllm_config.model_config.original_max_model_len = config.max_model_len  # the plan's: memory does not change it
