"""From what was asked to what is served: `resolve`, and the frozen `NeuronConfig` that travels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.config import NeuronConfig, ServeRequest
from neuronserve.neuron_worker.device.cpu.library import num_threads as usable_cores
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.machine import Machine
from neuronserve.neuron_worker.resolve import Resolution, resolve, shared
from neuronserve.neuron_worker.served_types import spell_dtype

from .tiny_model import tiny_model

LENGTH = 2048


def resolved(directory: Path | str, environ: dict[str, str] | None = None, **asked: Any) -> Resolution:
    options = {"backend": "arithmetic", **asked.pop("options", {})}
    request = {"max_model_len": LENGTH, "max_num_seqs": 4, **asked}
    return resolve(ServeRequest(str(directory), options=options, **request), environ or {})


def test_learned_positions_end_where_their_table_ends(tmp_path: Path) -> None:
    config = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 1024, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **config}))

    with pytest.raises(ConfigError, match=r"--max-model-len 2048: .* 1024 tokens, .* use --max-model-len 1024"):
        resolved(tmp_path)
    assert resolved(tmp_path, max_model_len=None).config.max_model_len == 1024


def test_a_length_beyond_the_models_is_one_warning(tiny: str) -> None:
    assert resolved(tiny, max_model_len=4096).warnings == ()
    [warning] = resolved(tiny, max_model_len=8192).warnings

    assert "positions for 4096 tokens" in warning
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in warning


def test_linear_scaling_stretches_the_models_length(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, rope_scaling={"rope_type": "linear", "factor": 4.0})

    assert resolved(model, max_model_len=None).config.max_model_len == 4 * 4096


def test_it_travels_as_json(tiny: str) -> None:
    config = resolved(
        tiny, {"NEURON_CONTEXT_LENGTH_BUCKETS": "128,512"}, override={"fuse_qkv": "True"}, tensor_parallel_size=32
    ).config

    assert NeuronConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_the_plan_is_the_same_after_the_journey(tiny: str) -> None:
    config = resolved(tiny, {"NEURON_TOKEN_GEN_BUCKETS": "512,2048"}).config

    assert NeuronConfig.from_json(config.to_json()).plan == config.plan


def test_what_nobody_asked_comes_from_model_and_device(tiny: str) -> None:
    config = resolve(ServeRequest(tiny, options={"backend": "arithmetic"}), {}).config

    assert config.max_model_len == 4096  # config.json
    assert config.dtype == "float32"  # config.json
    assert config.max_num_seqs == config.capabilities.default_max_num_seqs
    assert (config.block_size, config.prefix_caching, config.chunked_prefill) == (16, True, True)
    assert config.quantization is None


# -- blocks


@pytest.mark.parametrize("block_size", [1, 8, 32, 1024])
def test_a_block_size_that_divides_is_taken(tiny: str, block_size: int) -> None:
    config = resolved(tiny, block_size=block_size).config

    assert (config.block_size, config.prefix_caching) == (block_size, True)


def test_a_block_of_the_whole_length_turns_prefix_caching_off(tiny: str) -> None:
    config = resolved(tiny, block_size=LENGTH).config

    assert config.one_block_per_sequence
    assert not config.prefix_caching


def test_prefix_caching_asked_for_without_effect_is_one_line(tiny: str) -> None:
    notes = resolved(tiny, block_size=LENGTH, enable_prefix_caching=True).notes

    assert [note for note in notes if "--enable-prefix-caching has no effect: a block is a whole sequence" in note]


@pytest.mark.parametrize(
    ("block_size", "remedy"),
    [(100, "--max-model-len 2000, --block-size 64"), (4096, "use --block-size 2048")],
)
def test_a_block_size_that_does_not_divide_names_the_remedy(tiny: str, block_size: int, remedy: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--block-size {block_size} does not divide --max-model-len 2048: .*{remedy}"
    ):
        resolved(tiny, block_size=block_size)


def test_a_device_of_slots_takes_any_block_size_and_says_so(tiny: str) -> None:
    done = resolved(tiny, block_size=100, options={"backend": "arithmetic-slots"})

    assert (done.config.block_size, done.config.prefix_caching, done.config.chunked_prefill) == (LENGTH, False, False)
    assert "--block-size 100: blocks are whole slots of 2048 tokens on the arithmetic-slots device" in done.notes


# -- buckets and chunks


def test_context_buckets_are_chunk_widths_where_prompts_can_be_split(tiny: str) -> None:
    config = resolved(tiny, {"NEURON_CONTEXT_LENGTH_BUCKETS": "512,128"}).config

    assert config.plan.prefill_tokens == (0, 128, 512)
    assert (config.plan.chunk_tokens, config.plan.largest_prompt) == (512, LENGTH)


def test_no_token_generation_bucket_that_is_large_enough(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"NEURON_TOKEN_GEN_BUCKETS=128,512: none is large enough .* add 2048"):
        resolved(tiny, {"NEURON_TOKEN_GEN_BUCKETS": "128,512"})


def test_too_many_shapes_are_refused(tiny: str) -> None:
    many = ",".join(str(size) for size in range(8, 2049, 8))

    with pytest.raises(
        ConfigError, match="at most 256 are compiled; give fewer values in NEURON_CONTEXT_LENGTH_BUCKETS"
    ):
        resolved(tiny, {"NEURON_TOKEN_GEN_BUCKETS": many})


@pytest.mark.parametrize(
    ("asked", "chunk"),
    [
        ({}, 256),
        ({"options": {"chunk_tokens": 64}}, 64),
        ({"max_num_batched_tokens": 100}, 100),
        ({"max_num_batched_tokens": 100, "options": {"chunk_tokens": 64}}, 64),
        ({"max_num_batched_tokens": 8192}, 256),
        ({"enable_chunked_prefill": False}, LENGTH),
    ],
)
def test_the_chunk_follows_what_was_asked(tiny: str, asked: dict[str, Any], chunk: int) -> None:
    assert resolved(tiny, **asked).config.plan.chunk_tokens == chunk


def test_a_budget_above_what_a_step_holds_is_one_line(tiny: str) -> None:
    [note] = resolved(tiny, max_num_batched_tokens=8192).notes

    assert note.startswith("--max-num-batched-tokens 8192: a step holds every decode row and at most 256 prompt tokens")
    assert resolved(tiny, max_num_batched_tokens=260).notes == ()


@pytest.mark.parametrize(
    ("asked", "start"),
    [
        ({"max_num_batched_tokens": 4096}, "--max-num-batched-tokens has no effect: the arithmetic-slots device"),
        ({"enable_chunked_prefill": True}, "--enable-chunked-prefill has no effect: the arithmetic-slots device"),
    ],
)
def test_flags_about_splitting_where_prompts_go_whole(tiny: str, asked: dict[str, Any], start: str) -> None:
    [note] = resolved(tiny, options={"backend": "arithmetic-slots"}, **asked).notes

    assert note.startswith(start)


def said_of_options(done: Any) -> list[str]:
    """Its notes, but for the one that says that this machine has no chip."""
    return [note for note in done.notes if "no /dev/neuron*" not in note]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"chunk_tokens": 64}, {"enable_chunked_prefill": False}),
        ({"quantize_head": True}, {}),
        ({"activations": "int8"}, {}),
        ({"adaptive_depth": False}, {}),
        ({"lookup_beside_draft": False}, {}),
        ({"artifacts": "/somewhere"}, {}),
        ({"device_timeout": 9}, {}),
        ({"device_prepare_timeout": 9}, {}),
        ({"threads": 1, "backend": "transformers-neuronx"}, {}),
    ],
)
def test_an_option_without_effect_is_one_line(tiny: str, options: dict[str, Any], asked: dict[str, Any]) -> None:
    [note] = said_of_options(resolved(tiny, options=options, **asked))

    assert note.startswith(next(iter(options)))
    assert "has no effect" in note


def test_a_step_holds_a_chunk_and_every_decode_row(tiny: str) -> None:
    assert resolved(tiny).config.max_num_batched_tokens == 256 + 4


def test_a_step_holds_no_more_than_the_user_said(tiny: str) -> None:
    assert resolved(tiny, max_num_batched_tokens=100).config.max_num_batched_tokens == 100


def test_whole_prompts_need_a_budget_of_the_whole_length(tiny: str) -> None:
    config = resolved(tiny, enable_chunked_prefill=False, max_num_batched_tokens=100).config

    assert not config.chunked_prefill
    assert config.max_num_batched_tokens >= LENGTH


def test_narrow_buckets_keep_prompts_split(tiny: str) -> None:
    done = resolved(tiny, {"NEURON_CONTEXT_LENGTH_BUCKETS": "128"}, enable_chunked_prefill=False)

    assert done.config.chunked_prefill
    assert "--no-enable-chunked-prefill: prompts above 128 tokens" in done.warnings[0]


# -- cores, types, weights


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 12, 24, 32])
def test_core_counts_of_the_instances_pass(tiny: str, cores: int) -> None:
    assert resolved(tiny, tensor_parallel_size=cores).warnings == ()


def test_another_core_count_is_one_warning_off_the_chip(tiny: str) -> None:
    done = resolved(tiny, tensor_parallel_size=3)

    assert done.config.tensor_parallel_size == 3
    [warning] = done.warnings
    assert "--tensor-parallel-size 3: cores work as one in groups of 1, 2, 4, 8, 12, 24, 32" in warning


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("half", "float16"),
        ("fp16", "float16"),
        ("F16", "float16"),
        ("float16", "float16"),
        ("bf16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("float", "float32"),
        ("fp32", "float32"),
        ("f32", "float32"),
        ("auto", "auto"),
        ("int8", "int8"),
    ],
)
def test_types_in_every_spelling(spelling: str, dtype: str) -> None:
    assert spell_dtype(spelling) == dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_auto_keeps_the_checkpoints_type(tmp_path: Path, dtype: str) -> None:
    assert resolved(tiny_model(tmp_path, torch_dtype=dtype)).config.dtype == dtype


@pytest.mark.parametrize(
    ("environ", "asked", "quantization"),
    [
        ({}, {}, None),
        ({"NEURON_QUANT_DTYPE": "s8"}, {}, "int8"),
        ({}, {"options": {"quantization": "neuron_quant"}}, "int8"),
        ({}, {"options": {"quantization": "int8"}}, "int8"),
        ({}, {"override": {"quant": {"quant_dtype": "s8"}}}, "int8"),
        ({}, {"override": {"quant": {}}}, "int8"),
        ({"NEURON_QUANT_DTYPE": "s8"}, {"options": {"quantization": "none"}}, None),
        ({}, {"options": {"quantization": "int8"}, "override": {"quant": {"quant_dtype": "s8"}}}, "int8"),
        ({"NEURON_QUANT_DTYPE": "f8e4m3fn"}, {"override": {"quant": {"quant_dtype": "s8"}}}, "int8"),
    ],
)
def test_int8_weights_by_every_name(
    tiny: str, environ: dict[str, str], asked: dict[str, Any], quantization: str | None
) -> None:
    assert resolved(tiny, environ, **asked).config.quantization == quantization


@pytest.mark.parametrize(
    ("environ", "options", "key"),
    [
        ({}, {"quantization": "none"}, "neuronserve.quantization=none"),
        ({"NEURONSERVE_QUANTIZATION": "none"}, {}, "NEURONSERVE_QUANTIZATION=none"),
    ],
)
def test_int8_weights_and_none_at_once(tiny: str, environ: dict[str, str], options: dict[str, Any], key: str) -> None:
    message = f"{key} and override_neuron_config.quant.quant_dtype=s8 contradict each other"

    with pytest.raises(ConfigError, match=re.escape(message)):
        resolved(tiny, environ, options=options, override={"quant": {}})


@pytest.mark.parametrize(
    ("environ", "asked", "key"),
    [
        ({"NEURON_QUANT_DTYPE": "f8e4m3fn"}, {}, "NEURON_QUANT_DTYPE"),
        ({"NEURON_QUANT_DTYPE": "f8e4m3fn"}, {"options": {"quantization": "neuron_quant"}}, "NEURON_QUANT_DTYPE"),
        ({}, {"override": {"quant": {"quant_dtype": "f8e4m3fn"}}}, r"override_neuron_config\.quant\.quant_dtype"),
    ],
)
def test_a_weight_type_the_device_has_not(tiny: str, environ: dict[str, str], asked: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=f8e4m3fn: .* use s8"):
        resolved(tiny, environ, **asked)


# -- device, override, sampling


def test_the_device_and_why_are_one_line(tiny: str) -> None:
    done = resolve(ServeRequest(tiny, options={"device": "neuron"}), {}, Machine())

    assert done.config.backend == "cpu"
    assert done.device.startswith("device: cpu (--device neuron: no Neuron device on this machine;")
    assert done.notes == ()


def test_a_framework_left_in_the_shell_breaks_nothing(tiny: str) -> None:
    environ = {"VLLM_NEURON_FRAMEWORK": "transformers-neuronx"}

    done = resolve(ServeRequest(tiny), environ, Machine())

    assert done.config.backend == "cpu"
    assert done.notes == ("VLLM_NEURON_FRAMEWORK is ignored: no Neuron device on this machine",)


def test_an_unknown_backend_lists_those_there_are(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"backend='cpuu' is not known; use one of auto, cpu.*did you mean cpu"):
        resolved(tiny, options={"backend": "cpuu"})


def test_an_override_without_effect_is_one_line(tiny: str) -> None:
    done = resolved(tiny, tensor_parallel_size=32, override={"shard_over_sequence": "True", "fuse_qkv": True})

    assert done.warnings == ()
    assert done.notes == ("override_neuron_config: no effect on the arithmetic device: shard_over_sequence, fuse_qkv",)


def test_what_a_chip_refuses_is_one_warning_here(tiny: str) -> None:
    done = resolved(tiny, tensor_parallel_size=12, override={"shard_over_sequence": True, "fuse_mlp": True})

    [warning] = done.warnings
    assert "multiple of the 8 key and value heads, it is 12" in warning
    assert "fuse_mlp needs mlp_out_weight_transpose" in warning


@pytest.mark.parametrize(
    ("environ", "options", "sampling"),
    [
        ({}, {}, "device"),
        ({"NEURON_ON_DEVICE_SAMPLING_DISABLED": "1"}, {}, "host"),
        ({"NEURON_ON_DEVICE_SAMPLING_DISABLED": "1"}, {"sampling": "device"}, "device"),
        ({}, {"sampling": "host"}, "host"),
    ],
)
def test_where_tokens_are_drawn(tiny: str, environ: dict[str, str], options: dict[str, str], sampling: str) -> None:
    assert resolved(tiny, environ, options=options).config.sampling == sampling


def test_a_model_nobody_can_compute_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, architectures=["MambaForCausalLM"])

    with pytest.raises(ConfigError, match=r"MambaForCausalLM .* is not supported; supported are .*LlamaForCausalLM"):
        resolved(model)


def test_the_report_counts_weights_and_cache_per_core(tmp_path: Path) -> None:
    # SmolLM2's heads. Padding heads and replicating KV heads over the cores is the report's own arithmetic.
    model = tiny_model(tmp_path, num_attention_heads=9, num_key_value_heads=3)

    facts = resolved(model, tensor_parallel_size=2).memory_facts

    assert (facts.cores, facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.kv_bytes) == (2, 9, 3, 4, 4)
    assert facts.weight_bytes > 0
    assert facts.scratch_bytes > 0


def test_the_device_gets_everything_it_loads_with(tiny: str) -> None:
    config = resolved(
        tiny,
        {"NEURON_QUANT_DTYPE": "s8"},
        dtype="bf16",
        tensor_parallel_size=2,
        block_size=32,
        override={"fuse_qkv": True},
        options={"quantize_head": True, "threads": 1, "sampling": "device", "require_cached": True},
    ).config

    options = config.device_options()

    assert (options.max_num_seqs, options.max_model_len, options.block_size) == (4, LENGTH, 32)
    assert (options.dtype, options.quantization, options.quantize_head) == ("bfloat16", "int8", True)
    assert (options.tensor_parallel_size, options.threads, options.neuron_config) == (2, 1, {"fuse_qkv": True})
    assert (options.sampling, options.require_artifacts) == ("device", True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"quantization": "int8", "backend": "cpu"}, "int8"),
        ({"quantization": "int8", "activations": "float32", "backend": "cpu"}, "float32"),
        ({"backend": "cpu"}, "float32"),
        ({"quantization": "int8"}, "float32"),
    ],
)
def test_int8_weights_meet_int8_activations_where_the_device_rounds_them(
    tiny: str, given: dict[str, Any], expected: str
) -> None:
    config = resolved(tiny, options=given).config

    assert config.activations == config.device_options().activations == expected


def test_int8_activations_are_refused_where_the_device_has_none(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"NEURONSERVE_ACTIVATIONS=int8: the arithmetic device .* leave it out"):
        resolved(tiny, {"NEURONSERVE_ACTIVATIONS": "int8"}, options={"quantization": "int8"})


@pytest.mark.parametrize(("cores", "engines", "each"), [(8, 2, 4), (7, 2, 3), (2, 2, 1), (2, 4, 1), (8, 1, 8)])
def test_engines_share_the_cores(cores: int, engines: int, each: int) -> None:
    assert shared(cores, engines) == each


def test_data_parallel_engines_say_how_they_share(tiny: str) -> None:
    each = shared(usable_cores(), 2)

    done = resolved(tiny, local_engines=2)

    assert done.config.threads == each
    assert done.notes == (f"threads: {each} for each of 2 engines, which share {usable_cores()} cores",)
    assert resolved(tiny).config.threads is None
    assert resolved(tiny, local_engines=2, options={"threads": 3}).config.threads == 3
    assert resolved(tiny, local_engines=2, options={"backend": "transformers-neuronx"}).config.threads is None
