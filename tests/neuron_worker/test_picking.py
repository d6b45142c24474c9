"""Which device serves on which machine, and what a chip has no room for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.machine import Interpreter, Machine, look
from neuronserve.neuron_worker.picking import Asked, Pick, check_room, pick
from neuronserve.neuron_worker.resolve import resolve

from .fake_machine import make_machine
from .tiny_model import tiny_model

SDK = Interpreter(
    "/opt/sdk/bin/python",
    "3.10.12",
    {"transformers-neuronx": "0.13.1216", "torch-neuronx": "2.7.0.2.9.9357", "neuronx-cc": "2.20.9961"},
)
EMPTY = Interpreter("/usr/bin/python", "3.12.1", {"torch": "2.13.0"})
INF2 = Machine(devices=("/dev/neuron0",), driver="2.21", visible_cores=2, visible_by="1 device of 2 cores", sdk=SDK)


def test_a_chip_with_its_sdk_is_used() -> None:
    choice = pick(Asked(), INF2)

    assert choice.backend == "transformers-neuronx"
    assert choice.why == "/dev/neuron0 and the SDK of /opt/sdk/bin/python"


@pytest.mark.parametrize("asked", [Asked(), Asked(framework="transformers-neuronx"), Asked(device_flag=True)])
@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (
            replace(INF2, sdk=EMPTY),
            "python has no transformers-neuronx and no torch-neuronx and no neuronx-cc",
        ),
        (replace(INF2, sdk=replace(EMPTY, problem="cannot be started")), "/usr/bin/python cannot be started"),
        (replace(INF2, sdk=replace(SDK, version="3.8.10")), "Python 3.8.10, the device needs 3.10"),
        (replace(INF2, driver=None, driver_missing=True), "the Neuron driver is not loaded: install aws-neuronx-dkms"),
        (replace(INF2, closed_devices=("/dev/neuron0",)), "/dev/neuron0: this user may not open it"),
        (replace(INF2, instance="inf1.xlarge"), "drives inf2 and trn1 and trn1n, this is inf1.xlarge"),
    ],
)
def test_a_chip_that_cannot_be_used_is_an_error_and_never_the_processor(
    asked: Asked, machine: Machine, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        pick(asked, machine)

    assert reason in str(caught.value)
    assert "neuronserve doctor" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_placeholder_packages_are_named_for_what_they_are() -> None:
    sdk = replace(SDK, packages={**SDK.packages, "torch-neuronx": "1.0", "neuronx-cc": "1.0"})

    with pytest.raises(ConfigError, match=r"no torch-neuronx \(the 1.0 there is the public index's placeholder, which"):
        pick(Asked(), replace(INF2, sdk=sdk))


def test_without_a_device_it_is_cpu_and_one_line_says_so() -> None:
    assert pick(Asked(device_flag=True), Machine()).backend == "cpu"
    assert pick(Asked(device_flag=True), Machine()).why.startswith("--device neuron: no Neuron device on this machine")


def test_require_chip_never_falls_back() -> None:
    with pytest.raises(ConfigError, match=r"require_chip: no Neuron device .* --device /dev/neuron0"):
        pick(Asked(require_chip=True), Machine())
    with pytest.raises(ConfigError, match=r"backend=cpu: .* require_chip"):
        pick(Asked(backend="cpu", require_chip=True), INF2)
    assert pick(Asked(require_chip=True), INF2).backend == "transformers-neuronx"


def test_a_chip_s_backend_by_name_is_held_to_the_chip() -> None:
    named = Asked(backend="transformers-neuronx", require_chip=True)
    with pytest.raises(ConfigError, match="require_chip: no Neuron device"):
        pick(named, Machine())
    with pytest.raises(ConfigError, match="the Neuron driver is not loaded"):
        pick(named, replace(INF2, driver=None, driver_missing=True))
    assert pick(named, INF2) == Pick("transformers-neuronx", "asked for by name")


def test_a_backend_by_name_wins_over_what_is_there() -> None:
    choice = pick(Asked(backend="transformers-neuronx"), Machine())
    assert choice.backend == "transformers-neuronx"
    assert choice.notes == (
        "no Neuron device on this machine (no /dev/neuron*): the transformers-neuronx device will look for one",
    )
    choice = pick(Asked(backend="cpu", device_flag=True), INF2)
    assert choice.backend == "cpu"
    assert "this machine's Neuron device is not used" in choice.why


@pytest.mark.parametrize("instance", ["inf2.xlarge", "trn1.2xlarge", None])
def test_without_the_classic_library_our_own_graphs_serve(instance: str | None) -> None:
    sdk = replace(SDK, packages={"torch-neuronx": "2.9.0.2.11", "neuronx-cc": "2.22"})
    assert pick(Asked(), replace(INF2, sdk=sdk, instance=instance)).backend == "torch-neuronx"


def test_trn2_is_not_given_to_the_classic_library() -> None:
    assert pick(Asked(), replace(INF2, instance="trn2.48xlarge")).backend == "torch-neuronx"


def test_a_framework_that_cannot_be_followed_is_one_note() -> None:
    choice = pick(Asked(framework="transformers-neuronx"), replace(INF2, instance="trn2.48xlarge"))

    assert choice.backend == "torch-neuronx"
    assert choice.notes == (
        "VLLM_NEURON_FRAMEWORK is not followed: the transformers-neuronx backend drives inf2 and trn1 and trn1n, this "
        "is trn2.48xlarge",
    )


# -- room


def room(machine: Machine, directory: Path, **asked: Any) -> None:
    model = tiny_model(directory, **asked.pop("model", {}))
    request = ServeRequest(model, options={"backend": asked.pop("backend", "transformers-neuronx")}, **asked)
    done = resolve(request, {}, machine)
    check_room(done.config, done.memory_facts, machine)


def test_more_cores_than_devices_is_refused_with_the_flags_to_add(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        room(INF2, tmp_path, tensor_parallel_size=8)

    assert str(caught.value) == (
        "--tensor-parallel-size 8 needs 8 cores, 2 are visible (1 device of 2 cores): start the container with "
        "--device /dev/neuron0 --device /dev/neuron1 --device /dev/neuron2 --device /dev/neuron3, or "
        "--tensor-parallel-size 2"
    )


def test_more_cores_than_the_shell_leaves_is_refused_by_its_variable(tmp_path: Path) -> None:
    machine = replace(INF2, visible_cores=1, visible_by="NEURON_RT_NUM_CORES=1 on 1 device of 2 cores")

    with pytest.raises(ConfigError, match=r"needs 2 cores, 1 are visible \(NEURON_RT_NUM_CORES=1 .*: make 2 cores"):
        room(machine, tmp_path, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [("NEURON_RT_VISIBLE_CORES", "0,1,2-3"), ("NEURON_RT_NUM_CORES", "4")],
)
def test_cores_that_are_not_there_are_refused_with_both_numbers(variable: str, numbers: str, tmp_path: Path) -> None:
    root = make_machine(tmp_path / "machine", 1, instance="inf2.xlarge")
    here = look({variable: numbers}, None, root, lambda python: SDK)

    with pytest.raises(ConfigError, match=rf"{variable}={numbers} on 1 device of 2 cores: 4 cores are named, 2 of"):
        room(here, tmp_path / "model", tensor_parallel_size=2)


def test_cores_of_a_chip_whose_number_is_unknown_are_the_runtimes_affair(tmp_path: Path) -> None:
    root = make_machine(tmp_path / "machine", 1, instance="trn2.48xlarge")
    here = look({"NEURON_RT_VISIBLE_CORES": "4"}, None, root, lambda python: SDK)

    room(here, tmp_path / "model", backend="torch-neuronx")


@pytest.mark.parametrize("numbers", ["0-1", "2-3"])
def test_two_servers_share_an_instance_by_disjoint_cores(numbers: str, tmp_path: Path) -> None:
    root = make_machine(tmp_path / "machine", 2, instance="inf2.24xlarge")
    here = look({"NEURON_RT_VISIBLE_CORES": numbers}, None, root, lambda python: SDK)

    room(here, tmp_path / "model", tensor_parallel_size=2)


def test_what_is_visible_is_enough(tmp_path: Path) -> None:
    room(INF2, tmp_path, tensor_parallel_size=2)


def test_what_does_not_fit_a_core_names_what_does(tmp_path: Path) -> None:
    # 2 layers, 2 x 8 heads of 128 x 128 floats and their cache: 32 KiB a token, 2 GiB a sequence of 65,536.
    model = {"num_hidden_layers": 2, "hidden_size": 4096, "head_dim": 128, "max_position_embeddings": 65536}

    with pytest.raises(ConfigError) as caught:
        room(INF2, tmp_path, max_model_len=65536, max_num_seqs=32, dtype="float32", model=model)

    message = str(caught.value)
    assert "--max-num-seqs 32 at --max-model-len 65536 needs " in message
    assert "a core has 16: largest that fits: --max-num-seqs " in message


@pytest.mark.parametrize(
    ("backend", "advice"),
    [
        ("transformers-neuronx", "at least 4 cores, or int8 weights"),  # 3 would hold them, and do not work as one
        ("torch-neuronx", "and this device uses 1 core: int8 weights, or a smaller model"),
    ],
)
def test_weights_that_do_not_fit_are_advised_cores_that_the_device_can_use(
    backend: str, advice: str, tmp_path: Path
) -> None:
    model = {"num_hidden_layers": 48, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}

    with pytest.raises(ConfigError) as caught:
        room(INF2, tmp_path, backend=backend, max_model_len=128, max_num_seqs=1, dtype="float32", model=model)

    assert str(caught.value).endswith(advice)


def test_the_embedded_device_needs_no_cores_and_no_core_memory(tmp_path: Path) -> None:
    room(Machine(), tmp_path, backend="cpu", tensor_parallel_size=32, max_num_seqs=4096)
