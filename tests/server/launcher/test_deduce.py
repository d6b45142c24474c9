"""Where each value comes from: a flag, a variable, the export, the other values, a default."""

from __future__ import annotations

import pytest

from neuronserve.server.launcher.checks import idle, remarks
from neuronserve.server.launcher.deduce import Chosen, Settings
from neuronserve.server.launcher.main import settle
from neuronserve.server.launcher.model import Export, Model
from neuronserve.server.launcher.reading import read
from neuronserve.server.launcher.start import table

EXPORT = Export(batch_size=4, sequence_length=2048, num_cores=2, auto_cast_type="bf16")


def settings(flags: str = "", export: Export | None = None, positions: int | None = 2048, **environ: str) -> Settings:
    return settle(read(flags.split(), environ), model=Model("m", positions=positions, export=export))


def said(flags: str = "", export: Export | None = None, **environ: str) -> list[str]:
    return remarks(settings(flags, export, **environ), read(flags.split(), environ))


@pytest.mark.parametrize(
    ("flags", "environ", "export", "expected"),
    [
        ("", {"MAX_BATCH_SIZE": "4"}, EXPORT, Chosen(4, "the export")),
        ("", {"MAX_BATCH_SIZE": "2"}, EXPORT, Chosen(2, "MAX_BATCH_SIZE")),
        ("--max-batch-size 3", {"MAX_BATCH_SIZE": "2"}, None, Chosen(3, "--max-batch-size")),
        ("", {"MAX_BATCH_SIZE": "2"}, None, Chosen(2, "MAX_BATCH_SIZE")),
        ("", {"HF_BATCH_SIZE": "2"}, None, Chosen(2, "HF_BATCH_SIZE")),
        (
            "--max-total-tokens 1024 --max-batch-total-tokens 4096",
            {},
            None,
            Chosen(4, "max_batch_total_tokens / max_total_tokens"),
        ),
        ("--max-batch-total-tokens 5000", {}, None, Chosen(2, "max_batch_total_tokens / max_total_tokens")),
        ("--max-concurrent-requests 4", {}, None, Chosen(None, "the device's default")),
    ],
)
def test_the_batch(flags: str, environ: dict[str, str], export: Export | None, expected: Chosen) -> None:
    assert settings(flags, export, **environ)["max_num_seqs"] == expected


@pytest.mark.parametrize(
    ("flags", "environ", "positions", "export", "expected"),
    [
        ("--max-total-tokens 512", {"MAX_TOTAL_TOKENS": "300"}, 2048, None, Chosen(512, "--max-total-tokens")),
        ("", {"MAX_TOTAL_TOKENS": "512"}, 2048, EXPORT, Chosen(512, "MAX_TOTAL_TOKENS")),
        ("", {"HF_SEQUENCE_LENGTH": "512"}, 2048, None, Chosen(512, "HF_SEQUENCE_LENGTH")),
        ("", {}, 8192, EXPORT, Chosen(2048, "the export")),
        (
            "--max-batch-size 4 --max-batch-total-tokens 4096",
            {},
            2048,
            None,
            Chosen(1024, "max_batch_total_tokens / max_num_seqs"),
        ),
        ("", {}, 1024, None, Chosen(1024, "the model's config.json")),
        ("", {}, 131072, None, Chosen(4096, "default")),
        ("", {}, None, None, Chosen(4096, "default")),
        # An input that the default does not hold: as much again for the answer, as far as the model goes.
        ("", {"MAX_INPUT_LENGTH": "6000"}, 131072, None, Chosen(12000, "2 x max_input_tokens")),
        ("--max-input-tokens 4096", {}, None, None, Chosen(8192, "2 x max_input_tokens")),
        ("--max-input-tokens 6000", {}, 8192, None, Chosen(8192, "the model's config.json")),
        ("--max-input-tokens 4095", {}, 131072, None, Chosen(4096, "default")),
        (
            "--max-input-tokens 6000 --max-batch-total-tokens 8192",
            {},
            131072,
            None,
            Chosen(8192, "max_batch_total_tokens"),
        ),
    ],
)
def test_the_total(
    flags: str, environ: dict[str, str], positions: int | None, export: Export | None, expected: Chosen
) -> None:
    assert settings(flags, export, positions, **environ)["max_total_tokens"] == expected


