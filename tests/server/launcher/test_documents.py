"""Every command line and variable block of the documents yields the settings that the documents promise."""

from __future__ import annotations

import re

import pytest

from neuronserve.server.launcher import sagemaker
from neuronserve.server.launcher.command import Device, command
from neuronserve.server.launcher.deduce import Settings
from neuronserve.server.launcher.eras import ERAS, Era, Limits
from neuronserve.server.launcher.main import settle
from neuronserve.server.launcher.reading import read

from . import documented
from .documented import PROMISES, Promise

CPU = Device(max_num_seqs=8, chunk_tokens=256, name="cpu")


def settled(promise: Promise) -> Settings:
    words, is_sagemaker = sagemaker.without_serve(promise.typed.argv)
    assert is_sagemaker is promise.is_sagemaker
    return settle(read(words, promise.typed.environ), is_sagemaker, promise.model)


@pytest.mark.parametrize("name", PROMISES)
def test_a_block_of_a_document_gives_what_it_promises(name: str) -> None:
    promise = PROMISES[name]
    settings = settled(promise)

    assert {key: settings.value(key) for key in promise.settings} == promise.settings


@pytest.mark.parametrize("name", PROMISES)
def test_and_reaches_the_engine(name: str) -> None:
    promise = PROMISES[name]
    made = command(settled(promise), CPU, promise.typed.environ)
    words = [word for word in made.argv[2:] if word != "--enable-auto-tool-choice"]
    given = dict(zip(words[::2], words[1::2], strict=True))

    assert made.argv[0] == "serve"
    assert given["--max-model-len"] == str(promise.settings["max_model_len"])
    assert given.get("--max-num-seqs", "None") == str(promise.settings["max_num_seqs"])
    assert given["--tensor-parallel-size"] == str(promise.settings.get("num_cores", 1))
    assert given["--dtype"] == promise.settings.get("dtype", "auto")
    assert f'"max_input_tokens": {promise.settings["max_input_tokens"]}' in given["--additional-config"]
    assert '"any_model_name": true' in given["--additional-config"]


@pytest.mark.parametrize("name", [name for name, promise in PROMISES.items() if promise.limits])
def test_each_document_keeps_its_own_rules(name: str) -> None:
    promise = PROMISES[name]
    assert promise.document is not None
    assert promise.limits is not None

    assert promise.document.broken(promise.limits) == []


def test_the_documents_disagree() -> None:
    """Each example under each document's rules: what one promises, another forbids."""
    broken = {
        (name, era.document): {rule.limit for rule in era.broken(promise.limits)}
        for name, promise in PROMISES.items()
        for era in ERAS
        if promise.limits is not None and promise.document is not era
    }
    found = {key: limits for key, limits in broken.items() if limits}

    xla, blog, readme, page = (
        next(era.document for era in ERAS if word in era.document) for word in ("XLA", "tutorial", "README of", "page")
    )
    assert found[("Zephyr's config", xla)] == {"batch_prefill_tokens"}  # 4096, not 4 x 1512
    assert found[("Zephyr's config", page)] == {"batch_prefill_tokens"}
    assert ("Zephyr's config", readme) not in found
    assert ("the GPT-2 line", xla) not in found
    assert ("the GPT-2 line", blog) not in found


@pytest.mark.parametrize("era", ERAS, ids=lambda era: era.document)
def test_a_rule_that_is_broken_is_found(era: Era) -> None:
    wrong = Limits(
        batch_size=4,
        max_length=100,
        concurrent_requests=5,
        max_batch_size=5,
        input_length=101,
        total_tokens=99,
        batch_prefill_tokens=401,
        batch_total_tokens=399,
    )
    assert era.broken(wrong) == list(era.rules)


def test_an_input_as_long_as_the_total() -> None:
    """Allowed by the tutorial alone; TGI's own launcher never started with it."""
    equal = Limits(batch_size=4, max_length=2048, input_length=2048, total_tokens=2048)
    assert [era.document for era in ERAS if not era.broken(equal)] == [
        "the tutorial of Inferentia2 on SageMaker, image 0.0.17"
    ]


def test_the_reader_of_docker_lines_reads_them() -> None:
    typed = documented.docker_run(documented.LLAMA3)
    assert typed.environ == {"HF_TOKEN": "", "HF_AUTO_CAST_TYPE": "fp16", "HF_NUM_CORES": "8"}
    assert typed.argv[:2] == ["--model-id", "meta-llama/Meta-Llama-3-8B"]
    assert re.fullmatch(r"(--\S+ \S+ ?)+", " ".join(typed.argv))
