"""The table of arguments against TGI's list, and what becomes of each."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.launcher.arguments import INT8_NAMES, OTHER_QUANTIZATIONS
from neuronserve.server.launcher.checks import check_asked, idle
from neuronserve.server.launcher.main import main, settle
from neuronserve.server.launcher.model import Model
from neuronserve.server.launcher.reading import TABLE, parser, read

OF_TGI = [
    "--model-id",
    "--revision",
    "--validation-workers",
    "--sharded",
    "--num-shard",
    "--quantize",
    "--speculate",
    "--dtype",
    "--kv-cache-dtype",
    "--trust-remote-code",
    "--max-concurrent-requests",
    "--max-best-of",
    "--max-stop-sequences",
    "--max-top-n-tokens",
    "--max-input-tokens",
    "--max-input-length",
    "--max-total-tokens",
    "--max-batch-prefill-tokens",
    "--max-batch-total-tokens",
    "--max-batch-size",
    "--waiting-served-ratio",
    "--max-waiting-tokens",
    "--cuda-graphs",
    "--cuda-memory-fraction",
    "--disable-custom-kernels",
    "--rope-scaling",
    "--rope-factor",
    "--hostname",
    "--port",
    "--prometheus-port",
    "--shard-uds-path",
    "--master-addr",
    "--master-port",
    "--huggingface-hub-cache",
    "--weights-cache-override",
    "--json-output",
    "--otlp-endpoint",
    "--otlp-service-name",
    "--cors-allow-origin",
    "--api-key",
    "--watermark-gamma",
    "--watermark-delta",
    "--ngrok",
    "--ngrok-authtoken",
    "--ngrok-edge",
    "--tokenizer-config-path",
    "--disable-grammar-support",
    "--env",
    "--version",
    "--max-client-batch-size",
    "--lora-adapters",
    "--usage-stats",
    "--payload-limit",
    "--enable-prefill-logprobs",
    "--graceful-termination-timeout",
    "--messages-api-enabled",
]
SHORT = ("-p", "-e", "-g", "-V")

REFUSED = {
    "--sharded true": "Sharding is not supported.",
    "--num-shard 2": "Sharding is not supported.",
    "--kv-cache-dtype fp8_e5m2": "the cache is never stored as fp8",
    "--rope-scaling dynamic": "write `rope_scaling` into the model's config.json",
    "--rope-factor 2.0": "write `rope_scaling` into the model's config.json",
    "--lora-adapters a,b=c": "adapters are not served",
    "--ngrok": "no tunnel is opened",
    "--ngrok-authtoken t": "no tunnel is opened",
    "--ngrok-edge e": "no tunnel is opened",
}


def test_every_argument_of_tgi_is_there() -> None:
    known = set(parser()._option_string_actions)
    assert {*OF_TGI, *SHORT} <= known
    assert known <= {*OF_TGI, *SHORT, "--help", "-h"}


def test_each_has_the_variable_of_its_name() -> None:
    flags = [argument for argument in TABLE if argument.has_flag]
    assert [argument.flag for argument in flags if argument.name.upper() not in argument.variables] == []


def test_a_variable_has_one_meaning() -> None:
    names = [name for argument in TABLE for name in argument.variables]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("flags", REFUSED)
def test_what_is_not_served_is_refused_by_name(flags: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_asked(read(flags.split(), {}))
    assert str(refusal.value).startswith(flags.split()[0])
    assert REFUSED[flags] in str(refusal.value)


def test_the_table_of_refusals_is_whole() -> None:
    refused = {argument.flag for argument in TABLE if argument.fate == "refused" and argument.has_flag}
    assert {flags.split()[0] for flags in REFUSED} == refused


def test_a_refusal_shows_no_secret() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_asked(read([], {"NGROK_AUTHTOKEN": "hush"}))
    assert "hush" not in str(refusal.value)


def test_values_that_ask_for_what_happens_anyway_are_taken() -> None:
    environ = {"NUM_SHARD": "1", "SHARDED": "false", "SPECULATE": "0", "NGROK": "false", "SM_ON_TASK": "generate"}
    check_asked(read([], environ))


def test_what_has_no_effect_says_so() -> None:
    idles = [argument for argument in TABLE if argument.fate == "no effect"]
    environ = {argument.variables[0]: "true" if argument.is_switch else "1" for argument in idles}

    lines = idle(read([], environ))

    assert [line.split(" has no effect: ")[0] for line in lines] == [argument.variables[0] for argument in idles]
    assert all(line.split(" has no effect: ")[1] for line in lines)


def test_a_cluster_may_use_such_a_name_for_itself() -> None:
    asked = read([], {"PROMETHEUS_PORT": "tcp://10.0.0.7:9090"})
    assert idle(asked) == ["PROMETHEUS_PORT has no effect: metrics are on the server's own port, at /metrics"]


@pytest.mark.parametrize("name", INT8_NAMES)
def test_the_names_of_int8(name: str) -> None:
    assert settle(read(["--quantize", name], {}), model=Model("m")).value("quantize") == "int8"


@pytest.mark.parametrize("name", OTHER_QUANTIZATIONS)
def test_other_methods_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"QUANTIZE='{name}': this engine has int8 weights alone") as refusal:
        read([], {"QUANTIZE": name})
    assert "eetq" in str(refusal.value)


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_spellings_of_a_type(spelling: str, dtype: str) -> None:
    assert settle(read([], {"HF_AUTO_CAST_TYPE": spelling}), model=Model("m")).value("dtype") == dtype


def test_a_type_that_is_none() -> None:
    with pytest.raises(ConfigError, match="HF_AUTO_CAST_TYPE='int4': expected float16"):
        read([], {"HF_AUTO_CAST_TYPE": "int4"})


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN"])
def test_spellings_of_the_token(variable: str) -> None:
    assert read([], {variable: "hf_x", "HF_SOMETHING": "y"}).text("hf_token") == "hf_x"


def test_the_hub_s_directory_under_its_newer_name_wins() -> None:
    environ = {"HF_HUB_CACHE": "/mine", "HUGGINGFACE_HUB_CACHE": "/data"}
    assert read([], environ).text("huggingface_hub_cache") == "/mine"


def test_a_blank_variable_is_not_set() -> None:
    assert read([], {"HF_TOKEN": "", "MAX_TOTAL_TOKENS": " ", "HUGGING_FACE_HUB_TOKEN": "hf_x"}).values.keys() == {
        "hf_token"
    }


@pytest.mark.parametrize("variable", ["MODEL_ID", "HF_MODEL_ID", "SM_ON_MODEL"])
def test_spellings_of_the_model(variable: str) -> None:
    assert read([], {variable: "gpt2"}).text("model_id") == "gpt2"
    assert read(["--model-id", "mine"], {variable: "gpt2"}).text("model_id") == "mine"


@pytest.mark.parametrize(
    ("flags", "environ", "lines"),
    [
        ("--model-id mine", {"HF_MODEL_ID": "gpt2"}, ["HF_MODEL_ID=gpt2 is not used: --model-id=mine is given"]),
        ("--model-id mine", {"MODEL_ID": "gpt2"}, []),  # the flag's own
        ("--model-id mine", {"HF_MODEL_ID": "mine"}, []),
        ("--port 9000", {"PORT": "80", "SM_ON_PORT": "1"}, ["SM_ON_PORT=1 is not used: --port=9000 is given"]),
        ("", {"PORT": "80", "SM_ON_PORT": "9000"}, ["SM_ON_PORT=9000 is not used: PORT=80 is given"]),
        ("--api-key a", {"VLLM_API_KEY": "b"}, ["VLLM_API_KEY is not used: --api-key is given"]),
        ("", {"HF_TOKEN": "a", "HF_API_TOKEN": "b"}, ["HF_API_TOKEN is not used: HF_TOKEN is given"]),
    ],
)
def test_a_variable_that_gives_way_is_named(flags: str, environ: dict[str, str], lines: list[str]) -> None:
    assert list(read(flags.split(), environ).unused) == lines


def test_a_command_line_is_read_as_its_writers_write_it() -> None:
    asked = read(
        ["--max_total_tokens=100", "-p", "80", "--json-output", "--cors-allow-origin", "a", "--cors-allow-origin=b"], {}
    )
    assert {name: given.value for name, given in asked.values.items()} == {
        "max_total_tokens": 100,
        "port": 80,
        "json_output": True,
        "cors_allow_origin": ("a", "b"),
    }


def test_what_stands_behind_two_dashes_is_the_server_s() -> None:
    asked = read(["--port", "80", "--", "--block-size", "32"], {})
    assert asked.server_arguments == ("--block-size", "32")


def test_an_argument_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        read(["--max-batch-sizes", "4"], {})
    assert exit.value.code == 2
    assert "--max-batch-sizes" in capsys.readouterr().err


def test_no_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_ID", "HF_MODEL_ID", "SM_ON_MODEL"):
        monkeypatch.delenv(name, raising=False)
    assert main([]) == 1
    printed = capsys.readouterr()
    assert printed.err == (
        'Error: ArgumentValidation("No model id provided ! Either specify it using --model-id cmdline or MODEL_ID env '
        'var")\n'
    )
    assert printed.out == ""


def test_a_directory_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-id", "/nowhere/model"]) == 1
    assert "model_id='/nowhere/model': no such directory" in capsys.readouterr().err


def test_help_is_quick_and_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys\nfrom neuronserve.server.launcher.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'vllm', 'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    # The processor's time, which a busy machine does not stretch.
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = os.times()

    assert done.returncode == 0, done.stderr
    assert {flag for flag in OF_TGI if flag not in done.stdout} == set()
    assert {name for argument in TABLE for name in argument.variables if name not in done.stdout} == set()
    assert after.children_user - before.children_user < 2


def test_a_refusal_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys\nfrom neuronserve.server.launcher.main import main\n"
        "assert main(['--model-id', '/nowhere', '--max-total-tokens', '9']) == 1\n"
        "sys.exit(any(name in sys.modules for name in ('vllm', 'torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_env_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--env"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Runtime environment:\n")
    assert "vllm                  0.32." in printed


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_release(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([flag])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"text-generation-launcher {version('neuronserve')}\n"


def test_compressed_tensors_are_refused_by_name() -> None:
    assert "compressed-tensors" in OTHER_QUANTIZATIONS