def test_requests_may_be_shorter_than_the_export() -> None:
    found = settings(export=EXPORT, MAX_TOTAL_TOKENS="512")

    assert found["max_model_len"] == Chosen(2048, "the export")
    assert found["max_input_tokens"] == Chosen(511, "max_total_tokens - 1")
    assert said(export=EXPORT, MAX_TOTAL_TOKENS="512") == [
        "requests have up to 512 tokens (MAX_TOTAL_TOKENS), the export's graphs 2048"
    ]


def test_a_batch_may_be_smaller_than_the_export() -> None:
    found = settings("--max-batch-size 2", export=EXPORT)

    assert found["max_num_seqs"] == Chosen(2, "--max-batch-size")
    assert said("--max-batch-size 2", EXPORT) == [
        "--max-batch-size=2 is served, and the export's batch size is 4: a chip compiles graphs for 2; leave "
        "--max-batch-size out to have the export's"
    ]
    assert said("--max-batch-size 4", EXPORT) == []


def test_cores_are_the_export_s_where_fewer_are_asked_for() -> None:
    found = settings(export=EXPORT, HF_NUM_CORES="1")

    assert found["num_cores"] == Chosen(2, "the export")
    assert said(export=EXPORT, HF_NUM_CORES="1") == [
        "HF_NUM_CORES=1 is the least: the export runs on the 2 cores it was made for"
    ]
    assert said(export=EXPORT, HF_NUM_CORES="2") == []


def test_the_export_says_the_rest() -> None:
    found = settings(export=EXPORT)
    assert found["num_cores"] == Chosen(2, "the export")
    assert found["dtype"] == Chosen("bfloat16", "the export")


def test_an_export_that_says_little_leaves_the_rest_open() -> None:
    found = settings(export=Export(batch_size=4), HF_NUM_CORES="8")
    assert found["max_num_seqs"] == Chosen(4, "the export")
    assert found["num_cores"] == Chosen(8, "HF_NUM_CORES")
    assert found["dtype"] == Chosen("auto", "default")


def test_what_is_left_over_is_said() -> None:
    assert said("--max-total-tokens 1024 --max-batch-total-tokens 5000") == [
        "max_batch_total_tokens=5000 is 4 sequences of 1024 tokens, and 904 over"
    ]


def test_the_table_says_where_each_value_came_from() -> None:
    found = settings("--max-total-tokens 1024 --api-key secret", export=None, MAX_BATCH_SIZE="2", HF_TOKEN="hf_secret")

    lines = [line.split() for line in table(found, max_num_seqs=2)]

    assert ["max_total_tokens", "1024", "--max-total-tokens"] in lines
    assert ["max_num_seqs", "2", "MAX_BATCH_SIZE"] in lines
    assert ["max_input_tokens", "1023", "max_total_tokens", "-", "1"] in lines
    assert ["api_key", "(not", "shown)", "--api-key"] in lines
    assert "secret" not in str(lines)


def test_the_device_s_default_is_shown_as_a_number() -> None:
    lines = [line.split() for line in table(settings(), max_num_seqs=8)]
    assert ["max_num_seqs", "8", "the", "device's", "default"] in lines


def test_what_has_no_effect_is_named() -> None:
    asked = read(["--cuda-memory-fraction", "0.9", "--trust-remote-code"], {"TRUST_REMOTE_CODE": "false"})
    assert idle(asked) == [
        "--trust-remote-code has no effect: no code of a model is run here",
        "--cuda-memory-fraction has no effect: it is for GPUs",
    ]
    assert idle(read([], {"TRUST_REMOTE_CODE": "false"})) == []
