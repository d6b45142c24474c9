"""`neuronserve verify`: the table it prints, and that a wrong device does not pass."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from neuronserve.neuron_worker import checks, reference, tiny_checkpoint
from neuronserve.neuron_worker.answer_checks import CHECKS
from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.device import arithmetic, remote
from neuronserve.neuron_worker.device.arithmetic import ArithmeticDevice
from neuronserve.neuron_worker.device.arithmetic_cache import Int64
from neuronserve.neuron_worker.device.base import DeviceOutput, PackedBatch, StepShape
from neuronserve.neuron_worker.device.errors import UnsupportedModel
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice
from neuronserve.neuron_worker.device.remote import Deadlines, RemoteDevice
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.resolve import resolve
from neuronserve.neuron_worker.verify import Asked, Verdict, run_groups, verify
from neuronserve.server.cli import main
from tests.tools.bare_python import python_that_finds
from tests.tools.stand_in_answers import by_the_stand_in

EVERY_GRAPH = "each number of rows at each context, alone and beside prompts of each size"
FAKES = str(Path(__file__).resolve().parents[1] / "fakes")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NEURONSERVE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SILENCE", 2.0)


def rows(verdict: Verdict) -> dict[tuple[str, str], str]:
    """(group, check without its figures) -> result"""
    cells = [line.strip("| ").split(" | ") for line in verdict.text.splitlines() if line.count("|") == 5]
    return {(group, what.partition(": ")[0]): result for group, what, result, _ in cells[2:]}


@pytest.mark.parametrize(("backend", "skipped"), [("arithmetic", 0), ("arithmetic-slots", 3), ("cpu", 0)])
def test_the_embedded_devices_pass(backend: str, skipped: int) -> None:
    verdict = verify(Asked({"backend": backend}), {})

    assert verdict.passed, verdict.text
    results = list(rows(verdict).values())
    assert results.count("pass") == len(results) - skipped
    assert sum(result.startswith("skip: ") for result in results) == skipped
    assert f"| device | {backend}, 1 core(s), float32 |" in verdict.text
    assert "| model | a tiny random Llama |" in verdict.text
    assert re.search(r"to the last, decoded: logits within \S+ of [\w -]+, 0(\.01)? allowed \| pass", verdict.text)
    assert {group for group, _ in rows(verdict)} == {"contract", "exactness", "faults"}


def test_the_users_deadlines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Deadlines] = []
    real = remote.RemoteDevice.__init__

    def noted(self: RemoteDevice, backend: str, python: str, deadlines: Deadlines | None = None) -> None:
        made.append(deadlines or Deadlines())
        real(self, backend, python, deadlines)

    monkeypatch.setattr(remote.RemoteDevice, "__init__", noted)
    verify(Asked({"backend": "arithmetic", "device_timeout": 77, "device_prepare_timeout": 99}), {})
    assert {(deadlines.run, deadlines.compile) for deadlines in made} == {(77, 99)}


def test_a_device_in_another_interpreter_passes() -> None:
    verdict = verify(Asked({"backend": "arithmetic", "device_python": sys.executable}), {})
    assert verdict.passed, verdict.text


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint.write(tmp_path / "my-model")

    assert main(["verify", "--backend", "arithmetic", "--model", model]) == 0

    printed = capsys.readouterr()
    assert "| model | my-model |" in printed.out
    assert "| faults | killed in a step, restarted | pass |" in printed.out
    assert "| faults | stopped in a step: found by its silence, restarted | pass |" in printed.out
    assert printed.out.rstrip().endswith("25 passed, 0 skipped, 0 failed")
    assert "exactness: joined late, in a full batch: pass" in printed.err


@pytest.fixture
def chip_s_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The stand-in for the classic library; the folder it lies in. It computes no model, so it is held to its rule."""
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setattr(reference, "logits_of", by_the_stand_in)
    yield FAKES
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_neuronx"]:
        del sys.modules[name]


