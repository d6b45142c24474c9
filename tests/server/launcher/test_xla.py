"""The XLA/TPU image's variables start the same server."""

from __future__ import annotations

from neuronserve.server.launcher.checks import idle
from neuronserve.server.launcher.main import settle
from neuronserve.server.launcher.model import Model
from neuronserve.server.launcher.reading import read

MODEL = Model("m", positions=4096)


def test_its_variables() -> None:
    environ = {"HF_BATCH_SIZE": "2", "HF_SEQUENCE_LENGTH": "1024", "QUANTIZATION": "1"}
    settings = settle(read([], environ), model=MODEL)

    assert settings.value("max_num_seqs") == 2
    assert settings.value("max_model_len") == 1024
    assert settings.value("quantize") == "int8"


def test_its_newer_names() -> None:
    settings = settle(
        read(["--quantize", "jetstream_int8"], {"MAX_BATCH_SIZE": "2", "MAX_TOTAL_TOKENS": "1024"}), model=MODEL
    )
    assert [settings.value(name) for name in ("max_num_seqs", "max_model_len", "quantize")] == [2, 1024, "int8"]


def test_what_it_did_while_it_started() -> None:
    lines = idle(read([], {"SKIP_WARMUP": "1", "DBG_COMPILE": "1", "JETSTREAM_PT_DISABLE": "0"}))
    assert [line.split()[0] for line in lines] == ["SKIP_WARMUP", "DBG_COMPILE"]


def test_quantization_that_is_off() -> None:
    assert settle(read([], {"QUANTIZATION": "0"}), model=MODEL).value("quantize") == "none"
