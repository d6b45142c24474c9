"""What the library is asked to build, from options and checkpoints; and what is refused before it is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronserve.neuron_worker.device import environment
from neuronserve.neuron_worker.device.base import DeviceOptions
from neuronserve.neuron_worker.device.errors import LoadError, UnsupportedModel
from neuronserve.neuron_worker.device.transformers_neuronx import checkpoint, neuron_config, sdk
from neuronserve.neuron_worker.device.transformers_neuronx.device import NeuronxDevice

from .server import Server

OPTIONS = DeviceOptions(max_num_seqs=3, max_model_len=64, block_size=64, prompts_per_call=3, dtype="bfloat16")


def fields(**options: Any) -> dict[str, Any]:
    return neuron_config.values(replace(OPTIONS, **options), hidden_size=128)


class TestNeuronConfig:
    def test_the_classic_server_s_defaults(self) -> None:
        assert fields() == {
            "attention_layout": "BSH",
            "collectives_layout": "BSH",
            "fuse_qkv": True,
            "continuous_batching": {"max_num_seqs": 3},
        }

    def test_mixtral_has_the_other_layout(self) -> None:
        """Its class refuses the classic server's."""
        found = neuron_config.values(OPTIONS, hidden_size=128, layout="HSB")
        assert (found["attention_layout"], found["collectives_layout"]) == ("HSB", "HSB")

    def test_the_user_s_fields_come_on_top(self) -> None:
        asked = {"fuse_qkv": False, "attention_layout": "HSB", "sequence_parallel_norm": True}
        assert {name: value for name, value in fields(neuron_config=asked).items() if name in asked} == asked

    def test_nested_fields_are_joined_one_by_one(self, library: Any) -> None:
        asked = {"quant": {"quantize_attn": False}, "continuous_batching": {"max_model_len": 64}}
        found = fields(quantization="int8", neuron_config=asked)
        assert found["quant"] == {"quant_dtype": "s8", "dequant_dtype": "bf16", "quantize_attn": False}
        built = neuron_config.build(sdk.load(), found)
        assert (built.quant.quant_dtype, built.quant.dequant_dtype, built.quant.quantize_attn) == ("s8", "bf16", False)
        assert (built.continuous_batching.max_num_seqs, built.continuous_batching.max_model_len) == (3, 64)

    def test_every_nested_field_becomes_the_library_s_object(self, library: Any) -> None:
        asked = {"kv_cache_quant": {"quant_dtype": "f8e4m3fn"}, "on_device_generation": {"do_sample": False}}
        built = neuron_config.build(sdk.load(), fields(neuron_config=asked))
        assert built.kv_cache_quant.quant_dtype == "f8e4m3fn"
        assert built.on_device_generation.top_k == [256, 256, 256]
        assert not built.on_device_generation.do_sample

    def test_two_builds_share_nothing(self, library: Any) -> None:
        values = fields(sampling="device")
        first, second = (neuron_config.build(sdk.load(), values) for _ in range(2))
        first.on_device_generation.top_k[0] = 7
        first.continuous_batching.max_num_seqs = 1
        assert second.on_device_generation.top_k == [256, 256, 256]
        assert values["on_device_generation"]["top_k"] == [256, 256, 256]
        assert second.continuous_batching.max_num_seqs == 3

    def test_tiles_where_the_library_can_make_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(np, "product", np.prod, raising=False)
        assert fields(quantization="int8")["weight_tiling"]
        assert not neuron_config.values(replace(OPTIONS, quantization="int8"), hidden_size=64)["weight_tiling"]
        monkeypatch.delattr(np, "product")
        assert not fields(quantization="int8")["weight_tiling"]

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"cache_layout": "BSH"}, r"cache_layout='BSH' is not served"),
            ({"padding_side": "left"}, r"padding_side='left' is not served"),
            ({"output_all_logits": True}, r"output_all_logits=True is not served"),
            ({"is_eagle_target": True}, r"is_eagle_target=True is not served: the draft decides it"),
            ({"continuous_batching": {"max_num_seqs": 4}}, r"max_num_seqs=4 must be --max-num-seqs \(3\)"),
            ({"continuous_batching": {"batch_size_for_shared_caches": 4}}, r"shared_caches=4 must be --max-num-seqs"),
            ({"continuous_batching": {"optimized_paged_attention": True}}, r"paged cache is not served"),
        ],
    )
    def test_refused_by_name(self, asked: dict[str, Any], message: str) -> None:
        with pytest.raises(LoadError, match=message):
            fields(neuron_config=asked)

    def test_both_names_of_the_batch_are_one(self, library: Any) -> None:
        asked = {"continuous_batching": {"batch_size_for_shared_caches": 3}}
        assert neuron_config.build(sdk.load(), fields(neuron_config=asked)).continuous_batching.max_num_seqs == 3

    def test_what_the_library_refuses_is_a_load_error(self, serve: Callable[..., Server]) -> None:
        with pytest.raises(LoadError, match="the library refused the model: AssertionError"):
            serve(neuron_config={"qkv_tiling": True, "fuse_qkv": False})


