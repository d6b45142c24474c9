"""Models that the picked backend would refuse at load: refused before anything starts, and the other one named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.machine import Interpreter, Machine
from neuronserve.neuron_worker.resolve import resolve

from .tiny_model import tiny_model

SDK = Interpreter(
    "/opt/sdk/bin/python",
    "3.10.12",
    {"transformers-neuronx": "0.13.1216", "torch-neuronx": "2.7.0.2.9.9357", "neuronx-cc": "2.20.9961"},
)
INF2 = Machine(devices=("/dev/neuron0",), driver="2.21", visible_cores=2, visible_by="1 device of 2 cores", sdk=SDK)
TRN2 = replace(INF2, instance="trn2.48xlarge")
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
OTHER = "--neuronserve.backend torch-neuronx"


def refusal(model_dir: str, machine: Machine = INF2, **asked: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(ServeRequest(model_dir, **{"max_num_seqs": 4, "max_model_len": 256, **asked}), {}, machine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "asked", "why"),
    [
        (QWEN2, {}, "architecture Qwen2ForCausalLM in"),
        ({"attention_bias": True}, {}, "has attention_bias or mlp_bias"),
        ({"head_dim": 8}, {}, "head_dim is 8"),
        ({"hidden_act": "gelu"}, {}, "hidden_act in"),
        ({**MISTRAL, "sliding_window": 4096}, {"max_model_len": 16384}, "serve with --max-model-len 4096; "),
    ],
    ids=["architecture", "biases", "head size", "activation", "window"],
)
def test_the_classic_librarys_refusals_name_the_other_backend(
    tmp_path: Path, model: dict[str, Any], asked: dict[str, Any], why: str
) -> None:
    message = refusal(tiny_model(tmp_path, **model), **asked)

    assert why in message
    assert message.endswith(f"; {OTHER} serves it")
    assert "\n" not in message


def test_what_it_serves_passes(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, **MISTRAL, sliding_window=4096)

    assert resolve(ServeRequest(model, max_model_len=4096), {}, INF2).config.backend == "transformers-neuronx"


def test_the_other_backend_serves_as_it_is_named(tmp_path: Path) -> None:
    request = ServeRequest(tiny_model(tmp_path, **QWEN2), options={"backend": "torch-neuronx"}, max_model_len=256)

    assert resolve(request, {}, INF2).config.backend == "torch-neuronx"


def test_the_cores_it_serves_with_are_named_too(tmp_path: Path) -> None:
    message = refusal(tiny_model(tmp_path, **QWEN2), tensor_parallel_size=2)

    assert message.endswith(f"; {OTHER} --tensor-parallel-size 1 serves it")


@pytest.mark.parametrize(
    ("asked", "machine"),
    [
        ({"override": {"fuse_qkv": True}}, INF2),
        ({"options": {"require_cached": True, "artifacts": "/graphs"}}, INF2),
        ({"max_num_seqs": 4096, "max_model_len": 131072}, INF2),
        ({}, replace(INF2, sdk=replace(SDK, packages={"transformers-neuronx": "0.13.1216"}))),
    ],
    ids=["its settings", "its graphs", "its room", "its SDK"],
)
def test_a_backend_that_would_refuse_it_as_well_is_not_named(
    tmp_path: Path, asked: dict[str, Any], machine: Machine
) -> None:
    asked = {**asked, "options": {"backend": "transformers-neuronx", **asked.get("options", {})}}

    assert OTHER not in refusal(tiny_model(tmp_path, **QWEN2), machine, **asked)


def test_the_classic_library_is_named_where_it_is_the_one_that_serves(tmp_path: Path) -> None:
    mixtral, asked = tiny_model(tmp_path, **MIXTRAL), {"options": {"backend": "torch-neuronx"}}

    assert refusal(mixtral, **asked).endswith("; --neuronserve.backend transformers-neuronx serves it")
    assert "transformers-neuronx" not in refusal(mixtral, TRN2, **asked)


def test_off_the_chip_none_is_named(tmp_path: Path) -> None:
    assert "--neuronserve.backend" not in refusal(tiny_model(tmp_path, **MIXTRAL), Machine())
