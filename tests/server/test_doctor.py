"""What `neuronserve doctor` says of a machine, and when it exits with 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.doctor import Diagnosis, examine
from neuronserve.neuron_worker.machine import Interpreter
from neuronserve.server.cli import main
from tests.neuron_worker.fake_machine import make_machine

SDK = {"transformers-neuronx": "0.13.1216", "torch-neuronx": "2.7.0.2.9.9357", "neuronx-cc": "2.20.9961"}


def diagnosis(root: Path, packages: dict[str, str], environ: dict[str, str] | None = None, **given: Any) -> Diagnosis:
    return examine(
        given, environ or {}, root, lambda python: Interpreter(python or "/usr/bin/python", "3.10.12", packages)
    )


def verdict(found: Diagnosis) -> str:
    return found.text.split("would serve with\n")[1].split("\n\n")[0]


def test_a_usable_chip(tmp_path: Path) -> None:
    found = diagnosis(make_machine(tmp_path, 1, instance="inf2.xlarge"), SDK, device_python="/opt/sdk/bin/python")

    assert found.is_well
    assert "instance              inf2.xlarge\n" in found.text
    assert "Neuron devices        /dev/neuron0\n" in found.text
    assert "Neuron driver         2.21\n" in found.text
    assert "visible cores         2 (1 device of 2 cores)\n" in found.text
    assert "python                3.10.12 /opt/sdk/bin/python\n" in found.text
    assert "neuronx-cc            2.20.9961\n" in found.text
    assert verdict(found) == "  transformers-neuronx: /dev/neuron0 and the SDK of /opt/sdk/bin/python"


def test_a_chip_without_an_sdk_is_the_reason_a_server_would_exit_with(tmp_path: Path) -> None:
    found = diagnosis(make_machine(tmp_path, 1), {})

    assert not found.is_well
    assert "nothing: /dev/neuron0 is here, and nothing that can drive it: /usr/bin/python has no" in verdict(found)


def test_a_backend_by_name_is_judged_by_its_sdk(tmp_path: Path) -> None:
    root = make_machine(tmp_path, 1, instance="inf2.xlarge")

    assert diagnosis(root, SDK, backend="transformers-neuronx").is_well
    without = diagnosis(root, {}, backend="transformers-neuronx")
    assert not without.is_well
    assert verdict(without).startswith("  nothing: /usr/bin/python has no transformers-neuronx")


def test_placeholders_are_named_in_the_list(tmp_path: Path) -> None:
    found = diagnosis(make_machine(tmp_path, 1), {"torch-neuronx": "1.0", "neuronx-cc": "1.0"})

    assert "torch-neuronx         1.0 (a placeholder of the public index: no code in it)\n" in found.text
    assert "no torch-neuronx (the 1.0 there is the public index's placeholder" in verdict(found)


def test_no_chip_is_well_and_serves_on_cpu(tmp_path: Path) -> None:
    found = diagnosis(make_machine(tmp_path, 0, driver=None), {})

    assert found.is_well
    assert "Neuron devices        none (no /dev/neuron*)\n" in found.text
    assert verdict(found).startswith("  cpu: no Neuron device on this machine;")


def test_an_image_that_requires_a_chip_is_not_well_without(tmp_path: Path) -> None:
    found = diagnosis(make_machine(tmp_path, 0), SDK, {"NEURONSERVE_REQUIRE_CHIP": "1"})
    assert not found.is_well
    assert "require_chip" in verdict(found)


def test_cores_that_cannot_be_read_leave_the_rest_standing(tmp_path: Path) -> None:
    found = diagnosis(make_machine(tmp_path, 1), SDK, {"NEURON_RT_VISIBLE_CORES": "all"})
    assert not found.is_well
    assert "NEURON_RT_VISIBLE_CORES='all'" in verdict(found)
    assert "Neuron devices        /dev/neuron0\n" in found.text


def test_a_device_python_that_cannot_start_is_not_well(tmp_path: Path) -> None:
    python = str(tmp_path / "none")
    found = examine({"device_python": python}, {}, make_machine(tmp_path, 0))
    assert not found.is_well
    assert f"device_python={python!r} cannot be started" in verdict(found)


def test_where_compiled_graphs_are_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "v1" / "manifests").mkdir(parents=True)
    (kept / "v1" / "manifests" / "0123.json").touch()
    environ = {"NEURONSERVE_ARTIFACTS": str(kept), "NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"}

    assert f"artifacts             {kept} (1 entries)" in diagnosis(tmp_path, {}, environ).text
    shared = "shared artifacts      s3://bucket/cache/neuronserve (NEURON_COMPILE_CACHE_URL)"
    assert shared in diagnosis(tmp_path, {}, environ).text
    assert "compile cache         s3://bucket/cache (remote)" in diagnosis(tmp_path, {}, environ).text
    environ["NEURON_CC_FLAGS"] = f"-O1 --cache_dir={tmp_path}/other"
    assert f"compile cache         {tmp_path}/other (not there yet)" in diagnosis(tmp_path, {}, environ).text


def test_what_to_install_is_a_table_of_instances(tmp_path: Path) -> None:
    table = diagnosis(tmp_path, {}).text.split("what to install\n")[1]
    [row] = [line for line in table.splitlines() if line.split()[:2] == ["inf2", "transformers-neuronx"]]
    assert row.split()[2:6] == ["2.25", "2.7", "3.10", "inf2.xlarge"]
    assert ".48xlarge 24" in row


@pytest.mark.parametrize("family", ["trn2", "trn3"])
def test_what_to_install_on_the_newer_chips_is_torchneuron(tmp_path: Path, family: str) -> None:
    table = diagnosis(tmp_path, {}).text.split("what to install\n")[1]
    [row] = [line for line in table.splitlines() if line.split()[:1] == [family]]
    assert row.split()[1:5] == ["torch-neuronx", "2.33", "2.13", "3.12+"]
    assert "nothing of ours ran there" in table
    assert "None" not in table


def test_the_command_exits_with_its_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURONSERVE_BACKEND", raising=False)
    assert main(["doctor", "--backend", "cpu"]) == 0
    assert "cpu: asked for by name" in capsys.readouterr().out
    assert main(["doctor", "--backend", "cpuu"]) == 1
    assert "did you mean cpu?" in capsys.readouterr().out


def test_it_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from neuronserve.server.cli import main; main(['doctor'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