class TestModels:
    @pytest.mark.parametrize("family", ["Llama", "Mistral"])
    def test_llama_and_mistral(
        self, serve: Callable[..., Server], model_dir: Callable[..., str], chip: Any, answers: Any, family: str
    ) -> None:
        directory = model_dir(architectures=[f"{family}ForCausalLM"], model_type=family.lower(), sliding_window=None)
        server = serve(directory)
        assert server.generate([5, 6, 7], 4) == answers.greedy([5, 6, 7], 4, 64)
        assert type(chip.chips[0].model).__name__ == f"{family}ForSampling"

    def test_mixtral_is_served_and_called_experimental(
        self, serve: Callable[..., Server], model_dir: Callable[..., str], answers: Any
    ) -> None:
        server = serve(model_dir(architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4))
        assert any("experimental" in note for note in server.facts.notes)
        assert server.generate([5, 6, 7], 4) == answers.greedy([5, 6, 7], 4, 64)

    def test_others_are_refused_by_name(self, model_dir: Callable[..., str]) -> None:
        with pytest.raises(UnsupportedModel, match=r"Qwen2ForCausalLM .*served are LlamaForCausalLM, Mistral"):
            read(model_dir(architectures=["Qwen2ForCausalLM"]))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"head_dim": 16}, r"head_dim is 16 .* \(8\)"),
            ({"attention_bias": True}, r"mlp_bias, which the library leaves out"),
            ({"hidden_act": "gelu"}, r"hidden_act .* is not silu"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, r"rope scaling 'linear'"),
            ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, r"serve with --max-model-len 32"),
        ],
    )
    def test_what_the_library_would_read_wrongly(
        self, model_dir: Callable[..., str], changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=message):
            read(model_dir(**changes))

    def test_a_window_as_long_as_the_cache_is_none(self, model_dir: Callable[..., str]) -> None:
        read(model_dir(architectures=["MistralForCausalLM"], sliding_window=64))

    def test_rotary_parameters_of_newer_configurations(self, model_dir: Callable[..., str]) -> None:
        """The library reads a flat rope_theta and takes 10000 where there is none."""
        section = {"rope_type": "default", "rope_theta": 500000.0}
        found = read(model_dir(rope_theta="absent", rope_parameters=section))
        with found.as_the_library_reads_it() as directory:
            config = json.loads((Path(directory) / "config.json").read_text())
            assert (Path(directory) / "model.safetensors").exists()
        assert (config["rope_theta"], config["rope_scaling"]) == (500000.0, None)
        assert not Path(directory).exists()

    def test_llama3_scaling_of_newer_configurations(self, model_dir: Callable[..., str]) -> None:
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        }
        found = read(model_dir(rope_theta="absent", rope_parameters={**scaling, "rope_theta": 5e5}))
        assert found.changes == {"rope_theta": 5e5, "rope_scaling": scaling}

    def test_an_older_configuration_is_loaded_from_where_it_is(self, model_dir: Callable[..., str]) -> None:
        directory = model_dir()
        with read(directory).as_the_library_reads_it() as found:
            assert found == directory


