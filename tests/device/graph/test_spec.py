"""config.json in, ModelSpec out: names old and new, defaults, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuronserve.neuron_worker.device.base import DeviceOptions
from neuronserve.neuron_worker.device.errors import LoadError, UnsupportedModel
from neuronserve.neuron_worker.device.graph.spec import (
    ModelSpec,
    RopeSpec,
    kv_bytes_per_token,
    read_spec,
    weight_bytes,
)
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}


def spec_of(directory: Path, values: dict, **changes: object) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps({**values, **changes}))
    return read_spec(directory)


def test_parameters_are_counted_as_their_authors_count(tmp_path: Path) -> None:
    assert spec_of(tmp_path, LLAMA).num_parameters == 134_515_008
    assert spec_of(tmp_path, GPT2).num_parameters == 124_439_808


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-head-dim", "qwen2", "qwen3", "gpt2"])
def test_parameters_equal_the_models(name: str, reference) -> None:
    model = reference(name)
    assert read_spec(model.directory).num_parameters == model.model.num_parameters()


def test_absent_keys_take_the_architectures_defaults(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path, {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "tie_word_embeddings")}
    )
    assert (spec.num_kv_heads, spec.tied_head, spec.head_dim) == (9, False, 64)
    assert (spec.epsilon, spec.rope, spec.checkpoint_dtype) == (1e-6, RopeSpec(10000.0), "float32")


def test_model_type_stands_in_for_architectures(tmp_path: Path) -> None:
    assert spec_of(tmp_path, LLAMA, architectures=None, model_type="llama").architecture == "LlamaForCausalLM"


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("written", "rope"),
    [
        ({"rope_theta": 1e5}, RopeSpec(1e5)),
        ({"rope_theta": 1e5, "rope_scaling": None}, RopeSpec(1e5)),
        ({"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(1e5, "linear", 2.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeSpec(1e6)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeSpec(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeSpec(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_as_transformers_4_and_5_write_it(tmp_path: Path, written: dict, rope: RopeSpec) -> None:
    assert spec_of(tmp_path, LLAMA, **written).rope == rope


@pytest.mark.parametrize(
    ("base", "written", "windows"),
    [
        (LLAMA, {"sliding_window": 4}, (None, None, None)),
        (LLAMA, {"architectures": ["MistralForCausalLM"], "sliding_window": 4}, (4, 4, 4)),
        (LLAMA, {"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        (LLAMA, {"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        (QWEN, {"sliding_window": 4}, (None, None, None)),
        (QWEN, {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, (None, 4, 4)),
        (QWEN, {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 28}, (None, None, None)),
        (
            QWEN,
            {
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (4, None, 4),
        ),
    ],
)
def test_windows_per_layer(tmp_path: Path, base: dict, written: dict, windows: tuple) -> None:
    assert spec_of(tmp_path, base, num_hidden_layers=3, **written).windows == windows


@pytest.mark.parametrize(
    ("written", "mentions"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel"]),
        ({"architectures": None, "model_type": "bert"}, ["supported are LlamaForCausalLM"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["yarn", "default, linear, llama3"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["per layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"hidden_act": "relu"}, ["relu", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "NEURON_QUANT_DTYPE"]),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(tmp_path: Path, written: dict, mentions: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_of(tmp_path, LLAMA, **written)
    assert all(text in str(caught.value) for text in mentions)


@pytest.mark.parametrize(
    ("key", "value", "mentions"),
    [
        ("hidden_size", None, "hidden_size is missing"),
        ("num_hidden_layers", "30", "num_hidden_layers is '30'"),
        ("num_hidden_layers", True, "a whole number"),
        ("vocab_size", 0, "at least 1"),
        ("num_key_value_heads", 4, "a divisor of num_attention_heads (9)"),
        ("hidden_size", 577, "a multiple of num_attention_heads (9)"),
        ("head_dim", 63, "even"),
        ("rms_norm_eps", -1, "a number above 0"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("rope_scaling", "linear", "an object"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor is missing"),
        ("torch_dtype", "float8", "one of float32, float16, bfloat16"),
        ("architectures", "LlamaForCausalLM", "a list of class names"),
    ],
)
def test_a_bad_value_is_named_with_its_file(tmp_path: Path, key: str, value: object, mentions: str) -> None:
    with pytest.raises(LoadError) as caught:
        spec_of(tmp_path, LLAMA, **{key: value})
    assert mentions in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no config\.json"):
        read_spec(tmp_path)
    with pytest.raises(LoadError, match="not a directory"):
        read_spec(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="not readable JSON"):
        read_spec(tmp_path)


def test_bytes_of_weights_and_cache(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        LLAMA,
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=16,
        vocab_size=10,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    matrices = 16 * 8 + 8 * 8 + 32 * 8 + 8 * 16  # qkv, output, gate and up, down
    table = head = 10 * 8
    norms = 3 * 8
    rows = 16 + 8 + 32 + 8
    assert weight_bytes(spec, "float32") == 4 * (matrices + table + head + norms)
    assert weight_bytes(spec, "bfloat16") == 2 * (matrices + table + head) + 4 * norms
    assert weight_bytes(spec, "float32", "int8") == matrices + 4 * rows + 4 * (table + head + norms)
    assert weight_bytes(spec, "float32", "int8", True) == matrices + 4 * rows + head + 4 * 10 + 4 * (table + norms)
    assert kv_bytes_per_token(spec, "float32") == 2 * 4 * 4


def test_loaded_weights_are_as_large_as_planned(reference) -> None:
    for name in ("llama", "llama-tied", "gpt2", "qwen3", "llama-biases"):
        directory = reference(name).directory
        spec = read_spec(directory)
        for quantization, head in ((None, False), ("int8", False), ("int8", True)):
            facts = TorchDevice().load(
                str(directory), DeviceOptions(1, 64, 8, 1, quantization=quantization, quantize_head=head, threads=1)
            )
            rope = 0 if spec.rope is None else 64 * spec.head_dim * 4
            assert facts.weight_bytes - rope == weight_bytes(spec, "float32", quantization, head)
