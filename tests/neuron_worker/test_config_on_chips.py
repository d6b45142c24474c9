"""On a chip what does not fit is an error; what the chip's backends make of the options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.errors import ConfigError

from .test_config import LENGTH, resolved, said_of_options
from .tiny_model import tiny_model

CHIP = {"backend": "transformers-neuronx"}


def test_a_chip_refuses_a_core_count_it_has_not(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3: .* 1, 2, 4, 8, 12, 24, 32; choose one of these"):
        resolved(tiny, tensor_parallel_size=3, options=CHIP)


def test_a_device_of_one_core_says_how_to_use_more(tiny: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(tiny, tensor_parallel_size=2, options={"backend": "torch-neuronx"})

    assert str(caught.value) == (
        "--tensor-parallel-size 2: the torch-neuronx device uses one core; serve with --tensor-parallel-size 1 and "
        "start more servers, each with a NEURON_RT_VISIBLE_CORES of its own, or use several cores as one with the "
        "transformers-neuronx device (Inf2, Trn1)"
    )


def test_a_chip_refuses_a_combination_the_library_refuses(tiny: str) -> None:
    with pytest.raises(ConfigError, match="override_neuron_config: shard_over_sequence needs --tensor-parallel-size"):
        resolved(tiny, tensor_parallel_size=12, override={"shard_over_sequence": True}, options=CHIP)


def test_a_chip_takes_the_guides_override_in_silence(tiny: str) -> None:
    done = resolved(tiny, tensor_parallel_size=32, override={"shard_over_sequence": "True"}, options=CHIP)

    assert (list(done.warnings), said_of_options(done)) == ([], [])


def test_cores_that_share_a_sequence_have_one_decode_graph(tiny: str) -> None:
    asked = {"tensor_parallel_size": 32, "override": {"shard_over_sequence": True}}
    buckets = {"NEURON_TOKEN_GEN_BUCKETS": "128,512,2048"}
    done = resolved(tiny, buckets, **asked, options=CHIP)

    assert [shape.context for shape in done.plan.shapes if shape.decode_rows] == [LENGTH]
    assert said_of_options(done)[-1] == (
        "NEURON_TOKEN_GEN_BUCKETS: 128, 512 not used with shard_over_sequence: every decode is at --max-model-len 2048"
    )
    elsewhere = resolved(tiny, buckets, **asked)
    assert {shape.context for shape in elsewhere.plan.shapes if shape.decode_rows} == {128, 512, 2048}


NORMS = {"sequence_parallel_norm": True, "sequence_parallel_norm_threshold": 1024}
UNEVEN = r"multiples of --tensor-parallel-size \(24\), 2048, 4096 are not: set NEURON_CONTEXT_LENGTH_BUCKETS to such"


def test_context_buckets_of_the_plan_are_those_that_are_checked(tiny: str) -> None:
    asked = {"max_model_len": 12288, "tensor_parallel_size": 24, "override": NORMS}

    with pytest.raises(ConfigError, match=UNEVEN):
        resolved(tiny, **asked, options=CHIP)
    assert resolved(tiny, {"NEURON_CONTEXT_LENGTH_BUCKETS": "500,3072,12288"}, **asked, options=CHIP).config.overrides
    assert re.search(UNEVEN, resolved(tiny, **asked).warnings[-1])  # where prompts are split, and buckets are others


def test_a_sampler_of_fewer_candidates(tiny: str) -> None:
    done = resolved(tiny, override={"on_device_generation": {"global_top_k": 64}}, options=CHIP)

    assert (done.config.sampling, said_of_options(done)) == ("device", [])


def test_a_sampler_given_what_requests_have_of_their_own_is_one_line(tiny: str) -> None:
    override = {"on_device_generation": {"top_k": 5, "temperature": 0.5}}

    [said] = [note for note in resolved(tiny, override=override, options=CHIP).notes if "on_device_generation" in note]
    assert "no effect of top_k, temperature: each request has its own; --override-generation-config sets" in said
    [said] = [note for note in resolved(tiny, override=override).notes if "on_device_generation" in note]
    assert said.endswith("arithmetic device: on_device_generation.top_k, on_device_generation.temperature")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"output_all_logits": True},
            r"override_neuron_config\.output_all_logits=True is not served: a prompt answers",
        ),
        ({"cache_layout": "BSH"}, r"override_neuron_config\.cache_layout='BSH' is not served"),
        ({"is_eagle_draft": True}, r"override_neuron_config\.is_eagle_draft=True is not served: the draft decides it"),
        ({"continuous_batching": {"max_num_seqs": 4, "optimized_paged_attention": True}}, r"paged cache is not served"),
        ({"on_device_generation": {"dynamic": False}}, r"dynamic and per_batch_line must be true"),
    ],
)
def test_a_setting_that_the_backend_does_not_drive_is_refused_before_it_loads(
    tiny: str, override: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tiny, override=override, options=CHIP)


def test_the_other_backend_of_a_chip_has_none_of_the_librarys_settings(tiny: str) -> None:
    with pytest.raises(ConfigError, match="override_neuron_config: fuse_qkv are settings of transformers-neuronx"):
        resolved(tiny, override={"fuse_qkv": True}, options={"backend": "torch-neuronx"})


MULTI_NODE = {"NEURON_RANK_ID": "1", "CPU_COMM_ID": "10.0.0.1:8989", "NEURON_PP_STAGES": "1"}


@pytest.mark.parametrize("backend", ["transformers-neuronx", "torch-neuronx"])
def test_a_chip_refuses_several_machines_by_name_before_it_loads(tiny: str, backend: str) -> None:
    with pytest.raises(ConfigError, match=r"^NEURON_RANK_ID=1, CPU_COMM_ID=10\.0\.0\.1:8989: .* not supported; unset"):
        resolved(tiny, MULTI_NODE, options={"backend": backend})


def test_several_machines_are_one_line_off_the_chip(tiny: str) -> None:
    [note] = resolved(tiny, MULTI_NODE, options={"backend": "cpu"}).notes

    assert note.startswith("NEURON_RANK_ID=1, CPU_COMM_ID=10.0.0.1:8989: no effect, the cpu device")
    assert resolved(tiny, {"NEURON_RANK_ID": "0"}, options={"backend": "cpu"}).notes == ()


def test_the_backend_says_which_models_it_serves(tmp_path: Path) -> None:
    mixtral = tiny_model(tmp_path, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4)
    plain = tiny_model(tmp_path / "llama")

    # Three more experts in each of two layers, each of three matrices.
    more = resolved(mixtral, options=CHIP).spec.num_parameters - resolved(plain, options=CHIP).spec.num_parameters
    assert more == 2 * 3 * 3 * 128 * 128
    with pytest.raises(
        ConfigError, match=r"MixtralForCausalLM .* is not supported; supported are LlamaForC.*GPT2LM\w+$"
    ):
        resolved(mixtral, options={"backend": "cpu"})


def test_a_chip_has_few_graphs_and_its_own_weight_types(tiny: str) -> None:
    config = resolved(tiny, {"NEURON_QUANT_DTYPE": "f8e4m3fn"}, options=CHIP).config

    assert len(config.plan.shapes) <= 8
    assert config.quantization == "f8e4m3fn"


@pytest.mark.parametrize(("asked", "sampling"), [({}, "host"), ({"sampling": "device"}, "device")])
def test_sampling_that_would_be_compiled_in_is_the_hosts_by_default(
    tiny: str, asked: dict[str, str], sampling: str
) -> None:
    assert resolved(tiny, options={**CHIP, **asked}).config.sampling == sampling


def test_an_override_that_compiles_sampling_in_decides_it(tiny: str) -> None:
    override = {"on_device_generation": {"do_sample": False}}

    config = resolved(tiny, override=override, options=CHIP).config

    assert (config.sampling, config.is_greedy_compiled_in) == ("device", True)
    assert resolved(tiny, override=override).config.sampling == "device"  # its own choice: not a chip


@pytest.mark.parametrize(
    ("environ", "options", "key"),
    [
        ({}, {"sampling": "host"}, "neuronserve.sampling=host"),
        ({"NEURON_ON_DEVICE_SAMPLING_DISABLED": "1"}, {}, "NEURON_ON_DEVICE_SAMPLING_DISABLED=1"),
    ],
)
def test_sampling_asked_for_in_both_places(
    tiny: str, environ: dict[str, str], options: dict[str, str], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"on_device_generation .* {key} asks for logits: leave one"):
        resolved(tiny, environ, override={"on_device_generation": {}}, options={**CHIP, **options})
