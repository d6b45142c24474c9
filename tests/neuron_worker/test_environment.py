"""The classic variables, and what an old shell may still hold."""

from __future__ import annotations

import pytest

from neuronserve.neuron_worker.environment import Environment, set_defaults
from neuronserve.neuron_worker.errors import ConfigError


def test_an_empty_shell_asks_for_nothing() -> None:
    assert Environment.read({}) == Environment()


def test_buckets_are_sorted_and_blanks_and_repeats_dropped() -> None:
    env = Environment.read({"NEURON_CONTEXT_LENGTH_BUCKETS": " 512,128,,1024, 128 "})

    assert env.context_buckets == (128, 512, 1024)
    assert env.notes == ("NEURON_CONTEXT_LENGTH_BUCKETS: 128, 512, 1024",)


@pytest.mark.parametrize("value", ["", " ", ",,"])
def test_blank_buckets_are_no_buckets(value: str) -> None:
    assert Environment.read({"NEURON_TOKEN_GEN_BUCKETS": value}).token_generation_buckets is None


@pytest.mark.parametrize(("value", "word"), [("128,abc", "abc"), ("0", "0"), ("-5,128", "-5"), ("1.5", "1.5")])
def test_what_is_no_positive_integer_is_named(value: str, word: str) -> None:
    with pytest.raises(ConfigError, match=f"NEURON_TOKEN_GEN_BUCKETS='{value}': '{word}' is not a positive integer"):
        Environment.read({"NEURON_TOKEN_GEN_BUCKETS": value})


@pytest.mark.parametrize(("value", "expected"), [("s8", "s8"), ("S8", "s8"), ("f8e4m3fn", "f8e4m3fn"), ("", None)])
def test_quant_dtype(value: str, expected: str | None) -> None:
    assert Environment.read({"NEURON_QUANT_DTYPE": value}).quant_dtype == expected


def test_a_wrong_quant_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="NEURON_QUANT_DTYPE='int4': expected s8 or f8e4m3fn"):
        Environment.read({"NEURON_QUANT_DTYPE": "int4"})


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_host_sampling(value: str, expected: bool) -> None:
    assert Environment.read({"NEURON_ON_DEVICE_SAMPLING_DISABLED": value}).host_sampling is expected


def test_the_framework_names_a_backend() -> None:
    env = Environment.read({"VLLM_NEURON_FRAMEWORK": "neuronx-distributed-inference"})

    assert env.framework == "torch-neuronx"


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_USE_V1", "0"), ("NEURON_COMPILED_ARTIFACTS", "/somewhere"), ("VLLM_NEURON_FRAMEWORK", "other")],
)
def test_what_means_nothing_any_more_is_answered_by_one_line(name: str, value: str) -> None:
    [note] = Environment.read({name: value}).notes

    assert note.startswith(name)
    assert "ignored" in note


@pytest.mark.parametrize("environ", [{"VLLM_USE_V1": "1"}, {"VLLM_TARGET_DEVICE": "neuron"}])
def test_what_holds_anyway_needs_no_line(environ: dict[str, str]) -> None:
    assert Environment.read(environ).notes == ()


def test_defaults_leave_the_users_values_alone() -> None:
    environ = {"VLLM_NO_USAGE_STATS": "0"}

    set_defaults(environ)

    assert environ["VLLM_NO_USAGE_STATS"] == "0"
    assert environ["DO_NOT_TRACK"] == "1"
    assert environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
