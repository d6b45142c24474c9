"""What SageMaker adds: the word `serve`, its port, its directory, its variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.launcher import sagemaker
from neuronserve.server.launcher.checks import idle
from neuronserve.server.launcher.main import main, settle
from neuronserve.server.launcher.model import Model
from neuronserve.server.launcher.reading import read

MODEL = Model("m", positions=4096)


def port(argv: list[str], environ: dict[str, str]) -> object:
    words, is_sagemaker = sagemaker.without_serve(argv)
    shell = sagemaker.environment(environ) if is_sagemaker else environ
    return settle(read(words, shell), is_sagemaker, MODEL).value("port")


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["serve"], {}, 8080),
        (["serve"], {"PORT": "80"}, 8080),  # an image's, for other hosts
        (["serve"], {"SAGEMAKER_BIND_TO_PORT": "8123", "PORT": "80"}, 8123),
        (["serve", "--port", "9000"], {}, 9000),
        ([], {"PORT": "80"}, 80),
        ([], {}, 3000),
    ],
)
def test_the_port(argv: list[str], environ: dict[str, str], expected: int) -> None:
    assert port(argv, environ) == expected


def test_serve_is_a_word_only_where_it_stands_first() -> None:
    assert sagemaker.without_serve(["serve", "--port", "1"]) == (["--port", "1"], True)
    assert sagemaker.without_serve(["--model-id", "serve"]) == (["--model-id", "serve"], False)


def test_names_of_its_own() -> None:
    environ = {
        "HF_MODEL_ID": "m",
        "HF_MODEL_REVISION": "v1",
        "HF_MODEL_QUANTIZE": "eetq",
        "HF_MODEL_TRUST_REMOTE_CODE": "true",
        "SM_NUM_GPUS": "1",
    }
    asked = read([], environ)
    settings = settle(asked, True, MODEL)

    assert settings.value("model_id") == "m"
    assert settings.value("revision") == "v1"
    assert settings.value("quantize") == "int8"
    assert [line.split()[0] for line in idle(asked)] == ["HF_MODEL_TRUST_REMOTE_CODE", "SM_NUM_GPUS"]


def test_variables_that_are_arguments() -> None:
    asked = read(
        [],
        {
            "SM_ON_MODEL": "m",
            "SM_ON_BATCH_SIZE": "4",
            "SM_ON_SEQUENCE_LENGTH": "2048",
            "SM_ON_TENSOR_PARALLEL_SIZE": "2",
            "SM_ON_BLOCK_SIZE": "32",
            "SM_ON_ENFORCE_EAGER": "",
            "SM_ON_TASK": "generate",
        },
    )
    settings = settle(asked, True, MODEL)

    assert [settings.value(name) for name in ("max_num_seqs", "max_model_len", "num_cores")] == [4, 2048, 2]
    assert asked.server_arguments == ("--block-size", "32", "--enforce-eager")


def test_a_task_that_is_not_served() -> None:
    with pytest.raises(ConfigError, match="SM_ON_TASK embed: this server generates text"):
        settle(read([], {"SM_ON_TASK": "embed"}), True, MODEL)


def test_the_model_s_directory(tmp_path: Path) -> None:
    assert sagemaker.model_directory(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert sagemaker.model_directory(tmp_path) == str(tmp_path)


def test_no_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_MODEL_ID", raising=False)
    monkeypatch.delenv("MODEL_ID", raising=False)
    assert main(["serve"]) == 1
    assert "HF_MODEL_ID must be set" in capsys.readouterr().err
