"""Compiled graphs over starts of a real engine, on the classic library's stand-in: the second one compiles nothing."""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib import import_module, reload
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker import kept_graphs, legacy_args
from neuronserve.neuron_worker import resolve as resolving
from neuronserve.neuron_worker.artifact_key import artifact_key
from neuronserve.neuron_worker.config import NeuronConfig, ServeRequest
from neuronserve.neuron_worker.device import wire
from neuronserve.neuron_worker.device.transformers_neuronx import neuron_config
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.machine import Interpreter, Machine
from neuronserve.server.cache.places import Places
from tests.tools import s3

from .engine import Engine, greedy
from .tiny_model import VOCAB_SIZE, tiny_model

FAKES = str(Path(__file__).resolve().parents[1] / "fakes")
NAME = "transformers_neuronx"
SDK = Interpreter("/sdk/python", "3.10.12", {"neuronx-cc": "2.20", "transformers-neuronx": "0.13.1216"})


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "CUSTOM_CACHE_REPO", "NEURON_COMPILE_CACHE_URL"):
        monkeypatch.setenv(name, "")  # what the engine sets is undone with it
    yield import_module(f"{NAME}.chip")
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


@pytest.fixture
def start(chip: Any, tmp_path: Path) -> Callable[..., list[str]]:
    """`start(**options)`: what the library was asked to do until an engine was ready and had answered."""
    model = tiny_model(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def bring_up(**options: Any) -> list[str]:
        chip.calls.clear()
        engine = Engine(model, options={"backend": NAME.replace("_", "-"), **options}, max_num_seqs=2)
        answers = import_module(f"{NAME}.answers")
        assert engine.tokens_of([5, 6, 7], greedy(3)) == answers.greedy([5, 6, 7], 3, VOCAB_SIZE)
        return [verb for _, verb in chip.calls if verb in ("load", "save", "to_neuron")]

    return bring_up


COMPILED, LOADED = ["to_neuron", "save"], ["load", "to_neuron"]


def test_under_data_the_second_start_compiles_nothing(
    start: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(tmp_path / "data"))
    assert start() == COMPILED
    assert start(require_cached=True) == LOADED
    assert list((tmp_path / "data" / "neuronserve" / "work").iterdir()) == []  # nothing is left lying about


def test_another_machine_finds_them_at_the_url(start: Callable[..., list[str]], tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    assert start(artifacts=str(tmp_path / "one"), cache_url=url) == COMPILED
    assert start(artifacts=str(tmp_path / "two"), cache_url=url) == LOADED
    assert start(artifacts=str(tmp_path / "two")) == LOADED  # without the network


@pytest.mark.parametrize(
    ("variable", "value", "said_by"),
    [
        ("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache", "NEURON_COMPILE_CACHE_URL"),
        ("NEURON_CC_FLAGS", "--cache_dir=s3://bucket/cache", "NEURON_CC_FLAGS: --cache_dir"),
    ],
)
def test_a_url_of_the_classic_tools_that_nothing_here_reads_costs_one_line(
    start: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    said_by: str,
) -> None:
    s3.without_s3fs(monkeypatch)
    lines: list[str] = []
    monkeypatch.setattr(kept_graphs.logger, "info", lambda text, *values: lines.append(text % values))
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "data"))
    for work in (COMPILED, LOADED):
        lines.clear()
        assert start() == work
        [line] = [line for line in lines if "s3://" in line]
        assert line.startswith(f"{said_by}='s3://bucket/cache/neuronserve': a package that reads such URLs is missing")
        assert line.endswith(f"compiled graphs are kept in {tmp_path}/data/neuronserve alone")


