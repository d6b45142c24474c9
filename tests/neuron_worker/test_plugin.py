"""The entry points: when the machine is ours, and which vLLM we serve with."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from neuronserve.neuron_worker import plugin


@pytest.fixture(autouse=True)
def quiet_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_TARGET_DEVICE", "NEURONSERVE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("neuronserve.neuron_worker.machine.has_device", lambda: False)


def another_device(monkeypatch: pytest.MonkeyPatch, claims: bool) -> None:
    monkeypatch.setattr(plugin, "another_device_claims", lambda: claims)


def test_vllm_finds_both_entry_points() -> None:
    found = {
        entry.group: entry.value
        for group in ("vllm.platform_plugins", "vllm.general_plugins")
        for entry in entry_points(group=group)
        if entry.value.startswith("neuronserve.")
    }

    assert found == {
        "vllm.platform_plugins": "neuronserve.neuron_worker.plugin:register",
        "vllm.general_plugins": "neuronserve.neuron_worker.plugin:register_general",
    }


def test_a_machine_that_nothing_claims_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    another_device(monkeypatch, claims=False)

    assert plugin.is_ours(["vllm", "serve", "m"])


def test_a_machine_that_another_device_claims_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    another_device(monkeypatch, claims=True)

    assert not plugin.is_ours(["vllm", "serve", "m"])


@pytest.mark.parametrize("argv", [["serve", "m", "--device", "neuron"], ["serve", "m", "--device=neuron"]])
def test_unless_neuron_is_asked_for(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    another_device(monkeypatch, claims=True)

    assert plugin.is_ours(argv)


@pytest.mark.parametrize(("name", "value"), [("VLLM_TARGET_DEVICE", "neuron"), ("NEURONSERVE_BACKEND", "cpu")])
def test_or_the_shell_says_so(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    another_device(monkeypatch, claims=True)
    monkeypatch.setenv(name, value)

    assert plugin.is_ours([])


def test_a_vllm_without_kernels_can_serve_no_other_device() -> None:
    import vllm.platforms

    assert vllm.platforms.builtin_platform_plugins["cpu"]
    assert not plugin.another_device_claims()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+empty"])
def test_versions_we_serve_with(version: str) -> None:
    plugin.refuse_other_versions(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "0.6.2", "of unknown version"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    # SystemExit: vLLM swallows any Exception of `register` and goes on with another platform.
    with pytest.raises(SystemExit, match=f"this is vLLM {version}: install vllm=="):
        plugin.refuse_other_versions(version)


def test_registering_loads_nothing_of_vllm() -> None:
    code = (
        "import sys\nfrom neuronserve.neuron_worker import plugin\n"
        "assert plugin.register() == plugin.PLATFORM\n"
        "sys.exit(any(name == 'torch' or name.split('.')[0] == 'vllm' for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unsupported_vllm_ends_the_program_with_one_line() -> None:
    code = "import vllm\nvllm.__version__ = '0.33.0'\nfrom vllm import LLM"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("neuronserve serves with vLLM 0.32, this is vLLM 0.33.0")
    assert "Traceback" not in done.stderr


def test_vllms_own_cpu_platform_is_explained(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(plugin, "has_kernels", lambda: True)

    plugin.explain_absence()

    assert "unset it to serve with neuronserve" in caplog.text


def test_vllms_own_cpu_platform_without_kernels_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")

    with pytest.raises(SystemExit, match=r"VLLM_TARGET_DEVICE=cpu .* unset it .* built without CPU kernels"):
        plugin.explain_absence()


def test_another_platform_needs_no_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)

    plugin.explain_absence()


def test_our_lines_go_where_vllms_go() -> None:
    plugin.join_vllm_log()

    assert logging.getLogger("neuronserve").parent is logging.getLogger("vllm")
    assert "VLLM_NO_USAGE_STATS" in os.environ