def test_a_chip_in_this_process_is_not_asked_to_die(chip_s_library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")

    verdict = verify(Asked({"backend": "transformers-neuronx"}), {})

    assert verdict.passed, verdict.text
    faults = [result for (group, _), result in rows(verdict).items() if group == "faults"]
    assert faults == ["skip: this process keeps the cores; name a device_python"] * len(checks.FAULTS)


def test_a_chip_in_an_interpreter_of_its_own_is(chip_s_library: str, tmp_path: Path) -> None:
    python = python_that_finds(chip_s_library, tmp_path)

    verdict = verify(Asked({"backend": "transformers-neuronx", "device_python": python}), {})

    assert verdict.passed, verdict.text
    faults = [result for (group, _), result in rows(verdict).items() if group == "faults"]
    assert faults == ["pass"] * len(faults)
    assert len(faults) == 1 + len(checks.FAULTS)  # it comes up, and is checked


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


class AlwaysSeven(ArithmeticDevice):
    def _answers(self, context: Int64, length: int) -> Int64:
        return np.full(length, 7)


class WrongLate(ArithmeticDevice):
    """After position 24; the other checks stop before it."""

    def _answers(self, context: Int64, length: int) -> Int64:
        answers = super()._answers(context, length)
        positions = np.arange(len(context) - length, len(context))
        return np.where(positions > 24, 7, answers)


class WrongInOneGraph(ArithmeticDevice):
    WRONG: ClassVar[StepShape]

    def run(self, batch: PackedBatch) -> DeviceOutput:
        output = super().run(batch)
        if batch.shape == self.WRONG:
            output.tokens[output.tokens >= 0] = 7
        return output


class WrongFromTheLargerContext(WrongInOneGraph):
    WRONG = StepShape(1, 1, 0, 256)


class WrongBesideALongPrompt(WrongInOneGraph):
    WRONG = StepShape(4, 1, 240, 256)


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
        (AlwaysSeven, ("exactness", "prompts that fill each size")),
        (AlwaysSeven, ("exactness", "each position to the last, decoded")),
        (WrongLate, ("exactness", "each position to the last, decoded")),
        (WrongFromTheLargerContext, ("exactness", EVERY_GRAPH)),
        (WrongBesideALongPrompt, ("exactness", EVERY_GRAPH)),
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


class Louder(TorchDevice):
    """By an eighth: no greedy token is another."""

    def run(self, batch: PackedBatch) -> DeviceOutput:
        output = super().run(batch)
        return DeviceOutput(output.tokens, None if output.logits is None else output.logits * np.float32(1.125))


def test_logits_are_held_against_the_other_device_on_the_checkpoint(tmp_path: Path) -> None:
    model = tiny_checkpoint.write(tmp_path)
    config = resolve(ServeRequest(model, 64, 2, options={"backend": "cpu-torch", "threads": 1}), {}).config

    good, bad = (list(run_groups(config, model, make, [("exactness", CHECKS)])) for make in (TorchDevice, Louder))

    assert [line.result for line in good] == ["pass"] * 4
    assert bad[0].result == "pass"  # it comes up
    for line in bad[1:]:
        assert re.match(
            r"FAIL: after \d+ tokens, .*: logits are 0\.1\d of their spread from the cpu device", line.result
        )


@pytest.mark.parametrize("backend", ["arithmetic", "arithmetic-slots"])
def test_every_graph_has_computed_something(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, ran = set(), set()

    class Recording(ArithmeticDevice):
        def compile(self, shape: StepShape) -> None:
            compiled.add(shape)
            super().compile(shape)

        def run(self, batch: PackedBatch) -> DeviceOutput:
            ran.add(batch.shape)
            return super().run(batch)

    monkeypatch.setattr(arithmetic, "ArithmeticDevice", Recording)
    assert verify(Asked({"backend": backend}), {}).passed
    assert compiled <= ran


def test_a_model_that_nothing_else_computes_is_held_against_nothing_and_the_table_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(device: TorchDevice, *arguments: object) -> None:
        raise UnsupportedModel("architecture Unheard is not supported")

    monkeypatch.setattr(TorchDevice, "load", load)
    verdict = verify(Asked({"backend": "cpu"}), {})

    assert verdict.passed, verdict.text
    assert rows(verdict)["exactness", EVERY_GRAPH] == (
        "skip: the cpu-torch device cannot compute this model beside it: architecture Unheard is not supported"
    )


@pytest.mark.parametrize(
    ("distance", "passes"),
    [(0.0, True), (0.009, True), (0.011, False), (float("nan"), False)],
)
def test_how_far_apart_logits_are_is_measured_in_their_spread(distance: float, passes: bool) -> None:
    expected = np.array([-3.0, 3.0], np.float32)  # a spread of 3
    assert (reference.apart(expected + np.float32(3 * distance), expected) <= reference.ALLOWED["float32"]) is passes


def test_a_token_is_judged_by_how_likely_it_is() -> None:
    expected = np.array([-3.0, 3.0, 3.0, -3.0], np.float32)
    assert [reference.below_the_likeliest(token, expected) for token in range(-1, 5)] == [np.inf, 2, 0, 0, 2, np.inf]


def test_a_device_process_that_cannot_start_fails_with_its_reason(tmp_path: Path) -> None:
    verdict = verify(Asked({"backend": "arithmetic", "device_python": str(tmp_path / "none")}), {})

    assert not verdict.passed
    assert "none" in rows(verdict)["contract", "the device comes up"]


def test_the_tiny_model_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = (Path(tiny_checkpoint.write(tmp_path / name)) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
