"""The `neuronserve` command, as a person types it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.config import ModelConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from neuronserve.server.cli import _parser, main
from neuronserve.server.vllm_flags import split
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


def test_the_default_length_is_the_one_vllm_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0})
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512})
    )

    assert main(["plan", model]) == 0

    # A tokenizer's length counts for embedding models alone.
    assert ModelConfig(model).max_model_len == 8192
    assert "sequences of up to 8192 tokens" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    "words",
    [
        "--port 8000 MODEL",
        "--model MODEL --port 8000",
        "--enforce-eager MODEL",
        "--no_enable_log_requests MODEL --served-model-name a b -dp 2 -O3",
        "--compilation-config.mode 0 MODEL -tp=2",
        "MODEL --max-model-len -1",
    ],
)
def test_the_model_is_told_from_a_flag_s_value(model: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.replace("MODEL", model).split()]) == 0
    assert "graphs" in capsys.readouterr().out


def test_a_typing_error_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--max-num-seq", "4", model]) == 0
    assert "note: not part of a plan: --max-num-seq\n" in capsys.readouterr().out


def test_flags_take_as_many_words_as_vllm_says() -> None:
    values = {0: [], None: ["1"], "?": ["1"], "+": ["1", "2"], "*": ["1", "2"]}
    actions = make_arg_parser(FlexibleArgumentParser())._actions
    plan_flags = _parser()[1]
    flags = [(flag, action.nargs) for action in actions for flag in action.option_strings if flag not in plan_flags]
    assert len(flags) > 300

    for flag, nargs in flags:
        given = values[nargs]
        several = len(given) > 1 or nargs == "?"
        words = ["M", flag, *given] if several else [flag, *given, "M"]
        assert split(words, ()) == (["M"], [flag])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "7", "--max-model-len", "128"], "--block-size 7 does not divide --max-model-len 128"),
        (["--speculative-model", "draft"], "num_speculative_tokens is missing"),
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
