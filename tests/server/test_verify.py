"""`neuronserve verify`: the table it prints, and that a wrong device does not pass."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronserve.neuron_worker import tiny_checkpoint
from neuronserve.neuron_worker.device import arithmetic
from neuronserve.neuron_worker.device.arithmetic import ArithmeticDevice
from neuronserve.neuron_worker.device.base import DeviceOutput, PackedBatch, StepShape
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.verify import Asked, Verdict, verify
from neuronserve.server.cli import main
from tests.tools.bare_python import python_that_finds

FAKES = str(Path(__file__).resolve().parents[1] / "fakes")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NEURONSERVE_")]:
        monkeypatch.delenv(name)


def rows(verdict: Verdict) -> dict[tuple[str, str], str]:
    """(group, check) -> result"""
    cells = [line.strip("| ").split(" | ") for line in verdict.text.splitlines() if line.count("|") == 5]
    return {(group, what): result for group, what, result, _ in cells[2:]}


@pytest.mark.parametrize(("backend", "skipped"), [("arithmetic", 0), ("arithmetic-slots", 3), ("cpu", 0)])
def test_the_embedded_devices_pass(backend: str, skipped: int) -> None:
    verdict = verify(Asked({"backend": backend}), {})

    assert verdict.passed, verdict.text
    results = list(rows(verdict).values())
    assert results.count("pass") == len(results) - skipped
    assert sum(result.startswith("skip: ") for result in results) == skipped
    assert f"| device | {backend}, 1 core(s), float32 |" in verdict.text
    assert "| model | a tiny random Llama |" in verdict.text
    assert {group for group, _ in rows(verdict)} == {"contract", "exactness", "faults"}


def test_a_device_in_another_interpreter_passes() -> None:
    verdict = verify(Asked({"backend": "arithmetic", "device_python": sys.executable}), {})
    assert verdict.passed, verdict.text


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint.write(tmp_path / "my-model")

    assert main(["verify", "--backend", "arithmetic", "--model", model]) == 0

    printed = capsys.readouterr()
    assert "| model | my-model |" in printed.out
    assert "| faults | killed in a step, restarted | pass |" in printed.out
    assert printed.out.rstrip().endswith("20 passed, 0 skipped, 0 failed")
    assert "exactness: joined late, in a full batch: pass" in printed.err


@pytest.fixture
def chip_s_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The stand-in for the classic library; the folder it lies in."""
    monkeypatch.syspath_prepend(FAKES)
    yield FAKES
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_neuronx"]:
        del sys.modules[name]


def test_a_chip_in_this_process_is_not_asked_to_die(chip_s_library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")

    verdict = verify(Asked({"backend": "transformers-neuronx"}), {})

    assert verdict.passed, verdict.text
    faults = [result for (group, _), result in rows(verdict).items() if group == "faults"]
    assert faults == ["skip: this process keeps the cores; name a device_python"] * 3


def test_a_chip_in_an_interpreter_of_its_own_is(chip_s_library: str, tmp_path: Path) -> None:
    python = python_that_finds(chip_s_library, tmp_path)

    verdict = verify(Asked({"backend": "transformers-neuronx", "device_python": python}), {})

    assert verdict.passed, verdict.text
    faults = [result for (group, _), result in rows(verdict).items() if group == "faults"]
    assert faults == ["pass"] * len(faults)
    assert len(faults) == 4  # it comes up, and three checks


def test_sizes_in_the_shell_are_a_servers_affair() -> None:
    environ = {"NEURON_TOKEN_GEN_BUCKETS": "8", "NEURON_CONTEXT_LENGTH_BUCKETS": "4", "NEURONSERVE_CHUNK_TOKENS": "1"}
    assert verify(Asked({"backend": "arithmetic"}), environ).passed


def test_no_device_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="require_chip"):
        verify(Asked(), {"NEURONSERVE_REQUIRE_CHIP": "1"})


# -- wrong devices


class TellsOfNeighbours(ArithmeticDevice):
    def run(self, batch: PackedBatch) -> DeviceOutput:
        output = super().run(batch)
        wanted = output.tokens[:, 0] >= 0
        output.tokens[wanted, 0] += np.int32(wanted.sum() > 1)
        return output


class CompilesForever(ArithmeticDevice):
    def seal(self) -> None:
        pass


class ServesAnything(ArithmeticDevice):
    def run(self, batch: PackedBatch) -> DeviceOutput:
        self._shapes.add(batch.shape)
        return super().run(batch)


class ForgetsChunks(ArithmeticDevice):
    def run(self, batch: PackedBatch) -> DeviceOutput:
        if batch.prefill is not None and batch.prefill.positions.any():
            assert self._cache is not None
            for block in range(1, len(self._cache)):
                self._cache.spoil(block)
        return super().run(batch)


class CopiesNothing(ArithmeticDevice):
    def copy_blocks(self, pairs: Any) -> None:
        pass


class StaysOpen(ArithmeticDevice):
    def close(self) -> None:
        pass


class NeverCompiles(ArithmeticDevice):
    def compile(self, shape: StepShape) -> None:
        raise arithmetic.DeviceError("the compiler is out of order")


@pytest.mark.parametrize(
    ("device", "check"),
    [
        (TellsOfNeighbours, ("exactness", "joined late, in a full batch")),
        (TellsOfNeighbours, ("exactness", "all prompts in one step")),
        (CompilesForever, ("contract", "after the seal nothing is compiled")),
        (ServesAnything, ("contract", "an uncompiled shape is refused, and the device serves on")),
        (ForgetsChunks, ("exactness", "a prompt in chunks")),
        (CopiesNothing, ("exactness", "copied cache blocks continue as the original")),
        (StaysOpen, ("contract", "closing twice is fine, and ends everything")),
        (NeverCompiles, ("contract", "the device comes up")),
    ],
)
def test_a_wrong_device_fails_where_it_is_wrong(
    device: type[ArithmeticDevice], check: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "ArithmeticDevice", device)

    verdict = verify(Asked({"backend": "arithmetic"}), {})

    assert not verdict.passed
    assert rows(verdict)[check].startswith("FAIL: "), verdict.text


def test_a_device_process_that_cannot_start_fails_with_its_reason(tmp_path: Path) -> None:
    verdict = verify(Asked({"backend": "arithmetic", "device_python": str(tmp_path / "none")}), {})

    assert not verdict.passed
    assert "none" in rows(verdict)["contract", "the device comes up"]


def test_the_tiny_model_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = (Path(tiny_checkpoint.write(tmp_path / name)) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
