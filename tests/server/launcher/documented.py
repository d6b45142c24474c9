"""What the documents of TGI on static batches tell their readers to type, word for word, and what they promise."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from neuronserve.server.launcher.eras import BACKEND_PAGE, DOCKER_README, SAGEMAKER_BLOG, XLA_README, Era, Limits
from neuronserve.server.launcher.model import Export, Model

GPT2 = """
docker run -p 8080:80 \
       --device=/dev/neuron0 \
       neuronx-tgi:<version> \
       --model-id optimum/gpt2-neuronx-bs16 \
       --max-concurrent-requests 16 \
       --max-input-length 512 \
       --max-total-tokens 1024 \
       --max-batch-prefill-tokens 8192 \
       --max-batch-total-tokens 16384
"""
GPT2_COMPILED_LOCALLY = """
docker run -p 8080:80 \
       -v $(pwd)/data:/data \
       --device=/dev/neuron0 \
       neuronx-tgi:0.0.11.dev0 \
       --model-id /data/neuron_gpt2_bs16 \
       --max-concurrent-requests 16 \
       --max-input-length 512 \
       --max-total-tokens 1024 \
       --max-batch-prefill-tokens 8192 \
       --max-batch-total-tokens 16384
"""
LLAMA3 = """
docker run -p 8080:80 \
       -v $(pwd)/data:/data \
       --device=/dev/neuron0 \
       --device=/dev/neuron1 \
       --device=/dev/neuron2 \
       --device=/dev/neuron3 \
       -e HF_TOKEN=${HF_TOKEN} \
       -e HF_AUTO_CAST_TYPE="fp16" \
       -e HF_NUM_CORES=8 \
       ghcr.io/huggingface/text-generation-inference:<VERSION>-neuron \
       --model-id meta-llama/Meta-Llama-3-8B \
       --max-batch-size 1 \
       --max-input-length 3164 \
       --max-total-tokens 4096
"""
LOCAL_EXPORT = """
docker run -p 8080:80 \
       -v $(pwd)/data:/data \
       --device=/dev/neuron0 \
       --device=/dev/neuron1 \
       ghcr.io/huggingface/text-generation-inference:<VERSION>-neuron \
       --model-id /data/<neuron_model_path>
"""
HUB_EXPORT = """
docker run -p 8080:80 \
       -v $(pwd)/data:/data \
       --device=/dev/neuron0 \
       --device=/dev/neuron1 \
       -e HF_TOKEN=${HF_TOKEN} \
       ghcr.io/huggingface/text-generation-inference:<VERSION>-neuron \
       --model-id <organization>/<neuron-model>
"""
MISTRAL_ON_XLA = """
docker run -p 8080:80 \
       --net=host --privileged \
       -v $(pwd)/data:/data \
       -e HF_TOKEN=${HF_TOKEN} \
       -e HF_BATCH_SIZE=1 \
       -e HF_SEQUENCE_LENGTH=1024 \
       ghcr.io/huggingface/tpu-tgi:latest \
       --model-id mistralai/Mistral-7B-v0.1 \
       --max-concurrent-requests 1 \
       --max-input-length 512 \
       --max-total-tokens 1024 \
       --max-batch-prefill-tokens 512 \
       --max-batch-total-tokens 1024
"""

batch_size = 4
sequence_length = 2048
ZEPHYR = {
    'HF_MODEL_ID': "aws-neuron/zephyr-7b-seqlen-2048-bs-4-cores-2",
    'MAX_CONCURRENT_REQUESTS': json.dumps(batch_size),
    'MAX_INPUT_LENGTH': json.dumps(1512),
    'MAX_TOTAL_TOKENS': json.dumps(sequence_length),
    'MAX_BATCH_PREFILL_TOKENS': json.dumps(int(sequence_length*batch_size / 2)),
    'MAX_BATCH_TOTAL_TOKENS': json.dumps(sequence_length*batch_size),
}  # fmt: skip
"""The tutorial's `config`, as its Python makes it."""

LLAMA3_ON_SAGEMAKER = {
    "HF_MODEL_ID": "meta-llama/Meta-Llama-3-8B",
    "HF_NUM_CORES": "24",
    "HF_AUTO_CAST_TYPE": "bf16",
    "MAX_BATCH_SIZE": "4",
    "MAX_INPUT_TOKENS": "4000",
    "MAX_TOTAL_TOKENS": "4096",
    "HF_TOKEN": "hf_secret",
    "MESSAGES_API_ENABLED": "true",
    "MAX_CONCURRENT_REQUESTS": "512",
}
INFERENCE_ENDPOINT = {
    "MAX_BATCH_PREFILL_TOKENS": "2048",
    "MAX_INPUT_LENGTH": "1024",
    "MAX_TOTAL_TOKENS": "1512",
    "MODEL_ID": "/repository",
}

_WITH_VALUE = ("-p", "-v", "-e")


@dataclass(frozen=True)
class Typed:
    argv: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)


def docker_run(line: str) -> Typed:
    """The service's arguments and the variables of a `docker run` line; `${…}` is what an empty shell makes of it."""
    words = shlex.split(line)[2:]
    environ: dict[str, str] = {}
    while words[0].startswith("-"):
        word = words.pop(0)
        value = words.pop(0) if word in _WITH_VALUE else ""
        if word == "-e":
            name, _, text = value.partition("=")
            environ[name] = "" if text.startswith("${") else text
    return Typed(words[1:], environ)


