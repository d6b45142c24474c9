"""`override_neuron_config`: the classic fields, their types, and the combinations the library refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.overrides import FIELDS, Surroundings, problems, read, replaced, without_effect

LLAMA_8B = Surroundings(
    architecture="LlamaForCausalLM",
    num_heads=32,
    num_kv_heads=8,
    hidden_size=4096,
    cores=32,
    max_num_seqs=4,
    max_model_len=2048,
    amp="bf16",
)

CLASSIC_FIELDS = """
    sparse_attn quant kv_cache_quant continuous_batching attention_layout collectives_layout cache_layout padding_side
    group_query_attention sequence_parallel_norm sequence_parallel_norm_threshold bf16_rms_norm on_device_embedding
    on_device_generation all_reduce_dtype cast_logits_dtype fuse_qkv qkv_tiling weight_tiling
    mlp_in_weight_tiling_permute_order mlp_out_weight_tiling_permute_order mlp_out_weight_transpose log_softmax_scores
    shard_over_sequence duplicate_q_weight_sos output_all_logits attn_output_transposed fused_rmsnorm_qkv
    fused_rmsnorm_mlp fuse_mlp is_eagle_target is_eagle_draft has_pre_attention_norm compilation_worker_count
"""


def test_every_field_of_the_library_is_known() -> None:
    assert sorted(field.name for field in FIELDS) == sorted(CLASSIC_FIELDS.split())


def test_strings_of_the_shell_become_types() -> None:
    given = {"shard_over_sequence": "True", "fuse_qkv": "false", "compilation_worker_count": "4", "cache_layout": "sbh"}

    assert read(given) == {
        "shard_over_sequence": True,
        "fuse_qkv": False,
        "compilation_worker_count": 4,
        "cache_layout": "SBH",
    }


def test_nested_configurations_are_typed_too() -> None:
    given = {
        "quant": {"quant_dtype": "s8", "quantize_attn": "False"},
        "continuous_batching": {"max_num_seqs": "4"},
        "on_device_generation": {"top_k": ["256", 50], "dynamic": "True", "temperature": "0.5"},
        "kv_cache_quant": {"quant_dtype": "f8e4m3fn"},
        "sparse_attn": {"attn_type": "window", "sparse_attn_config": {"window_size": 8}},
    }

    assert read(given) == {
        "quant": {"quant_dtype": "s8", "quantize_attn": False},
        "continuous_batching": {"max_num_seqs": 4},
        "on_device_generation": {"top_k": [256, 50], "dynamic": True, "temperature": 0.5},
        "kv_cache_quant": {"quant_dtype": "f8e4m3fn"},
        "sparse_attn": {"attn_type": "window", "sparse_attn_config": {"window_size": 8}},
    }


def test_a_null_leaves_the_default() -> None:
    assert read({"quant": None, "fuse_qkv": True}) == {"fuse_qkv": True}


def test_an_unknown_field_names_the_near_match() -> None:
    with pytest.raises(ConfigError, match=r"override_neuron_config\.fuse_qvk.*did you mean fuse_qkv\?"):
        read({"fuse_qvk": True})


def test_an_unknown_nested_field_names_its_path() -> None:
    with pytest.raises(ConfigError, match=r"override_neuron_config\.quant\.quant_type.*did you mean quant_dtype\?"):
        read({"quant": {"quant_type": "s8"}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fuse_qkv": "maybe"}, "fuse_qkv='maybe': expected True or False"),
        ({"attention_layout": "SBH"}, "attention_layout='SBH': expected HSB or BSH"),
        ({"cast_logits_dtype": "float8"}, "cast_logits_dtype='float8': expected float32"),
        ({"group_query_attention": "replicate-heads"}, "did you mean replicated-heads"),
        ({"sequence_parallel_norm_threshold": 0}, "threshold=0: expected a whole number of at least 1"),
        ({"quant": "s8"}, "quant='s8': expected an object"),
        ({"quant": {"quant_dtype": "int4"}}, "quant_dtype='int4': expected s8 or f8e4m3fn"),
    ],
)
def test_a_bad_value_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(given)


def test_what_is_not_an_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="override_neuron_config=\\['fuse_qkv'\\]: expected an object"):
        read(["fuse_qkv"])


def test_the_guides_override_is_right_on_its_machine() -> None:
    assert problems(read({"shard_over_sequence": "True"}), LLAMA_8B) == []


def test_the_defaults_of_serving_are_right() -> None:
    assert problems({}, LLAMA_8B) == []


def test_a_sampler_has_what_serving_sets() -> None:
    """Else `global_top_k` would need `dynamic` beside it, and lists `per_batch_line`, which are on."""
    given = {"on_device_generation": {"global_top_k": 64, "top_p_min_tokens": [1, 2, 1, 1]}}

    assert problems(read(given), LLAMA_8B) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fuse_qkv": True}, []),
        ({"on_device_generation": {"global_top_k": 64, "top_p_min_tokens": 2}}, []),
        (
            {"on_device_generation": {"top_k": 5, "global_top_k": 64, "temperature": [0.5] * 4}},
            [
                "override_neuron_config.on_device_generation: no effect of top_k, temperature: each request has its "
                "own; --override-generation-config sets what requests of the OpenAI routes leave out"
            ],
        ),
        (
            {"on_device_generation": {"top_p": 0.5, "do_sample": False}},
            ["override_neuron_config.on_device_generation: no effect of top_p: greedy decoding is compiled in"],
        ),
    ],
)
def test_what_each_request_has_of_its_own_is_said(given: dict[str, Any], expected: list[str]) -> None:
    assert replaced(read(given)) == expected


@pytest.mark.parametrize(
    ("given", "around", "message"),
    [
        ({"shard_over_sequence": True}, {"cores": 12}, "multiple of the 8 key and value heads, it is 12"),
        ({"shard_over_sequence": True}, {"cores": 8}, "8 cores .* and 8 key and value heads leave each core its own"),
        ({"kv_cache_quant": {}}, {"architecture": "MistralForCausalLM"}, "kv_cache_quant is for LlamaForCausalLM"),
        ({"shard_over_sequence": True}, {"num_kv_heads": 32}, "would be turned off: every head"),
        ({"shard_over_sequence": True}, {"architecture": "MistralForCausalLM"}, "is for LlamaForCausalLM"),
        ({"shard_over_sequence": True, "cache_layout": "BSH"}, {}, "needs cache_layout SBH"),
        (
            {"shard_over_sequence": True},
            {"cores": 24, "context_buckets": (128, 1536, 2048)},
            "multiples of 3, the cores of each head, 128, 2048 are not: set NEURON_CONTEXT_LENGTH_BUCKETS to such",
        ),
        ({"qkv_tiling": True, "fuse_qkv": False}, {}, "qkv_tiling needs fuse_qkv"),
        ({"fuse_mlp": True}, {}, "fuse_mlp needs mlp_out_weight_transpose"),
        ({"fused_rmsnorm_qkv": True}, {}, "fused_rmsnorm_qkv would be turned off"),
        ({"weight_tiling": True}, {"hidden_size": 576}, "multiple of 128, the model's is 576"),
        ({"mlp_in_weight_tiling_permute_order": [1, 3, 0, 2]}, {}, "2 before 3"),
        ({"sparse_attn": {"attn_type": "window"}}, {}, "sparse_attn is for GPT-2 and OPT"),
        ({"cache_layout": "BSH"}, {"context_buckets": (128, 512)}, "one context bucket"),
        ({"group_query_attention": "shard-over-batch"}, {}, r"--max-num-seqs \(4\) to be a multiple"),
        ({"padding_side": "left"}, {}, "pads on the right"),
        (
            {"sequence_parallel_norm": True, "sequence_parallel_norm_threshold": 100},
            {"context_buckets": (64, 128, 500)},
            r"multiples of --tensor-parallel-size \(32\), 500 are not: .*NEURON_CONTEXT_LENGTH_BUCKETS",
        ),
        ({"continuous_batching": {"max_num_seqs": 8}}, {}, r"max_num_seqs=8 must be --max-num-seqs \(4\)"),
        ({"continuous_batching": {}}, {}, "continuous_batching needs max_num_seqs"),
        (
            {"continuous_batching": {"max_num_seqs": 4, "enable_chunked_prefill": True}},
            {},
            "needs optimized_paged_attention",
        ),
        (
            {"on_device_generation": {"top_k": [1, 2, 3, 4], "per_batch_line": False}},
            {},
            "lists only with per_batch_line",
        ),
        ({"on_device_generation": {"top_k": [1]}}, {}, "one value for each of 4"),
        ({"on_device_generation": {"global_top_k": 256, "dynamic": False}}, {}, "global_top_k needs dynamic"),
        ({"quant": {"quantize_method": "direct_cast"}}, {}, "direct_cast fails"),
        ({"quant": {"dequant_dtype": "f16"}}, {}, r"must be the model's type \(bf16\)"),
        ({"is_eagle_target": True, "is_eagle_draft": True}, {}, "exclude each other"),
    ],
)
def test_a_combination_the_library_refuses(given: dict[str, Any], around: dict[str, Any], message: str) -> None:
    [problem] = problems(read(given), replace(LLAMA_8B, **around))

    assert_matches(message, problem)


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def test_fields_without_effect_are_listed_by_path() -> None:
    values = {"fuse_qkv": True, "quant": {"quant_dtype": "s8", "quantize_attn": False}}

    assert without_effect(values, frozenset({"quant.quant_dtype"})) == ["fuse_qkv", "quant.quantize_attn"]
