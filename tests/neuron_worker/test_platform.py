"""The classic flags and keywords through vLLM's own parsers and configuration classes, on our platform."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import AsyncEngineArgs, EngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from neuronserve.neuron_worker.config import NeuronConfig
from neuronserve.neuron_worker.device.cpu.library import num_threads as usable_cores
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.platform import EXECUTOR, SCHEDULER, WORKER, NeuronPlatform
from neuronserve.neuron_worker.resolve import shared

from .tiny_model import SMOLLM2_HEADS, tiny_model

ARITHMETIC = {"neuronserve": {"backend": "arithmetic"}}


def configured(model: str, **asked: Any) -> VllmConfig:
    return EngineArgs(model=model, **{"additional_config": ARITHMETIC, **asked}).create_engine_config()


def from_command_line(model: str, line: str) -> VllmConfig:
    """`line` as bash hands it over, through the parser of `vllm serve` and of the API server's module."""
    parser = make_arg_parser(FlexibleArgumentParser())
    words = ["--model", model, "--neuronserve.backend", "arithmetic", *shlex.split(line)]
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()


@pytest.fixture(scope="module")
def smollm2_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("smollm2"), **SMOLLM2_HEADS)


def test_the_platform_is_ours() -> None:
    assert isinstance(current_platform, NeuronPlatform)


# -- the guide, word for word


@pytest.mark.parametrize(
    "line",
    [
        "--tensor-parallel-size 32 --max-num-seqs 4 --max-model-len 2048 --block-size 8",
        "--tensor-parallel-size 32 --max-num-seqs 4 --max-model-len 2048 --block-size 8 --device neuron",
        r"--tensor-parallel-size 32 --max-num-seqs 4 --max-model-len 2048 --block-size 8 "
        r"--override-neuron-config {\"shard_over_sequence\":\"True\"}",
    ],
)
def test_the_guides_command_lines(tiny: str, line: str) -> None:
    config = NeuronConfig.of(from_command_line(tiny, line))

    assert (config.tensor_parallel_size, config.max_num_seqs, config.max_model_len) == (32, 4, 2048)
    assert config.block_size == 8
    assert config.overrides == ({"shard_over_sequence": True} if "override" in line else {})


def test_the_guides_script_on_heads_that_do_not_divide(smollm2_heads: str) -> None:
    config = configured(
        smollm2_heads,
        max_num_seqs=8,
        max_model_len=128,
        block_size=128,
        device="neuron",
        tensor_parallel_size=2,
        override_neuron_config={"shard_over_sequence": True},
    )

    ours = NeuronConfig.of(config)
    assert ours.one_block_per_sequence
    assert ours.overrides == {"shard_over_sequence": True}
    assert not config.cache_config.enable_prefix_caching
    assert config.cache_config.block_size == 128


def test_modern_names_mean_the_same(tiny: str) -> None:
    extra = {**ARITHMETIC, "override_neuron_config": {"fuse_qkv": "True"}}
    modern = configured(tiny, max_num_seqs=4, additional_config=extra)
    classic = configured(tiny, max_num_seqs=4, override_neuron_config={"fuse_qkv": True})

    assert NeuronConfig.of(modern) == NeuronConfig.of(classic)


@pytest.mark.parametrize("line", ["--quantization neuron_quant", "-q neuron_quant", "--neuronserve.quantization int8"])
def test_int8_from_the_command_line(tiny: str, line: str) -> None:
    config = from_command_line(tiny, line)

    assert NeuronConfig.of(config).quantization == "int8"
    assert config.model_config.quantization is None


def test_int8_from_a_script(tiny: str) -> None:
    assert NeuronConfig.of(configured(tiny, quantization="neuron_quant")).quantization == "int8"


def test_int8_from_the_shell(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_QUANT_DTYPE", "s8")

    assert NeuronConfig.of(configured(tiny)).quantization == "int8"


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("fp16", torch.float16), ("half", torch.float16), ("bf16", torch.bfloat16)],
)
def test_types(tiny: str, dtype: str, expected: torch.dtype) -> None:
    config = configured(tiny, dtype=dtype)

    assert config.model_config.dtype == expected
    assert NeuronConfig.of(config).dtype == str(expected).removeprefix("torch.")


def test_a_type_from_the_command_line(tiny: str) -> None:
    assert from_command_line(tiny, "--dtype bf16").model_config.dtype == torch.bfloat16


@pytest.mark.parametrize("leftover", ["VLLM_USE_V1", "VLLM_NEURON_FRAMEWORK", "NEURON_COMPILED_ARTIFACTS"])
def test_what_an_old_shell_holds_breaks_nothing(tiny: str, leftover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leftover, "1")

    configured(tiny, fail_on_environ_validation=True)


