"""`optimum-cli` of the images: the documents' lines, and what else of optimum's is answered."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server import cli
from neuronserve.server.cache import optimum
from neuronserve.server.cache.places import places
from neuronserve.server.export import command, optimum_cli, read_settings
from neuronserve.server.export.write import ExportRequest

from .conftest import Export

ZEPHYR = (
    "export neuron -m HuggingFaceH4/zephyr-7b-beta --batch_size 4 --sequence_length 2048 --num_cores 2 "
    "--auto_cast_type bf16 ./zephyr-7b-beta-neuron"
)
CLASSIC = (
    "export neuron --model meta-llama/Llama-2-7b-chat-hf --task text-generation --batch_size 4 "
    "--sequence_length 4096 --num_cores 24 --auto_cast_type fp16 ./data/llama_neuron"
)


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        (ZEPHYR, ExportRequest("HuggingFaceH4/zephyr-7b-beta", Path("zephyr-7b-beta-neuron"), 4, 2048, 2, "bf16")),
        (CLASSIC, ExportRequest("meta-llama/Llama-2-7b-chat-hf", Path("data/llama_neuron"), 4, 4096, 24, "fp16")),
    ],
)
def test_the_documents_lines_say_what_they_say(line: str, request_: ExportRequest) -> None:
    assert command.parse(shlex.split(line)[2:]) == (request_, None, False, [])


@pytest.mark.parametrize("line", [ZEPHYR, CLASSIC])
def test_the_documents_lines_export(line: str, checkpoint: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    words[3] = checkpoint  # a tiny model in the place of the one that would be fetched
    words[words.index("--sequence_length") + 1] = "64"
    done = subprocess.run(
        [sys.executable, "-m", "neuronserve.server.export.optimum_cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    settings = read_settings(tmp_path / words[-1])
    assert settings is not None
    cores, cast = (2, "bf16") if line == ZEPHYR else (24, "fp16")
    assert (settings.batch_size, settings.num_cores, settings.auto_cast_type) == (4, cores, cast)


def served(*words: str) -> list[str]:
    lines: list[list[str]] = []
    optimum_cli.run(["neuron", "serve", *words], {}, become=lambda line: lines.append(list(line)))
    return lines[0]


def test_serve_becomes_vllm_serve(checkpoint: str) -> None:
    line = served("-m", checkpoint, "--batch_size", "2", "--sequence_length", "64", "--dtype", "float32")
    limits = ["--max-num-seqs", "2", "--max-model-len", "64"]
    assert line == ["serve", checkpoint, "--device", "neuron", "--port", "8080", *limits, "--dtype", "float32"]


def test_serve_takes_an_export_at_its_own_values_alone(exported: Export) -> None:
    out = str(exported())
    assert served("--model", out, "--batch_size", "4")[-2:] == ["--max-num-seqs", "4"]
    with pytest.raises(ConfigError, match=r"--batch_size 2: the export in .* has 4; leave --batch_size out"):
        served("--model", out, "--batch_size", "2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("env", "optimum-cli env: not answered here"),
        ("export onnx -m a b", "optimum-cli export onnx: not answered here"),
        ("neuron cache set me/mine", "CUSTOM_CACHE_REPO=owner/name"),
        ("neuron cache frob", "neuron cache frob: known are lookup"),
        ("neuron cache synchronize", "give --repo_id or set CUSTOM_CACHE_REPO"),
        ("neuron cache cleanup --wipe", "neuronserve cache prune"),
        ("neuron serve", "the following arguments are required: -m/--model"),
        ("neuron serve -m m --task embed", "invalid choice: 'embed'"),
    ],
)
def test_what_is_not_answered_says_so(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optimum_cli.run(line.split(), {"HF_HOME": "/nowhere"})
    assert message in str(caught.value)


def test_a_lookup_speaks_optimums_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"NEURONSERVE_ARTIFACTS": str(tmp_path)}
    assert optimum_cli.run(["neuron", "cache", "lookup", "some/model"], environ) == 0
    assert "*** 0 entrie(s) found in cache for some/model for inference.***" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--repo_id", "me/cache"], {}),
        ([], {"CUSTOM_CACHE_REPO": "me/cache"}),
        ([], {"HF_HOME": "told"}),
        (["--repo_id", "me/cache"], {"CUSTOM_CACHE_REPO": "me/other"}),
    ],
)
def test_synchronize_writes_where_a_start_and_a_lookup_read(
    words: list[str], environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def write_down(line: list[str]) -> int:
        asked.append(line)
        return 0

    monkeypatch.setattr(cli, "main", write_down)
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "optimum_neuron_custom_cache").write_text("me/cache")
    environ = {name: str(tmp_path / value) if name == "HF_HOME" else value for name, value in environ.items()}

    assert optimum_cli.run(["neuron", "cache", "synchronize", *words], environ) == 0

    read = {"CUSTOM_CACHE_REPO": "me/cache"} if words else environ
    assert asked == [["cache", "push", places(read).remote]]
    assert asked[0][2] in optimum.urls(words[1] if words else None, environ)


def test_a_repository_that_is_none_is_named_by_what_said_it() -> None:
    with pytest.raises(ConfigError, match="--repo_id='cache' is no repository of the hub; give owner/name"):
        optimum_cli.run(["neuron", "cache", "synchronize", "--repo_id", "cache"], {})


def test_the_real_one_is_left_alone() -> None:
    import tomllib

    scripts = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"]
    assert "optimum-cli" not in json.dumps(scripts)