@dataclass(frozen=True)
class Promise:
    """A block of a document, the model behind it, and the settings its text promises."""

    document: Era | None
    typed: Typed
    model: Model
    settings: dict[str, Any]
    limits: Limits | None = None  # for the document's own rules
    is_sagemaker: bool = False


_GPT2 = {
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "max_input_tokens": 512,
    "max_total_tokens": 1024,
    "max_batch_prefill_tokens": 8192,
    "max_concurrent_requests": 16,
}
_GPT2_LIMITS = Limits(16, 1024, 16, None, 512, 1024, 8192, 16384)
_EXPORTED = Export(batch_size=4, sequence_length=4096, num_cores=2, auto_cast_type="bf16")
_FROM_THE_EXPORT = {
    "max_num_seqs": 4,
    "max_model_len": 4096,
    "max_total_tokens": 4096,
    "max_input_tokens": 4095,
    "num_cores": 2,
    "dtype": "bfloat16",
    "max_concurrent_requests": 128,
}
_ZEPHYR = {
    "model_id": "aws-neuron/zephyr-7b-seqlen-2048-bs-4-cores-2",
    "max_num_seqs": 4,
    "max_model_len": 2048,
    "max_input_tokens": 1512,
    "max_total_tokens": 2048,
    "max_batch_prefill_tokens": 4096,
    "max_concurrent_requests": 4,
    "port": 8080,
}

PROMISES: dict[str, Promise] = {
    "the GPT-2 line": Promise(
        DOCKER_README, docker_run(GPT2), Model("optimum/gpt2-neuronx-bs16", positions=1024), _GPT2, _GPT2_LIMITS
    ),
    "the GPT-2 line, its export known": Promise(
        DOCKER_README, docker_run(GPT2), Model("gpt2", positions=1024, export=Export(16, 1024)), _GPT2, _GPT2_LIMITS
    ),
    "the GPT-2 line of a local export": Promise(
        DOCKER_README, docker_run(GPT2_COMPILED_LOCALLY), Model("/data/neuron_gpt2_bs16", positions=1024), _GPT2
    ),
    "a standard model of the hub": Promise(
        BACKEND_PAGE,
        docker_run(LLAMA3),
        Model("meta-llama/Meta-Llama-3-8B", positions=8192),
        {
            "max_num_seqs": 1,
            "max_model_len": 4096,
            "max_input_tokens": 3164,
            "num_cores": 8,
            "dtype": "float16",
            "hf_token": None,
            "port": 3000,
        },
        Limits(1, 4096, None, 1, 3164, 4096),
    ),
    "a model exported to a local path": Promise(
        BACKEND_PAGE, docker_run(LOCAL_EXPORT), Model("/data/m", positions=8192, export=_EXPORTED), _FROM_THE_EXPORT
    ),
    "a neuron model of the hub": Promise(
        BACKEND_PAGE, docker_run(HUB_EXPORT), Model("o/m", positions=8192, export=_EXPORTED), _FROM_THE_EXPORT
    ),
    "Mistral on XLA": Promise(
        XLA_README,
        docker_run(MISTRAL_ON_XLA),
        Model("mistralai/Mistral-7B-v0.1", positions=32768),
        {
            "max_num_seqs": 1,
            "max_model_len": 1024,
            "max_input_tokens": 512,
            "max_batch_prefill_tokens": 512,
            "max_concurrent_requests": 1,
        },
        Limits(1, 1024, 1, None, 512, 1024, 512, 1024),
    ),
    "Zephyr's config": Promise(
        SAGEMAKER_BLOG,
        Typed(["serve"], ZEPHYR),
        Model("aws-neuron/zephyr-7b-seqlen-2048-bs-4-cores-2", positions=32768),
        _ZEPHYR,
        Limits(4, 2048, 4, None, 1512, 2048, 4096, 8192),
        is_sagemaker=True,
    ),
    "Zephyr's config, its export known": Promise(
        SAGEMAKER_BLOG,
        Typed(["serve"], ZEPHYR),
        Model("zephyr", positions=32768, export=Export(4, 2048, 2, "bf16")),
        {**_ZEPHYR, "num_cores": 2, "dtype": "bfloat16"},
        is_sagemaker=True,
    ),
    "Llama 3 on SageMaker": Promise(
        None,
        Typed(["serve"], LLAMA3_ON_SAGEMAKER),
        Model("meta-llama/Meta-Llama-3-8B", positions=8192),
        {
            "max_num_seqs": 4,
            "max_model_len": 4096,
            "max_input_tokens": 4000,
            "num_cores": 24,
            "dtype": "bfloat16",
            "max_concurrent_requests": 512,
            "hf_token": "hf_secret",
            "port": 8080,
        },
        is_sagemaker=True,
    ),
    "an inference endpoint": Promise(
        None,
        Typed([], {**INFERENCE_ENDPOINT, "PORT": "80"}),
        Model("/repository", positions=4096),
        {
            "model_id": "/repository",
            "max_num_seqs": None,
            "max_model_len": 1512,
            "max_input_tokens": 1024,
            "max_batch_prefill_tokens": 2048,
            "port": 80,
        },
    ),
}
