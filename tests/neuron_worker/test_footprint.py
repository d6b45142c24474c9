"""Bytes on each core, by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neuronserve.bucketing.memory import MemoryUse, kv_bytes_per_token, memory
from neuronserve.neuron_worker import tiny_checkpoint
from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import StepShape
from neuronserve.neuron_worker.device.graph.spec import ModelSpec, read_spec, weight_bytes
from neuronserve.neuron_worker.footprint import padded, scratch_of_a_core, weights_of_all_cores
from neuronserve.neuron_worker.resolve import resolve

from .tiny_model import tiny_model

GIB = 2**30
FAKES = str(Path(__file__).resolve().parents[1] / "fakes")
COMPUTING = [name for name in registry.names() if not name.startswith("arithmetic")]
"""Backends that keep keys and values."""


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    """SmolLM2's heads; one layer."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 18,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 1,
        "intermediate_size": 30,
        "vocab_size": 101,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_spec(tmp_path)


@pytest.mark.parametrize(
    ("cores", "heads", "kv_heads", "intermediate", "vocabulary"),
    [
        (1, 9, 3, 30, 101),
        (2, 10, 6, 30, 102),  # 3 on each core
        (4, 12, 12, 32, 104),
        (32, 32, 32, 32, 128),  # one of each on every core
    ],
)
def test_what_does_not_divide_is_padded_or_replicated(
    spec: ModelSpec, cores: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int
) -> None:
    spread = padded(spec, cores)

    assert (spread.num_heads, spread.num_kv_heads) == (heads, kv_heads)
    assert (spread.intermediate_size, spread.vocab_size) == (intermediate, vocabulary)


def test_weights_of_one_core_are_the_models(spec: ModelSpec) -> None:
    assert weights_of_all_cores(spec, 1, "float32") == weight_bytes(spec, "float32")


def test_weights_of_two_cores(spec: ModelSpec) -> None:
    # Heads of 2 numbers: 10 for queries, 6 each for keys and values; three matrices of the MLP; table and head.
    matrices = 18 * (10 + 6 + 6) * 2 + 18 * 10 * 2 + 3 * 18 * 30 + 2 * 18 * 102
    norms = 3 * 18  # on both

    assert weights_of_all_cores(spec, 2, "float32") == 4 * (matrices + 2 * norms)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        # tokens x what is handed on, + half of (tokens x (qkv 44 + gate and up 60) + scores x 10 heads + rows x 102)
        (StepShape(4, 1, 0, 128), 4 * 36 + (4 * 104 + 4 * 128 * 10 + 4 * 102) // 2),
        (StepShape(0, 1, 64, 256), 64 * 36 + (64 * 104 + 64 * 256 * 10 + 3 * 102) // 2),
        (StepShape(4, 1, 64, 256), 68 * 36 + (68 * 104 + 64 * 256 * 10 + 7 * 102) // 2),
        (StepShape(0, 1, 8192, 8192), 8192 * 36 + (8192 * 104 + 4096 * 4096 * 10 + 3 * 102) // 2),  # in tiles
    ],
)
def test_scratch_of_one_of_two_cores(spec: ModelSpec, shape: StepShape, numbers: int) -> None:
    assert scratch_of_a_core(shape, spec, 2, prompt_rows=3, scores_prompts=True) == 4 * numbers


def test_a_device_that_attends_row_by_row_keeps_no_scores_of_a_prompt(spec: ModelSpec) -> None:
    shape = StepShape(0, 1, 64, 256)

    assert scratch_of_a_core(shape, spec, 1, prompt_rows=1, scores_prompts=False) == 4 * (64 * (36 + 30 + 60) + 101)


@pytest.fixture
def sdks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins for both SDKs, one core given."""
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("transformers_neuronx", "torch_neuronx")]:
        del sys.modules[name]


def cached(directory: Path, backend: str, dtype: str, override: dict[str, Any] | None = None) -> tuple[int, int]:
    """Bytes of a token: as the plan counts them, and as the device does."""
    model = tiny_checkpoint.write(directory)
    done = resolve(ServeRequest(model, 64, 2, dtype=dtype, options={"backend": backend}, override=override or {}), {})
    device = registry.create(backend)
    try:
        facts = device.load(model, done.config.device_options())
    finally:
        device.close()
    return kv_bytes_per_token(done.memory_facts), facts.bytes_per_kv_token


@pytest.mark.usefixtures("sdks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", COMPUTING)
def test_the_plan_counts_what_the_device_caches_of_a_token(backend: str, dtype: str, tmp_path: Path) -> None:
    plans, devices = cached(tmp_path, backend, dtype)

    assert plans == devices


@pytest.mark.usefixtures("sdks")
@pytest.mark.parametrize(("quant", "share"), [({}, 4), ({"quant_dtype": "f8e4m3fn"}, 4), ({"quant_dtype": "bf16"}, 2)])
def test_a_cache_stored_narrower(quant: dict[str, Any], share: int, tmp_path: Path) -> None:
    override = {"kv_cache_quant": quant}
    whole, _ = cached(tmp_path, "transformers-neuronx", "float32")

    assert cached(tmp_path, "transformers-neuronx", "float32", override) == (whole // share, whole // share)
    assert cached(tmp_path, "cpu", "float32", override) == (whole, whole)  # which has no effect there


def of_8b(directory: Path, cores: int, batch: int, length: int, **override: Any) -> MemoryUse:
    model = tiny_model(directory, num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, vocab_size=128256)
    request = ServeRequest(
        model,
        length,
        batch,
        tensor_parallel_size=cores,
        dtype="bfloat16",
        options={"backend": "transformers-neuronx"},
        override=override,
    )
    buckets = {"NEURON_CONTEXT_LENGTH_BUCKETS": "1536"}  # which cores of any number divide
    return memory(resolve(request, buckets).memory_facts, batch, length)


def test_eight_long_sequences_of_an_8b_model(tmp_path: Path) -> None:
    # keys and values x 32 layers x 1 head x 128 numbers, 2 bytes each or 1
    assert of_8b(tmp_path, 8, 8, 2**17).kv == 16 * GIB
    assert of_8b(tmp_path, 8, 8, 2**17, kv_cache_quant={"quant_dtype": "s8"}).kv == 8 * GIB


@pytest.mark.parametrize(
    ("override", "positions"),
    [
        ({}, 65536),
        ({"shard_over_sequence": True}, (65536 + 128) // 3),
        ({"shard_over_sequence": True, "group_query_attention": "replicated-heads"}, (65536 + 128) // 3),
        ({"shard_over_sequence": True, "group_query_attention": "all-gather-heads"}, 65536 + 128),  # no head twice
    ],
)
def test_twelve_sequences_over_24_cores(override: dict[str, Any], positions: int, tmp_path: Path) -> None:
    assert of_8b(tmp_path, 24, 12, 65536, **override).kv == 12 * positions * 16384
