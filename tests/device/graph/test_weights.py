"""Checkpoints as they come: one file or shards, names with and without a prefix, float types, damage."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from neuronserve.neuron_worker.device.base import DeviceOptions
from neuronserve.neuron_worker.device.errors import LoadError
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice
from neuronserve.neuron_worker.device.graph.weights import Checkpoint

from ..driver import Driver, Stream, prefill
from ..models import LONGEST, Reference, make, random_tokens


def load(directory: Path) -> TorchDevice:
    device = TorchDevice()
    device.load(str(directory), DeviceOptions(4, LONGEST, 8, 4, threads=1))
    return device


def check(reference: Reference) -> None:
    driver = Driver(load(reference.directory), block_size=8, num_blocks=20, max_model_len=LONGEST)
    stream = Stream(random_tokens(20, 1))
    logits = driver.step([prefill(stream, 20)])[0].logits
    np.testing.assert_allclose(logits, reference.logits(stream.tokens)[19:], atol=1e-4)


@pytest.fixture
def saved(tmp_path: Path, reference) -> Reference:
    """A copy of a small model that a test may damage."""
    source = reference("llama")
    shutil.copytree(source.directory, tmp_path, dirs_exist_ok=True)
    return Reference(tmp_path, source.model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shards(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check(model)


@pytest.mark.parametrize(("name", "prefix"), [("llama-tied", "model."), ("gpt2", "transformer.")])
def test_names_without_the_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({key.removeprefix(prefix): value for key, value in load_file(path).items()}, path)
    check(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_checkpoints_are_read_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(7, 5).to(dtype)
    save_file({"w": values, "v": values[0].clone()}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        matrix = checkpoint.matrix("w", (7, 5))
        np.testing.assert_array_equal(matrix.read(), values.float().numpy())
        np.testing.assert_array_equal(matrix.read(2, 4), values[2:4].float().numpy())
        np.testing.assert_array_equal(checkpoint.vector("v", 5), values[0].float().numpy())
        assert matrix.dtype == str(dtype).removeprefix("torch.")


def test_transposed_matrices_are_read_by_their_rows(tmp_path: Path) -> None:
    values = torch.randn(7, 5)
    save_file({"w": values}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        matrix = checkpoint.matrix("w", (5, 7), transposed=True)
        np.testing.assert_array_equal(matrix.read(1, 4), values.T[1:4].numpy())
        assert matrix.mapped() is None


def test_a_mapping_outlives_the_file_being_closed(tmp_path: Path) -> None:
    values = torch.randn(7, 5)
    save_file({"w": values}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        mapped = checkpoint.matrix("w", (7, 5)).mapped()
    np.testing.assert_array_equal(mapped, values.numpy())


def test_a_missing_tensor(saved: Reference) -> None:
    path = saved.directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.up_proj\.weight of shape \[48, 32\] is missing") as caught:
        load(saved.directory)
    assert str(path) in str(caught.value)


def test_a_tensor_of_another_shape(saved: Reference) -> None:
    path = saved.directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, path)
    with pytest.raises(LoadError, match=r"model\.norm\.weight.*\[31\].*\[32\]") as caught:
        load(saved.directory)
    assert str(path) in str(caught.value)


def test_a_tensor_of_another_type(saved: Reference) -> None:
    path = saved.directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.float64)
    save_file(tensors, path)
    with pytest.raises(LoadError, match="type F64; supported are F32, F16, BF16"):
        load(saved.directory)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file(saved: Reference, kept: int) -> None:
    path = saved.directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(LoadError, match="truncated or corrupt") as caught:
        load(saved.directory)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"model.embed_tokens.weight": 5}',
        b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [160, 32], "data_offsets": [0, 10]}}',
        b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [-160, -32], "data_offsets": [0, 20480]}}',
        b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [160, 32], "data_offsets": [-20480, 0]}}',
    ],
)
def test_a_corrupt_header(saved: Reference, header: bytes) -> None:
    path = saved.directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(20480))
    with pytest.raises(LoadError, match="corrupt"):
        load(saved.directory)


def test_a_missing_shard(tmp_path: Path) -> None:
    make("llama", tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(LoadError, match=lost.name):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', "[]"])
def test_a_bad_index(saved: Reference, text: str) -> None:
    (saved.directory / "model.safetensors").unlink()
    (saved.directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LoadError, match=r"model\.safetensors\.index\.json"):
        load(saved.directory)


def test_an_index_that_promises_what_its_file_lacks(tmp_path: Path) -> None:
    make("llama", tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    other = next(f for f in listed["weight_map"].values() if f != listed["weight_map"]["model.norm.weight"])
    listed["weight_map"]["model.norm.weight"] = other
    index.write_text(json.dumps(listed))
    with pytest.raises(LoadError, match=r"model\.norm\.weight is not in .*although"):
        load(tmp_path)


def test_pickled_weights_are_refused_with_the_remedy(saved: Reference) -> None:
    (saved.directory / "model.safetensors").rename(saved.directory / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin.*save_pretrained"):
        load(saved.directory)


def test_no_weights_at_all(saved: Reference) -> None:
    (saved.directory / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="download the model's safetensors"):
        load(saved.directory)
