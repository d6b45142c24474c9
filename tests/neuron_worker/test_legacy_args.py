"""What users of the classic fork type, as keywords and as flags."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from neuronserve.neuron_worker import legacy_args
from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.legacy_args import translate


def parse(*arguments: str) -> argparse.Namespace:
    """With the flags of vLLM that ours meet, in the least form."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--additional-config", type=json.loads, default={})
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"], default="auto")
    parser.add_argument("--shutdown-timeout", type=int, default=0)
    legacy_args.add_flags(parser)
    legacy_args.add_flags(parser)  # vLLM asks more than once
    return parser.parse_args(arguments)


# -- keywords


def test_keywords_that_vllm_knows_pass_through() -> None:
    known = {"model": "m", "max_num_seqs": 8, "max_model_len": 128, "block_size": 128, "tensor_parallel_size": 2}

    assert translate(known, {}) == {**known, "additional_config": {}}


def test_the_guides_keywords() -> None:
    keywords = {"max_num_seqs": 8, "device": "neuron", "override_neuron_config": {"shard_over_sequence": True}}

    assert translate(keywords, {}) == {
        "max_num_seqs": 8,
        "additional_config": {
            "neuronserve": {"device": "neuron"},
            "override_neuron_config": {"shard_over_sequence": True},
        },
    }


def test_modern_and_classic_names_are_merged() -> None:
    keywords = {
        "max_num_seqs": 8,
        "additional_config": {"override_neuron_config": {"fuse_qkv": False}, "neuronserve": {"threads": 1}},
        "override_neuron_config": {"weight_tiling": True},
        "neuronserve": {"chunk_tokens": 64},
    }

    assert translate(keywords, {})["additional_config"] == {
        "override_neuron_config": {"fuse_qkv": False, "weight_tiling": True},
        "neuronserve": {"threads": 1, "chunk_tokens": 64},
    }


def test_the_callers_dictionaries_are_left_alone() -> None:
    extra: dict[str, Any] = {"neuronserve": {"threads": 1}}

    translate({"max_num_seqs": 8, "additional_config": extra, "device": "auto"}, {})

    assert extra == {"neuronserve": {"threads": 1}}


@pytest.mark.parametrize("device", ["cpu", "cuda", "tpu"])
def test_another_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{device}' is not served.*leave --device out or use neuron"):
        translate({"device": device}, {})


@pytest.mark.parametrize("name", ["neuron_quant", "int8", "none"])
def test_our_weight_types_never_reach_vllm(name: str) -> None:
    translated = translate({"quantization": name, "max_num_seqs": 1}, {})

    assert "quantization" not in translated
    assert translated["additional_config"]["neuronserve"] == {"quantization": name}


def test_other_quantizations_are_left_to_vllm() -> None:
    assert translate({"quantization": "awq", "max_num_seqs": 1}, {})["quantization"] == "awq"


def test_types_in_classic_spelling() -> None:
    assert translate({"dtype": "bf16", "max_num_seqs": 1}, {})["dtype"] == "bfloat16"


def test_the_default_number_of_sequences_is_the_devices() -> None:
    translated = translate({"max_num_seqs": None, "neuronserve": {"backend": "arithmetic"}}, {})

    assert translated["max_num_seqs"] == registry.capabilities("arithmetic").default_max_num_seqs


def test_what_was_asked_is_told_apart_from_defaults() -> None:
    keywords = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "enable_prefix_caching": None}

    assert translate(keywords, {})["additional_config"]["neuronserve"] == {"asked": {"max_num_batched_tokens": 64}}


def test_asynchronous_scheduling_is_refused() -> None:
    with pytest.raises(ConfigError, match="--async-scheduling is not built yet"):
        translate({"async_scheduling": True}, {})


