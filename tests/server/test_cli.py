"""The `neuronserve` command, as a person types it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from neuronserve.server.cli import main
from tests.neuron_worker.tiny_model import tiny_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    return tiny_model(tmp_path)


def test_the_guides_flags_are_planned(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = shlex.split(
        "--tensor-parallel-size 32 --max-num-seqs 4 --max-model-len 2048 --block-size 8 --device neuron "
        r"--override-neuron-config {\"shard_over_sequence\":\"True\"} --neuronserve.backend arithmetic"
    )

    assert main(["plan", model, *flags]) == 0

    printed = capsys.readouterr().out
    assert "4 sequences of up to 2048 tokens" in printed
    assert "memory on each of 32 cores" in printed
    assert "override_neuron_config: no effect on the arithmetic device: shard_over_sequence" in printed


def test_it_reads_flags_as_vllm_does(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = shlex.split("--max_model_len=2K --max-num-seqs 2 -tp 2 --neuronserve.chunk_tokens=64 --dtype bf16")

    assert main(["plan", "--model", model, *flags]) == 0

    printed = capsys.readouterr().out
    assert "2 sequences of up to 2048 tokens, prompts in chunks of 64 tokens" in printed
    # Keys and values of 2 layers, 4 of 8 KV heads per core, 4 numbers each; the cpu device
    # caches float32 whatever the weights are.
    assert f"2 x 2048 tokens of {2 * 2 * 4 * 4 * 4} bytes" in printed


def test_the_environment_counts(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_CONTEXT_LENGTH_BUCKETS", "512,128,")

    assert main(["plan", model, "--max-model-len", "1024"]) == 0

    printed = capsys.readouterr().out
    assert "note: NEURON_CONTEXT_LENGTH_BUCKETS: 128, 512" in printed
    assert "chunks of 512 tokens" in printed


def test_flags_without_a_part_in_it_are_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--port", "8000", "--api-key=secret"]) == 0

    printed = capsys.readouterr().out
    assert "note: not part of a plan: --port --api-key\n" in printed
    assert "secret" not in printed


def test_the_value_of_such_a_flag_is_not_the_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--port", "8000"]) == 0
    assert "graphs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "7", "--max-model-len", "128"], "--block-size 7 does not divide --max-model-len 128"),
        (["--speculative-model", "draft"], "speculative decoding is not built yet"),
        (["--quantization", "awq"], "--quantization awq is not supported"),
        (["--dtype", "int4"], "--dtype int4: the cpu device computes in"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    model: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, *flags]) == 1

    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_directory_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "./nowhere"]) == 1
    assert capsys.readouterr().err.startswith("error: model='./nowhere': no such directory; give")


def test_a_name_the_hub_does_not_know(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    assert main(["plan", "nobody/nothing"]) == 1
    assert capsys.readouterr().err.startswith("error: model='nobody/nothing' is no local directory, and the hub says:")


def test_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 1
    assert "error: no model" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--max-model-len", "0"], ["--max-num-seqs", "many"], ["--device", "cpu"]])
def test_a_malformed_flag_is_argparses_error(model: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["plan", model, *flags])

    assert error.value.code == 2
    assert f"argument {flags[0]}" in capsys.readouterr().err


def test_version_names_what_it_serves_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert "vllm 0.32." in capsys.readouterr().out


def test_planning_loads_neither_vllm_nor_torch(model: str) -> None:
    code = (
        "import sys\nfrom neuronserve.server.cli import main\n"
        "assert main(['plan', sys.argv[1]]) == 0\n"
        "heavy = {'vllm', 'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )

    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
