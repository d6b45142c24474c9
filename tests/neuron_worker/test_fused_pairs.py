"""What a device that drafts inside its own step is given to serve, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.config import NeuronConfig, ServeRequest
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.resolve import Resolution, resolve
from neuronserve.speculative.settings import Speculation

from .tiny_model import tiny_model

CHIP = {"backend": "transformers-neuronx"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
HEAD = {"is_eagle": True, "num_hidden_layers": 1}


def resolved(
    folder: Path,
    model: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    **asked: Any,
) -> Resolution:
    options = {**CHIP, **asked.pop("options", {})}
    method = asked.pop("method", "draft_model")
    target, beside = tiny_model(folder / "model", **(model or {})), tiny_model(folder / "draft", **(draft or {}))
    limit = asked.pop("limit", None)
    request = {"max_model_len": 256, "max_num_seqs": 4, **asked}
    speculation = Speculation(method, 3, model=beside, max_length=limit)
    return resolve(
        ServeRequest(target, options=options, speculation=speculation, draft_dir=beside, **request), environ or {}
    )


def served(*given: Any, **asked: Any) -> NeuronConfig:
    return resolved(*given, **asked).config


@pytest.mark.parametrize(("method", "draft"), [("draft_model", {}), ("eagle", HEAD)], ids=["draft_model", "eagle"])
def test_sampling_is_the_device_s_and_every_decode_is_wide(tmp_path: Path, method: str, draft: dict[str, Any]) -> None:
    config = served(tmp_path, draft=draft, method=method)
    assert config.sampling == "device"
    assert config.device_options().num_drafts == 3
    assert {shape.decode_width for shape in config.plan.shapes if shape.decode_rows} == {4}
    assert {shape.kind for shape in config.plan.shapes} == {"prefill", "verify"}
    assert config.max_num_batched_tokens >= 4 * 4
    assert NeuronConfig.from_json(config.to_json()).is_fused


def test_prompt_lookup_is_refused(tmp_path: Path) -> None:
    request = ServeRequest(tiny_model(tmp_path), options=CHIP, speculation=Speculation("ngram", 4))
    with pytest.raises(ConfigError, match="verifies drafts of a model inside it and no others; give a draft model"):
        resolve(request, {})


@pytest.mark.parametrize(
    ("options", "environ", "key"),
    [
        ({"sampling": "host"}, {}, "neuronserve.sampling=host"),
        ({}, {"NEURON_ON_DEVICE_SAMPLING_DISABLED": "1"}, "NEURON_ON_DEVICE_SAMPLING_DISABLED=1"),
    ],
    ids=["option", "variable"],
)
def test_sampling_on_the_host_is_refused(
    tmp_path: Path, options: dict[str, Any], environ: dict[str, str], key: str
) -> None:
    message = rf"speculative_model='.*draft', verified inside a step, compiles sampling .* {key} asks for logits: leave"
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, environ=environ, options=options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": MISTRAL}, r"the model is MistralForCausalLM: the library speculates with LlamaForCausalLM only"),
        ({"draft": MISTRAL}, r"the draft is MistralForCausalLM: the library speculates with LlamaForCausalLM only"),
        ({"draft": {"architectures": ["Qwen2ForCausalLM"]}}, r"architecture Qwen2ForCausalLM in .* is not served"),
        ({"draft": {"vocab_size": 32}}, r"has a vocabulary of 32, the model one of 64"),
        (
            {"draft": {**HEAD, "num_attention_heads": 16}, "method": "eagle"},
            r"a head for hidden states of 64 numbers, those of the model have 128",
        ),
        ({"draft": HEAD, "method": "eagle3"}, r"is an EAGLE-3 head: the transformers-neuronx device reads EAGLE's"),
        ({"options": {"quantization": "int8"}}, r"quantization=int8 is not served with a draft"),
        (
            {"override": {"on_device_embedding": "False"}},
            r"override_neuron_config\.on_device_embedding=False is not served with a draft: .*; leave it out",
        ),
        (
            {"override": {"shard_over_sequence": True}, "tensor_parallel_size": 32},
            r"override_neuron_config\.shard_over_sequence=True is not served with a draft: .*; leave it out, or serve",
        ),
        (
            {"options": {"require_cached": True, "artifacts": "/graphs"}},
            r"require_cached: graphs that hold draft and model together",
        ),
        (
            {"draft": {"max_position_embeddings": 128}, "limit": 128},
            r"has positions for 128 tokens, the model is served with 256: use --max-model-len 128 or less$",
        ),
    ],
    ids=[
        "model",
        "draft",
        "neither",
        "vocabulary",
        "width",
        "eagle3",
        "int8",
        "embedding",
        "sharding",
        "require_cached",
        "positions",
    ],
)
def test_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, **given)


def write_names(folder: Path, *names: str) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        (["fc.weight", "layers.0.mlp.up_proj.weight"], r"no model\.fc\.weight and no lm_head\.weight: the library"),
        (["model.fc.weight"], r"no lm_head\.weight: the library"),
    ],
    ids=["published", "without lm_head"],
)
def test_a_head_that_the_library_would_not_read(tmp_path: Path, names: list[str], lacking: str) -> None:
    write_names(tmp_path / "draft", *names)
    with pytest.raises(ConfigError, match=lacking):
        resolved(tmp_path, draft=HEAD, method="eagle")
    write_names(tmp_path / "draft", "model.fc.weight", "lm_head.weight")
    assert served(tmp_path, draft=HEAD, method="eagle").is_fused


@pytest.mark.parametrize(
    ("limit", "notes"),
    [(256, []), (100, ["every step of this device drafts"]), (300, ["no sequence is longer than 256 tokens"])],
)
def test_a_length_of_the_draft_s_own_has_no_effect(tmp_path: Path, limit: int, notes: list[str]) -> None:
    """The classic guide gives the model's length."""
    said = [note for note in resolved(tmp_path, limit=limit).notes if "speculative-max-model-len" in note]
    assert said == [f"--speculative-max-model-len {limit} has no effect: {note}" for note in notes]


def test_both_models_are_in_the_plan_s_memory(tmp_path: Path) -> None:
    facts = resolved(tmp_path).memory_facts
    assert facts.draft_weight_bytes == facts.weight_bytes


def test_every_step_drafts_whatever_is_asked_of_the_depth(tmp_path: Path) -> None:
    notes = resolved(tmp_path, options={"adaptive_depth": False}).notes
    assert "adaptive_depth has no effect: the transformers-neuronx device drafts in every step" in notes
