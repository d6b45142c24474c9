"""The `vllm serve` command that settings come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.launcher.checks import check_asked
from neuronserve.server.launcher.command import Command, Device, command, log_level, look, with_origins
from neuronserve.server.launcher.main import settle
from neuronserve.server.launcher.model import Model
from neuronserve.server.launcher.model import look as look_at_model
from neuronserve.server.launcher.reading import read
from neuronserve.server.tgi.settings import TgiSettings
from tests.neuron_worker.tiny_model import tiny_model

CPU = Device(max_num_seqs=8, chunk_tokens=256, name="cpu")
CHIP = Device(max_num_seqs=8, chunk_tokens=None, name="chip")

XLAM = {"SM_ON_TOOL_CALL_PARSER": "xlam"}


def made(flags: str = "", device: Device = CPU, **environ: str) -> Command:
    asked = read(flags.split(), environ)
    return command(settle(asked, model=Model("m", positions=2048)), device, environ, asked.server_arguments)


def words(found: Command) -> dict[str, str]:
    given = [word for word in found.argv[2:] if word != "--enable-auto-tool-choice"]
    return dict(zip(given[::2], given[1::2], strict=True))


def ours(found: Command) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(words(found)["--additional-config"])["neuronserve"]
    return options


def test_limits_reach_the_engine_and_the_routes() -> None:
    found = made("--max-batch-size 4 --max-total-tokens 1024 --max-concurrent-requests 7 --port 80", HF_NUM_CORES="2")

    assert found.argv[:2] == ("serve", "m")
    given = words(found)
    assert (given["--max-num-seqs"], given["--max-model-len"], given["--tensor-parallel-size"]) == ("4", "1024", "2")
    assert (given["--host"], given["--port"], given["--dtype"]) == ("0.0.0.0", "80", "auto")
    assert TgiSettings.from_mapping(ours(found)["tgi"]) == TgiSettings(
        model_id="m", max_concurrent_requests=7, max_input_tokens=1023, max_total_tokens=1024, any_model_name=True
    )


def test_the_device_s_batch_is_left_to_it() -> None:
    assert "--max-num-seqs" not in made().argv


def test_concurrent_requests_are_no_batch() -> None:
    assert "--max-num-seqs" not in made("--max-concurrent-requests 4").argv


@pytest.mark.parametrize(
    ("cap", "device", "chunk", "note"),
    [
        (128, CPU, 128, None),
        (256, CPU, None, "caps nothing: the cpu device has 256 prompt tokens in a step"),
        (8192, CPU, None, "caps nothing"),
        (128, CHIP, None, "has no effect: the chip device takes prompts whole"),
    ],
)
def test_the_prefill_limit_only_caps_the_chunk(cap: int, device: Device, chunk: int | None, note: str | None) -> None:
    found = made(f"--max-batch-prefill-tokens {cap}", device)

    assert ours(found).get("chunk_tokens") == chunk
    assert [note in line for line in found.notes] == [True] if note else not found.notes


def test_secrets_are_on_no_command_line() -> None:
    found = made("--api-key sesame", HF_API_TOKEN="hf_hush")

    assert found.variables["VLLM_API_KEY"] == "sesame"
    assert found.variables["HF_TOKEN"] == "hf_hush"
    assert "sesame" not in " ".join(found.argv)
    assert "hf_hush" not in " ".join(found.argv)


def test_secrets_of_sagemaker_s_spelling_are_on_none_either() -> None:
    found = made(SM_ON_API_KEY="sesame", SM_ON_HF_TOKEN="hf_hush", SM_ON_BLOCK_SIZE="32")

    assert (found.variables["VLLM_API_KEY"], found.variables["HF_TOKEN"]) == ("sesame", "hf_hush")
    assert found.argv[-2:] == ("--block-size", "32")
    assert not {"sesame", "hf_hush", "--api-key", "--hf-token"} & set(found.argv)


@pytest.mark.parametrize(
    ("words_", "remedy"),
    [
        (["--api-key", "sesame"], "give API_KEY"),
        (["--api-key=sesame"], "give API_KEY"),
        (["--api_key=sesame"], "give API_KEY"),
        (["--hf-token", "sesame"], "give HF_TOKEN"),
    ],
)
def test_a_secret_among_the_server_s_own_words_is_refused(words_: list[str], remedy: str) -> None:
    with pytest.raises(ConfigError, match="everybody on the machine could read it") as refusal:
        check_asked(read(["--", *words_], {}))
    assert remedy in str(refusal.value)
    assert "sesame" not in str(refusal.value)


@pytest.mark.parametrize("method", ["eetq", "bitsandbytes"])
def test_int8(method: str) -> None:
    assert ours(made(f"--quantize {method}"))["quantization"] == "int8"


def test_drafts_are_looked_up_in_the_prompt() -> None:
    drafts = json.loads(words(made("--speculate 2"))["--speculative-config"])
    assert drafts == {"method": "ngram", "num_speculative_tokens": 2}
    assert "--speculative-config" not in made("--speculate 0").argv
    assert "--speculative-config" not in made().argv


def test_the_rest() -> None:
    found = made(
        "--graceful-termination-timeout 5 --cors-allow-origin https://a.example --disable-grammar-support "
        "--payload-limit 1000 --otlp-endpoint http://traces:4317 --weights-cache-override /cache --revision v2",
        ENABLE_PREFILL_LOGPROBS="false",
        HUGGINGFACE_HUB_CACHE="/other",
        LOG_COLORIZE="0",
        LOG_LEVEL="debug",
    )
    given, settings = words(found), ours(found)["tgi"]

    assert given["--shutdown-timeout"] == "5"
    assert json.loads(given["--allowed-origins"]) == settings["cors_allow_origin"] == ["https://a.example"]
    assert given["--otlp-traces-endpoint"] == "http://traces:4317"
    assert given["--revision"] == "v2"
    assert (settings["disable_grammar_support"], settings["enable_prefill_logprobs"]) == (True, False)
    assert settings["payload_limit"] == 1000
    assert found.variables == {
        "HF_HUB_CACHE": "/cache",
        "OTEL_SERVICE_NAME": "text-generation-inference.router",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_LOGGING_COLOR": "0",
    }


def test_tools_are_served_on_any_model() -> None:
    found = made()
    assert words(found)["--tool-call-parser"] == "hermes"
    assert words(found)["--tool-strict-level"] == "parameter"
    assert "--enable-auto-tool-choice" in found.argv


@pytest.mark.parametrize(("variables", "flags"), [({}, "-- --tool-call-parser xlam"), (XLAM, "")])
def test_the_user_s_own_parser_wins(variables: dict[str, str], flags: str) -> None:
    """vLLM reads the last of two."""
    assert words(made(flags, **variables))["--tool-call-parser"] == "xlam"


def test_browsers_may_call_from_anywhere_unless_told_otherwise() -> None:
    assert json.loads(words(made())["--allowed-origins"]) == ["*"]


@pytest.mark.parametrize(("flags", "environ"), [("--json-output", {}), ("", {"LOG_FORMAT": "json"})])
def test_json_lines_are_asked_for_twice(flags: str, environ: dict[str, str]) -> None:
    assert made(flags, **environ).variables["LOG_FORMAT"] == "JSON"


@pytest.mark.parametrize(
    ("flags", "environ", "host", "is_noted"),
    [
        ("", {"HOSTNAME": "f0e1d2c3b4a5"}, "0.0.0.0", True),  # Docker's name of the container
        ("", {"HOSTNAME": "127.0.0.1"}, "127.0.0.1", False),
        ("", {"HOSTNAME": "::1"}, "::1", False),
        ("", {"HOSTNAME": "localhost"}, "localhost", False),
        ("--hostname localhost", {"HOSTNAME": "f0e1d2c3b4a5"}, "localhost", False),
        ("", {}, "0.0.0.0", False),
    ],
)
def test_the_address(flags: str, environ: dict[str, str], host: str, is_noted: bool) -> None:
    found = made(flags, **environ)
    assert words(found)["--host"] == host
    assert any("Invalid hostname, defaulting to 0.0.0.0" in note for note in found.notes) is is_noted


@pytest.mark.parametrize(
    ("directive", "level"),
    [
        ("info", "INFO"),
        ("text_generation_router=debug", "DEBUG"),
        ("info,text_generation_launcher=trace", "DEBUG"),
        ("WARN", "WARNING"),
        (None, None),
    ],
)
def test_levels(directive: str | None, level: str | None) -> None:
    assert log_level(directive) == level


def test_a_level_that_is_none() -> None:
    with pytest.raises(ConfigError, match="LOG_LEVEL='loud': expected trace, debug"):
        log_level("loud")


@pytest.mark.parametrize("template", ["{{ messages }}", [{"name": "default", "template": "{{ messages }}"}]])
def test_the_chat_template_of_another_file(template: object, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": template}))
    assert words(made(f"--tokenizer-config-path {file}"))["--chat-template"] == "{{ messages }}"


def test_a_file_without_a_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="no chat_template in it"):
        made(f"--tokenizer-config-path {file}")


def test_the_device_is_asked_before_anything_starts(tmp_path: Path) -> None:
    model = look_at_model(tiny_model(tmp_path), None, None)
    assert (model.positions, model.sha, model.export) == (4096, None, None)
    found = look(settle(read([], {}), model=model), {})
    assert found.name == "cpu"
    assert found.chunk_tokens
    assert found.max_num_seqs > 1


def test_a_device_without_prompt_lookup_refuses_it_in_the_launcher_s_words(tmp_path: Path) -> None:
    model = look_at_model(tiny_model(tmp_path), None, None)
    settings = settle(read([], {"SPECULATE": "2"}), model=model)
    assert look(settings, {}).name == "cpu"
    with pytest.raises(ConfigError, match=r"^speculative_config \(here SPECULATE\): the transformers-neuronx device"):
        look(settings, {"NEURONSERVE_BACKEND": "transformers-neuronx"})


@pytest.mark.parametrize(
    ("key", "what"),
    [("medusa_num_heads", "Medusa heads"), ("speculator", "a speculator"), ("n_predict", "an MLP speculator")],
)
def test_a_speculator_in_the_place_of_a_model_is_refused_by_name(tmp_path: Path, key: str, what: str) -> None:
    model = look_at_model(tiny_model(tmp_path, **{key: 3}), None, None)
    with pytest.raises(ConfigError, match=f"is that of {what}, which is not supported: .*--speculate"):
        look(settle(read([], {}), model=model), {})


def test_what_the_device_refuses_is_refused_here(tmp_path: Path) -> None:
    model = look_at_model(tiny_model(tmp_path, architectures=["PhiForCausalLM"]), None, None)
    with pytest.raises(ConfigError, match="PhiForCausalLM"):
        look(settle(read([], {}), model=model), {})


def test_its_words_are_the_launcher_s() -> None:
    settings = settle(read([], {"HF_NUM_CORES": "3"}), model=Model("m", positions=2048))
    said = with_origins("--tensor-parallel-size 3: cores work as one in groups; --dtype auto", settings)
    assert said == "--tensor-parallel-size (here HF_NUM_CORES) 3: cores work as one in groups; --dtype auto"


def test_the_sha_of_a_hub_model_is_its_commit() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert Model("gpt2", f"/cache/models--gpt2/snapshots/{commit}").sha == commit


def test_a_revision_of_a_directory_is_said_to_be_ignored(tmp_path: Path) -> None:
    from neuronserve.server.launcher.main import prepare

    directory = tiny_model(tmp_path)
    asked = read(["--model-id", directory, "--revision", "main"], {})
    made, lines = prepare(settle(asked), asked, {})
    assert "--revision" not in made.argv
    assert f"Revision main ignored for local model at {directory}" in lines


def test_a_variable_that_is_not_used_is_in_the_start_s_lines(tmp_path: Path) -> None:
    from neuronserve.server.launcher.main import prepare

    directory = tiny_model(tmp_path)
    asked = read(["--model-id", directory], {"HF_MODEL_ID": "gpt2"})
    _, lines = prepare(settle(asked), asked, {})
    assert f"HF_MODEL_ID=gpt2 is not used: --model-id={directory} is given" in lines