def test_a_variable_nobody_knows_is_still_vllms_to_refuse(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NO_SUCH_THING", "1")

    with pytest.raises(ValueError, match="VLLM_NO_SUCH_THING"):
        configured(tiny, fail_on_environ_validation=True)


def test_help_has_a_section_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--help=neuron"])

    printed = capsys.readouterr().out
    assert "--override-neuron-config" in printed
    assert "--speculative-model" in printed


def test_the_parsers_of_the_benchmarks_have_the_flags_too() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

    assert parser.parse_args(["--device", "neuron"]).additional_config == {"neuronserve": {"device": "neuron"}}


# -- what vLLM is told


def test_one_worker_drives_all_cores(tiny: str) -> None:
    config = configured(tiny, tensor_parallel_size=32)

    assert config.parallel_config.worker_cls == WORKER
    assert config.parallel_config.distributed_executor_backend == EXECUTOR
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.scheduler_config.async_scheduling is False


def test_data_parallel_engines_share_the_cores(tiny: str) -> None:
    assert NeuronConfig.of(configured(tiny, data_parallel_size=2)).threads == shared(usable_cores(), 2)


def test_defaults_are_the_devices(tiny: str) -> None:
    config = configured(tiny)
    ours = NeuronConfig.of(config)

    assert config.scheduler_config.max_num_seqs == ours.capabilities.default_max_num_seqs
    assert config.scheduler_config.max_num_batched_tokens == ours.max_num_batched_tokens
    assert config.scheduler_config.enable_chunked_prefill
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.block_size == 16


def test_a_device_of_slots_gets_whole_prompts_and_one_block_each(tiny: str) -> None:
    slots = {"neuronserve": {"backend": "arithmetic-slots"}}
    config = configured(tiny, additional_config=slots, max_model_len=512, block_size=8, max_num_seqs=4)

    assert config.cache_config.block_size == 512
    assert not config.cache_config.enable_prefix_caching
    assert not config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens >= 512


def test_what_was_typed_is_kept_apart_from_vllms_defaults(tiny: str) -> None:
    config = configured(tiny, max_num_batched_tokens=64, enable_prefix_caching=False)

    assert config.scheduler_config.max_num_batched_tokens == 64
    assert NeuronConfig.of(config).plan.chunk_tokens == 64
    assert not config.cache_config.enable_prefix_caching


def test_the_engine_process_finds_the_same(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM runs the platform's hook again there, on the configuration the front end sent; its shell may differ.
    config = configured(tiny, max_model_len=1024, block_size=32, max_num_seqs=4)
    before = copy.deepcopy(config)
    monkeypatch.setenv("NEURON_CONTEXT_LENGTH_BUCKETS", "128")

    current_platform.check_and_update_config(config)

    assert NeuronConfig.of(config) == NeuronConfig.of(before)
    assert config.scheduler_config == before.scheduler_config
    assert config.cache_config.block_size == before.cache_config.block_size


def test_ours_travels_as_json(tiny: str) -> None:
    extra = configured(tiny, override_neuron_config={"fuse_qkv": "True"}).additional_config

    assert json.loads(json.dumps(extra)) == extra


def test_the_callers_dictionary_is_left_alone(tiny: str) -> None:
    configured(tiny)

    assert ARITHMETIC == {"neuronserve": {"backend": "arithmetic"}}


def test_the_plan_is_shown_before_anything_is_loaded(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    configured(tiny, max_num_seqs=4, max_model_len=512)

    printed = capsys.readouterr().err
    assert "4 sequences of up to 512 tokens" in printed
    assert "memory on 1 core" in printed


# -- what is refused


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"device": "cuda"}, "device='cuda' is not served"),
        ({"async_scheduling": True}, "--async-scheduling is not built yet"),
        ({"speculative_model": "ngram"}, "num_speculative_tokens is missing"),
        ({"override_neuron_config": {"fuse_qvk": 1}}, r"override_neuron_config\.fuse_qvk"),
        ({"neuronserve": {"backend": "gpu"}}, "backend='gpu' is not known"),
        ({"block_size": 24, "max_model_len": 128}, "--block-size 24 does not divide --max-model-len 128"),
        ({"enable_lora": True}, "--enable-lora is not supported"),
        ({"runner": "pooling", "convert": "embed"}, "embeddings and other pooling are not supported"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "--pipeline-parallel-size above 1"),
        ({"distributed_executor_backend": "external_launcher"}, "--distributed-executor-backend other than uni and mp"),
        ({"hf_overrides": {"rope_theta": 1.0}}, "--hf-overrides is not supported"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is not supported"),
        ({"load_format": "dummy"}, "--load-format: the device reads the model's safetensors"),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb and --offload-group-size are not supported"),
        ({"offload_group_size": 2}, "--cpu-offload-gb and --offload-group-size are not supported"),
        ({"worker_cls": "somebody.Worker"}, "--worker-cls is not supported"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls is not supported"),
    ],
)
def test_refused_by_name(tiny: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(tiny, **asked)


def test_another_config_json_is_refused(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hf-config-path is not supported"):
        configured(tiny, hf_config_path=tiny_model(tmp_path))


def test_a_flag_that_changes_nothing_is_one_line(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="neuronserve"):
        configured(tiny, enforce_eager=True, attention_backend="TORCH_SDPA")

    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("--enforce-eager has no effect") for line in said) == 1
    assert sum(line.startswith("--attention-backend has no effect") for line in said) == 1


@pytest.mark.parametrize(("count", "rank", "speaks"), [(1, 0, True), (2, -1, True), (2, 0, False), (2, 1, False)])
def test_one_process_speaks_for_several_api_servers(
    tiny: str, count: int, rank: int, speaks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(tiny, _api_process_count=count, _api_process_rank=rank)

    assert ("memory on 1 core" in capsys.readouterr().err) is speaks


def test_the_other_model_runner_is_refused(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")

    with pytest.raises(ConfigError, match=r"VLLM_USE_V2_MODEL_RUNNER=1: .* unset it"):
        configured(tiny)


def test_a_checkpoint_that_is_quantised_already(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    model = tiny_model(tmp_path, quantization_config=awq)

    with pytest.raises(ConfigError, match="use the float checkpoint, and int8 by --quantization neuron_quant"):
        configured(model, dtype="float16")


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, architectures=["OPTForCausalLM"])

    with pytest.raises(ConfigError, match=r"OPTForCausalLM .* is not supported; supported are"):
        configured(model)
