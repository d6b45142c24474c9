"""`neuronserve export`: what it writes, in whose spelling, and what it refuses."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server import cli
from neuronserve.server.export import command, read_settings
from neuronserve.server.export.write import ExportRequest

from .conftest import Export

OPTIMUM_CLASS = """
def __init__(self, checkpoint_id, checkpoint_revision, batch_size, max_batch_size, continuous_batching,
    speculation_length, sequence_length, tp_degree, ep_degree, pp_degree, torch_dtype, n_active_tokens,
    max_context_length, output_logits, fused_qkv, target, on_device_sampling, max_topk, start_rank_id,
    local_ranks_size, capacity_factor, glu_mlp): ...
"""
"""Names that optimum-neuron's class takes: another one would be a TypeError there."""


def test_an_export_has_everything_a_server_reads(exported: Export, checkpoint: str) -> None:
    out = exported()
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    packed = next(name for name in names if name.startswith("packed/cpu-"))
    assert names == {"config.json", "model.safetensors", "neuron_config.json", "neuronserve.json", packed}
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (Path(checkpoint) / name).read_bytes()
    manifest = json.loads((out / "neuronserve.json").read_text())
    assert set(manifest["files"]) == names - {"neuronserve.json"}
    assert {"decode_rows", "decode_width", "prefill_tokens", "context"} == set(manifest["shapes"][0])
    assert max(shape["decode_rows"] for shape in manifest["shapes"]) == 4
    assert list(out.parent.iterdir()) == [out]  # nothing left of the making


def test_the_settings_are_read_back(exported: Export) -> None:
    settings = read_settings(exported("--auto-cast-type", "bf16", "--quant", "s8"))
    assert settings is not None
    assert (settings.form, settings.batch_size, settings.sequence_length) == ("neuronserve", 4, 64)
    assert (settings.num_cores, settings.auto_cast_type, settings.quantization) == (2, "bf16", "int8")


def test_optimum_can_read_the_settings(exported: Export) -> None:
    values = json.loads((exported() / "neuron_config.json").read_text())
    function = ast.parse(OPTIMUM_CLASS).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert {values.pop(name) for name in ("_serialized_key", "neuronxcc_version")} == {"NxDNeuronConfig", "none"}
    assert values.pop("optimum_neuron_version").startswith("neuronserve-")
    assert set(values) <= {argument.arg for argument in function.args.args}


OURS = "HuggingFaceH4/zephyr-7b-beta ./out --batch-size 4 --sequence-length 2048 --num-cores 2 --auto-cast-type bf16"
OPTIMUMS = (
    "-m HuggingFaceH4/zephyr-7b-beta --batch_size 4 --sequence_length 2048 --num_cores 2 --auto_cast_type bf16 ./out"
)
NEWER = (
    "--model HuggingFaceH4/zephyr-7b-beta --task text-generation --instance_type inf2 --batch_size=4 "
    "--sequence_length=2048 --tensor_parallel_size 2 --torch_dtype bf16 -O1 ./out"
)


@pytest.mark.parametrize("line", [OURS, OPTIMUMS, NEWER])
def test_spellings(line: str) -> None:
    request, repository, _, ignored = command.parse(line.split())
    chip = "inf2" if line == NEWER else None
    assert request == ExportRequest("HuggingFaceH4/zephyr-7b-beta", Path("out"), 4, 2048, 2, "bf16", instance_type=chip)
    assert repository is None
    assert ignored == (["-O1"] if line == NEWER else [])