def read(directory: str) -> checkpoint.Checkpoint:
    return checkpoint.read(directory, "bfloat16", None, 64)


class TestEnvironment:
    def test_a_server_claims_the_cores_it_uses(self) -> None:
        """Else the first of two servers would claim all of an instance."""
        environ: dict[str, str] = {}
        environment.prepare(environ, 2)
        assert environ == {"NEURON_RT_NUM_CORES": "2"}

    @pytest.mark.parametrize("given", [{"NEURON_RT_VISIBLE_CORES": "4-5"}, {"NEURON_RT_NUM_CORES": "8"}])
    def test_cores_that_were_given_are_left_as_they_are(self, given: dict[str, str]) -> None:
        environ = dict(given)
        environment.prepare(environ, 2)
        assert environ == given

    @pytest.mark.parametrize(("text", "cores"), [("0-3", (0, 1, 2, 3)), ("5", (5,)), ("0,2, 4-5", (0, 2, 4, 5))])
    def test_cores_by_their_text(self, text: str, cores: tuple[int, ...]) -> None:
        assert environment.cores(text) == cores

    @pytest.mark.parametrize(
        ("environ", "message"),
        [
            (
                {"NEURON_RT_VISIBLE_CORES": "0-1"},
                r"VISIBLE_CORES=0-1 leaves 2 cores, --tensor-parallel-size is 4",
            ),
            ({"NEURON_RT_NUM_CORES": "2"}, r"NEURON_RT_NUM_CORES=2 leaves 2 cores"),
            ({"NEURON_RT_VISIBLE_CORES": "all"}, r"NEURON_RT_VISIBLE_CORES='all': 'all' is no core"),
            (
                {"NEURON_RANK_ID": "1", "NEURON_LOCAL_TP": "32"},
                r"NEURON_RANK_ID=1, NEURON_LOCAL_TP=32: .*several",
            ),
            ({"NEURON_PP_STAGES": "2"}, r"NEURON_PP_STAGES=2"),
            ({"CPU_COMM_ID": "10.0.0.1:8989"}, r"CPU_COMM_ID="),
            ({"NEURON_RT_ROOT_COMM_ID": "10.0.0.1:8990"}, r"NEURON_RT_ROOT_COMM_ID="),
            ({"ENABLE_NEURON_MULTI_NODE": "true"}, r"ENABLE_NEURON_MULTI_NODE=true"),
        ],
    )
    def test_refused_by_name(self, environ: dict[str, str], message: str) -> None:
        with pytest.raises(LoadError, match=message):
            environment.prepare(environ, 4)

    def test_values_that_mean_one_machine(self) -> None:
        environ = {"NEURON_RANK_ID": "0", "NEURON_PP_STAGES": "1", "ENABLE_NEURON_MULTI_NODE": "False"}
        environment.prepare(environ, 4)

    def test_it_is_ready_before_the_library_is_imported(
        self, serve: Callable[..., Server], model_dir: Callable[..., str]
    ) -> None:
        environ: dict[str, str] = {}
        serve(model_dir(), environ=environ)
        assert environ == {"NEURON_RT_NUM_CORES": "2"}


class TestSdk:
    def load(self, directory: str) -> None:
        NeuronxDevice(environ={}).load(directory, replace(OPTIONS, tensor_parallel_size=2))

    def test_without_the_library(self, model_dir: Callable[..., str]) -> None:
        with pytest.raises(LoadError, match=r"transformers_neuronx cannot be imported .*SDK 2\.25 .*device_python"):
            self.load(model_dir())

    @pytest.mark.parametrize("version", ["0.12.313", "0.1"])
    def test_an_old_library(self, library: Any, model_dir: Callable[..., str], version: str) -> None:
        library.__version__ = version
        with pytest.raises(LoadError, match=f"transformers_neuronx {version} is older than 0.13"):
            self.load(model_dir())

    def test_a_placeholder_package(self, library: Any, model_dir: Callable[..., str]) -> None:
        del library.__version__
        with pytest.raises(LoadError, match="has no version"):
            self.load(model_dir())
