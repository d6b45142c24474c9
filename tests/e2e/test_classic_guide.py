"""The classic guide, word for word but for the model: its scripts as files, its command lines through a real shell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..tools.random_model import random_eagle_head, random_llama
from ..tools.server import PATIENCE, Server, clean_environment, free_port

SCRIPT = """\
from vllm import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

# Create an LLM.
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-8B-Instruct",
    max_num_seqs=8,
    # The max_model_len and block_size arguments are required to be same as max sequence length,
    # when targeting neuron device. Currently, this is a known limitation in continuous batching
    # support in transformers-neuronx.
    max_model_len=128,
    block_size=128,
    # The device can be automatically detected when AWS Neuron SDK is installed.
    # The device argument can be either unspecified for automated detection, or explicitly assigned.
    device="neuron",
    tensor_parallel_size=2)

# Generate texts from the prompts. The output is a list of RequestOutput objects
# that contain the prompt, generated text, and other information.
outputs = llm.generate(prompts, sampling_params)
# Print the outputs.
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""

# The comma after block_size is missing in the guide.
WITH_OVERRIDE = SCRIPT.replace(
    "tensor_parallel_size=2)",
    """tensor_parallel_size=32,
    #Override or update the NeuronConfig
    override_neuron_config={"shard_over_sequence":True})""",
)

SPECULATIVE = """\
from vllm import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

# Create an LLM.
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-70B-Instruct",
    speculative_model="meta-llama/Llama-3.2-1B-Instruct",
    # The max_model_len, speculative_max_model_len, and block_size arguments are required to be same as max sequence length,
    # when targeting neuron device. Currently, this is a known limitation in continuous batching
    # support in transformers-neuronx.
    max_model_len=128,
    block_size=128,
    speculative_max_model_len=128,
    dtype="bfloat16",
    max_num_seqs=4,
    num_speculative_tokens=4,
    # The device can be automatically detected when AWS Neuron SDK is installed.
    # The device argument can be either unspecified for automated detection, or explicitly assigned.
    device="neuron",
    tensor_parallel_size=32,
    use_v2_block_manager=True,
)

outputs = llm.generate(prompts, sampling_params)
# Print the outputs.
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""  # noqa: E501

TARGET = "meta-llama/Meta-Llama-3.1-70B-Instruct"
DRAFT = "meta-llama/Llama-3.2-1B-Instruct"
MODEL = "meta-llama/Meta-Llama-3.1-8B-Instruct"
SERVE = f"vllm serve {MODEL} --tensor-parallel-size 32 --max-num-seqs 4 --max-model-len 2048 --block-size 8"
API_SERVER = (
    f"python3 -m vllm.entrypoints.openai.api_server --model {MODEL} --tensor-parallel-size 32 --max-num-seqs 4 "
    r"--max-model-len 2048 --block-size 8 --override-neuron-config {\"shard_over_sequence\":\"True\"}"
)


@pytest.fixture(scope="module")
def llama(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"), tokenizer_from=smollm2)


def run_script(text: str, models: dict[str, Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """`models`: what stands for each of the guide's."""
    for name, model in models.items():
        text = text.replace(name, str(model))
    script = folder / "guide.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=folder,
        timeout=PATIENCE,
        check=False,
    )


def check_printed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^Prompt: '(.*)', Generated text: (.+)$", done.stdout, re.MULTILINE)
    assert [prompt for prompt, _ in printed] == [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    assert all(len(text) > 2 for _, text in printed)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", [SCRIPT, WITH_OVERRIDE], ids=["plain", "override"])
def test_offline_script(script: str, smollm2: Path, tmp_path: Path) -> None:
    """Nine heads on two cores, or on 32; the script has no `__main__` guard."""
    check_printed(run_script(script, {MODEL: smollm2}, tmp_path))


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_speculative_script(method: str, smollm2: Path, llama: Path, tmp_path: Path) -> None:
    """The same for both: `is_eagle` in a config.json says what it is, and its path nothing."""
    draft = llama if method == "draft_model" else random_eagle_head(tmp_path / "head", smollm2)
    done = run_script(SPECULATIVE, {TARGET: smollm2, DRAFT: draft}, tmp_path)
    check_printed(done)
    assert f"SpeculativeConfig(method='{method}', model='{draft}', num_spec_tokens=4)" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The guide's second command line with its override, as bash understands it. Only the port is ours."""
    port = free_port()
    command = f"{API_SERVER.replace(MODEL, str(llama))} --port {port}"
    server = Server(command, port, tmp_path_factory.mktemp("guide") / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


def body(llama: Path, **more: object) -> dict[str, object]:
    return {"model": str(llama), "prompt": "The capital of France is", "temperature": 0, **more}


class TestApiServer:
    """In this order: the last test ends the server."""

    def test_it_serves(self, server: Server, llama: Path) -> None:
        answer = httpx.post(f"{server.url}/v1/completions", json=body(llama, max_tokens=5), timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"] == {**answer.json()["usage"], "prompt_tokens": 5, "completion_tokens": 5}

    def test_the_log_says_what_the_flags_did(self, server: Server) -> None:
        assert "4 sequences of up to 2048 tokens" in server.output
        assert "shard_over_sequence" in server.output
        assert "Traceback" not in server.output

    def test_the_first_command_line_meets_a_busy_port(self, server: Server, llama: Path, tmp_path: Path) -> None:
        command = f"{SERVE.replace(MODEL, str(llama))} --port {server.port}"
        second = Server(command, server.port, tmp_path / "log")
        try:
            assert second.wait() == 1
        finally:
            second.close()
        assert second.output.splitlines()[-1].startswith(f"error: cannot listen on 0.0.0.0:{server.port}")
        assert "another --port" in second.output
        assert "Traceback" not in second.output
        assert server.process.poll() is None

    def test_sigterm_lets_streams_finish(self, server: Server, llama: Path) -> None:
        num_tokens = 2000
        asked = body(llama, max_tokens=num_tokens, stream=True, ignore_eos=True, return_token_ids=True)
        received: list[list[int]] = []
        begun = threading.Barrier(3)

        def read() -> None:
            tokens: list[int] = []
            with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=PATIENCE) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if not tokens:
                        begun.wait(PATIENCE)
                    tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
            received.append(tokens)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        begun.wait(PATIENCE)
        assert server.terminate() == 0
        for reader in readers:
            reader.join(PATIENCE)

        assert [len(tokens) for tokens in received] == [num_tokens] * 2
        assert received[0] == received[1]