@pytest.mark.parametrize(
    ("flags", "environ", "backend"),
    [
        ([], {}, "transformers-neuronx"),
        (["--instance-type", "inf2"], {}, "transformers-neuronx"),
        (["--instance-type", "trn2"], {}, "torch-neuronx"),
        (["--instance-type", "inf2"], {"VLLM_NEURON_FRAMEWORK": "neuronx-distributed-inference"}, "torch-neuronx"),
        (["--instance-type", "inf2"], {"NEURONSERVE_BACKEND": "torch-neuronx"}, "torch-neuronx"),
    ],
)
def test_the_chip_s_image_exports_on_a_machine_without_one(
    checkpoint: str, tmp_path: Path, flags: list[str], environ: dict[str, str], backend: str
) -> None:
    out = tmp_path / "out"
    said: list[str] = []

    shell = {"NEURONSERVE_REQUIRE_CHIP": "1", **environ}
    command.main([checkpoint, str(out), "--batch-size", "4", "--sequence-length", "64", *flags], shell, said.append)

    later = "" if backend == "torch-neuronx" else "; export again there with --overwrite to have them in the directory"
    assert (
        f"note: no Neuron device on this machine: nothing is compiled; the export is for the {backend} device, which "
        f"compiles at its first start on a chip or finds its graphs in the cache{later}"
    ) in said
    assert json.loads((out / "neuronserve.json").read_text())["backend"] == backend
    settings = read_settings(out)
    assert settings is not None
    assert (settings.batch_size, settings.sequence_length) == (4, 64)


def test_the_processor_by_name_is_no_chip(checkpoint: str, tmp_path: Path) -> None:
    shell = {"NEURONSERVE_REQUIRE_CHIP": "1", "NEURONSERVE_BACKEND": "cpu"}
    with pytest.raises(ConfigError, match="backend=cpu: that is no chip, and require_chip is set"):
        command.main([checkpoint, str(tmp_path / "out"), "--sequence-length", "32"], shell, lambda _: None)


def test_the_chip_it_is_for_decides_nothing_elsewhere(checkpoint: str, tmp_path: Path) -> None:
    said: list[str] = []

    command.main(
        [checkpoint, str(tmp_path / "out"), "--sequence-length", "32", "--instance-type", "inf2"], {}, said.append
    )

    assert "note: without effect here: --instance-type" in said
    assert json.loads((tmp_path / "out" / "neuronserve.json").read_text())["backend"] == "cpu"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model", "export takes a model and a directory to write, here are model"),
        ("-m model a b", "here are model a b"),
        ("model out --batch-size 0", "--batch-size: '0' is not a whole number of at least 1"),
        ("model out --auto-cast-type tf32", "invalid choice: 'tf32'"),
        ("model out --task feature-extraction", "invalid choice: 'feature-extraction'"),
        ("model out --instance-type p5", "invalid choice: 'p5'"),
        ("model out --frobnicate", "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_malformed_line_names_itself(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command.parse(line.split())
    assert message in str(caught.value)


def test_a_place_that_cannot_be_written_is_named(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert cli.main(["export", checkpoint, str(out), "--sequence-length", "32"]) == 1
    assert f"output='{out}' cannot be written (" in capsys.readouterr().err


def test_an_export_is_not_replaced_unless_asked(
    exported: Export, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(exported(), out)
    assert cli.main(["export", checkpoint, str(out), "--sequence-length", "32"]) == 1
    assert "holds an export already: choose another, or add --overwrite" in capsys.readouterr().err
    assert cli.main(["export", checkpoint, str(out), "--sequence-length", "32", "--overwrite"]) == 0
    settings = read_settings(out)
    assert settings is not None
    assert settings.sequence_length == 32
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_what_is_no_export_is_never_replaced(
    checkpoint: str, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert cli.main(["export", checkpoint, str(tmp_path / "mine"), *flags]) == 1
    assert "is no export of ours" in capsys.readouterr().err
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_failure_leaves_nothing_behind(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert cli.main(["export", str(broken), str(tmp_path / "out")]) == 1
    assert "model.safetensors is truncated or corrupt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_an_export_is_not_exported_again(exported: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(exported()), str(tmp_path / "out")]) == 1
    assert "is an export already: serve it as it is" in capsys.readouterr().err


def test_a_failed_upload_says_where_the_export_is(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = tmp_path / "out"
    assert cli.main(["export", checkpoint, str(out), "--sequence-length", "32", "--push-to-hub", "me/it"]) == 1
    assert f"upload it later with hf upload me/it {out}" in capsys.readouterr().err
    assert read_settings(out) is not None