def test_a_start_and_a_bucket(start: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3.served(monkeypatch) as bucket:
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", f"s3://{bucket.name}")
        assert start(artifacts=str(tmp_path / "one")) == COMPILED
        assert start(artifacts=str(tmp_path / "two"), require_cached=True) == LOADED
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nobody answers there
        assert start(artifacts=str(tmp_path / "two")) == LOADED


def test_damage_is_set_aside_and_compiled_anew(start: Callable[..., list[str]], tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    assert start(artifacts=kept) == COMPILED
    for blob in (tmp_path / "kept").rglob("blobs/*/*"):
        blob.write_bytes(b"rot")
    assert start(artifacts=kept) == COMPILED
    assert start(artifacts=kept) == LOADED


def test_what_this_package_would_build_otherwise_is_compiled_anew(
    start: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same key: the device's own name for what it builds differs."""
    kept = str(tmp_path / "kept")
    assert start(artifacts=kept) == COMPILED
    before = neuron_config.values
    monkeypatch.setattr(neuron_config, "values", lambda *given: {**before(*given), "fuse_qkv": False})
    assert start(artifacts=kept) == COMPILED
    assert start(artifacts=kept) == LOADED


def test_a_start_that_may_not_compile_fails_with_what_differs(
    start: Callable[..., list[str]], chip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = str(tmp_path / "kept")
    start(artifacts=kept)
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    with pytest.raises(ConfigError) as error:
        start(artifacts=kept, require_cached=True)
    assert "require_cached: no compiled graphs for this configuration" in str(error.value)
    assert 'differs: compiler_flags is ["-O1"] here and [] there' in str(error.value)
    assert chip.calls == []


def test_a_directory_that_cannot_be_written_costs_nothing_else(start: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert start(artifacts=str(tmp_path / "file")) == ["to_neuron"]


def resolved(model_dir: str, environ: dict[str, str] | None = None, **options: object) -> resolving.Resolution:
    machine = Machine(devices=("/dev/neuron0",), sdk=SDK)
    request = ServeRequest(model_dir, max_model_len=128, max_num_seqs=2, tensor_parallel_size=2, options=options)
    return resolving.resolve(request, {"HF_HOME": "/no/home", **(environ or {})}, machine)


ON_CHIP = {"backend": "transformers-neuronx"}


def key_of(config: NeuronConfig, model_dir: str, environ: dict[str, str] | None = None, sdk: Interpreter = SDK) -> str:
    return artifact_key(config, model_dir, sdk, environ or {}).name


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_seqs": 4},
        {"max_model_len": 256},
        {"block_size": 64},
        {"tensor_parallel_size": 8},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantize_head": True},
        {"sampling": "device"},
        {"context_buckets": (32, 128)},
        {"token_generation_buckets": (64, 128)},
        {"overrides": {"fuse_qkv": False}},
        {"backend": "torch-neuronx"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_that_decide_a_graph_are_in_the_key(tiny: str, change: dict[str, Any]) -> None:
    config = resolved(tiny, **ON_CHIP).config
    assert key_of(replace(config, **change), tiny) != key_of(config, tiny)


def test_settings_that_decide_none_are_not(tiny: str) -> None:
    config = resolved(tiny, **ON_CHIP).config
    other = replace(
        config,
        artifacts="/elsewhere",
        cache_url="s3://b",
        require_cached=True,
        device_python="/other/python",
        device_timeout=5,
        device_prepare_timeout=5,
        device_restarts=1,
    )
    assert key_of(other, tiny) == key_of(config, tiny)
    assert key_of(config, tiny, {"NEURON_CC_FLAGS": "--cache_dir=/x --no_cache"}) == key_of(config, tiny)


def test_another_protocol_to_the_devices_process_finds_the_same_graphs(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolved(tiny, **ON_CHIP).config
    before = key_of(config, tiny)
    monkeypatch.setattr(wire, "PROTOCOL", wire.PROTOCOL + 1)
    module = reload(import_module("neuronserve.neuron_worker.artifact_key"))
    assert module.artifact_key(config, tiny, SDK, {}).name == before


def test_an_interpreter_that_cannot_be_asked_has_no_key(tiny: str) -> None:
    broken = Interpreter("/opt/sdk/bin/python", problem="ended with status 3: no such thing")
    with pytest.raises(ConfigError, match=r"device_python=./opt/sdk\S+ ended with status 3: no such thing; name"):
        artifact_key(resolved(tiny, **ON_CHIP).config, tiny, broken, {})


def test_the_sdk_the_flags_and_the_model_are_in_the_key(tiny: str, tmp_path: Path) -> None:
    config = resolved(tiny, **ON_CHIP).config
    names = {
        key_of(config, tiny),
        key_of(config, tiny, {"NEURON_CC_FLAGS": "-O1"}),
        key_of(config, tiny, sdk=replace(SDK, packages={**SDK.packages, "neuronx-cc": "2.19"})),
        key_of(config, tiny, sdk=replace(SDK, packages={**SDK.packages, "transformers-neuronx": "0.13.985"})),
        key_of(config, tiny_model(tmp_path / "other", rope_theta=5e5)),
    }
    assert len(names) == 5
    assert key_of(config, tiny_model(tmp_path / "same", _name_or_path="a fine-tune")) in names


def test_a_new_setting_is_put_in_the_key_or_left_out_on_purpose() -> None:
    """A field that is in neither list was added without a thought for the cache."""
    in_the_key = {
        "backend", "max_num_seqs", "max_model_len", "block_size", "tensor_parallel_size", "dtype", "quantization",
        "quantize_head", "sampling", "context_buckets", "token_generation_buckets", "chunk_tokens", "overrides",
    }  # fmt: skip
    left_out = {
        "vocab_size", "chunked_prefill", "prefix_caching", "threads", "artifacts", "cache_url", "require_cached",
        "device_python", "device_timeout", "device_prepare_timeout", "device_restarts", "step_tokens",
    }  # fmt: skip
    left_out |= {"activations"}  # no device that keeps graphs has a choice
    left_out |= {"speculation"}  # verifying its drafts is a width of the plan's shapes; no graph holds a draft model
    assert {field.name for field in fields(NeuronConfig)} == in_the_key | left_out


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ({"require_cached": True}, {"HF_HOME": ""}, "require_cached: there is no cache to look in; name one with"),
        ({"require_cached": True}, {"NEURON_CC_FLAGS": "--no-cache"}, "require_cached: NEURON_CC_FLAGS=--no-cache"),
        ({"cache_url": "s3://b/c"}, {}, r"cache_url='s3://b/c': .*pip install 'neuronserve\[s3\]'"),
        ({"cache_url": "what://b"}, {}, "cache_url='what://b': Protocol not known"),
        ({}, {"CUSTOM_CACHE_REPO": "name"}, "CUSTOM_CACHE_REPO='name'"),
        ({}, {"NEURON_CC_FLAGS": "'"}, "NEURON_CC_FLAGS"),
    ],
)
def test_what_a_start_could_only_fail_on_is_refused_before_it(
    tiny: str, options: dict[str, object], environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    s3.without_s3fs(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        resolved(tiny, environ, **ON_CHIP, **options)


def test_a_device_that_gives_no_graphs_away_is_not_asked_to_have_them(tiny: str) -> None:
    asked = ServeRequest(tiny, max_model_len=128, options={"backend": "torch-neuronx", "require_cached": True})
    with pytest.raises(ConfigError, match="require_cached: the torch-neuronx device's graphs are compiled by its SDK"):
        resolving.resolve(asked, {}, Machine(devices=("/dev/neuron0",), sdk=SDK))


def test_the_flag_of_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--additional-config", type=json.loads)
    legacy_args.add_flags(parser)
    given = parser.parse_args(["--require-cached", "--neuronserve", '{"artifacts": "/kept"}'])
    assert given.additional_config["neuronserve"] == {"require_cached": True, "artifacts": "/kept"}


def test_a_device_that_compiles_nothing_says_that_nothing_has_an_effect(tiny: str) -> None:
    found = resolved(tiny, backend="cpu", artifacts="/a", cache_url="what://b", require_cached=True)
    assert sum("has no effect" in note for note in found.notes) == 3


def test_nothing_is_kept_without_a_place() -> None:
    from neuronserve.neuron_worker.kept_graphs import KeptGraphs

    def never() -> Any:
        raise AssertionError("the device's interpreter was asked for nothing")

    graphs = KeptGraphs(Places(None), never, {})
    assert graphs.open() is None
    graphs.close()