@pytest.mark.parametrize("value", [None, False])
def test_scheduling_that_is_not_asynchronous_passes(value: bool | None) -> None:
    assert translate({"async_scheduling": value, "max_num_seqs": 1}, {})["async_scheduling"] is value


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"speculative_model": "ngram"}, "num_speculative_tokens is missing; add --num-speculative-tokens 4"),
        ({"num_speculative_tokens": 4}, "speculative_model is missing; give the draft's directory"),
        ({"spec_model": "ngram", "spec_tokens": 0}, "num_speculative_tokens=0: at least 1 token must be drafted"),
        ({"speculative_model": "ngram", "num_speculative_tokens": -3}, "num_speculative_tokens=-3: at least 1"),
        ({"speculative_model": "./nowhere", "num_speculative_tokens": 4}, "speculative_model='./nowhere': no such"),
        (
            {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 4}},
            "speculative_config with method='ngram_gpu' is not supported: .* --speculative-model ngram",
        ),
        (
            {"speculative_config": {"method": "medusa", "model": "heads", "num_speculative_tokens": 4}},
            "speculative_config with method='medusa', model='heads' is not supported",
        ),
        (
            {"spec_tokens": 3, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
            "--spec-tokens 3 and speculative_config.num_speculative_tokens=4: leave one of them out",
        ),
        (
            {"speculative_model": "one", "speculative_config": {"model": "other", "num_speculative_tokens": 4}},
            "--speculative-model one and speculative_config.model='other': leave one of them out",
        ),
        *(
            (
                {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, key: value}},
                f"speculative_config.{key}={value!r}: a number of tokens, at least 1",
            )
            for key, value in (("prompt_lookup_min", "5"), ("prompt_lookup_max", 0))
        ),
        ({"speculative_config": "[4]"}, r"speculative_config='\[4\]': expected a JSON object"),
        ({"speculative_config": ["ngram"]}, r"speculative_config=\['ngram'\]: expected a dictionary"),
        (
            {
                "speculative_model": "ngram",
                "num_speculative_tokens": 4,
                "speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 2},
            },
            "speculative_config.prompt_lookup_min=5 is more than prompt_lookup_max=2",
        ),
    ],
)
def test_what_is_not_served_of_speculation(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate({**keywords, "use_v2_block_manager": True}, {})


@pytest.mark.parametrize(
    "keywords",
    [
        {"speculative_model": "ngram", "num_speculative_tokens": 4},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4},
        {"speculative_config": {"method": "ngram", "num-speculative-tokens": 4}},
        {"speculative_config": {"model": "[ngram]"}, "num_speculative_tokens": 4},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'},
    ],
)
def test_prompt_lookup_looks_for_one_to_eight_tokens(keywords: dict[str, Any]) -> None:
    translated = translate({**keywords, "use_v2_block_manager": True, "max_num_seqs": 4}, {})

    config = translated["speculative_config"]
    assert "use_v2_block_manager" not in translated
    assert (config["prompt_lookup_min"], config["prompt_lookup_max"]) == (1, 8)
    assert config["num_speculative_tokens"] == 4


def test_prompt_lookup_looks_for_what_was_asked() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5}

    assert translate({"speculative_config": given, "max_num_seqs": 1}, {})["speculative_config"] == given


def test_a_key_of_speculation_that_nothing_reads_is_refused() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 2, "disable_padded_drafter_batch": True}

    with pytest.raises(ConfigError, match=r"speculative_config\.disable_padded_drafter_batch: not supported"):
        translate({"speculative_config": given, "max_num_seqs": 1}, {})


def test_a_model_directory_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"model='\./nowhere': no such directory"):
        translate({"model": "./nowhere"}, {})


# -- flags


def test_the_guides_flags() -> None:
    # As bash leaves {\"shard_over_sequence\":\"True\"}.
    options = parse("--device", "neuron", "--override-neuron-config", '{"shard_over_sequence":"True"}')

    assert options.additional_config == {
        "neuronserve": {"device": "neuron"},
        "override_neuron_config": {"shard_over_sequence": "True"},
    }


def test_flags_meet_additional_config_in_any_order() -> None:
    extra = '{"override_neuron_config": {"fuse_qkv": false}, "mine": 1}'
    before = parse("--additional-config", extra, "--override-neuron-config", '{"weight_tiling": true}')
    after = parse("--override-neuron-config", '{"weight_tiling": true}', "--additional-config", extra)

    assert before.additional_config == after.additional_config
    assert after.additional_config == {
        "override_neuron_config": {"fuse_qkv": False, "weight_tiling": True},
        "mine": 1,
    }


def test_flags_do_not_leak_into_the_next_parse() -> None:
    parse("--device", "neuron")

    assert parse().additional_config == {}


def test_speculative_flags() -> None:
    options = parse(
        "--speculative-model", "draft", "--num-speculative-tokens", "4", "--speculative-max-model-len", "128",
        "--use-v2-block-manager",
    )  # fmt: skip

    assert options.speculative_config == {"model": "draft", "num_speculative_tokens": 4, "max_model_len": 128}


@pytest.mark.parametrize("spelling", ["fp16", "half", "float16"])
def test_dtype_flag(spelling: str) -> None:
    assert translate({"dtype": parse("--dtype", spelling).dtype, "max_num_seqs": 1}, {})["dtype"] == "float16"


def test_a_server_drains() -> None:
    assert parse().shutdown_timeout == 90
    assert parse("--shutdown-timeout", "5").shutdown_timeout == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu"), "device='cpu' is not served"),
        (("--override-neuron-config", "shard_over_sequence:True"), "is not JSON .*put it in single quotes"),
        (("--override-neuron-config", '"fuse_qkv":true'), "the shell split it at a comma"),
        (("--override-neuron-config", "[1]"), "expected a JSON object"),
        (("--neuronserve", "backend"), "neuronserve='backend' is not JSON"),
    ],
)
def test_a_malformed_flag_names_itself(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        parse(*arguments)
