"""Our own keys: command line before environment before default."""

from __future__ import annotations

import pytest

from neuronserve.neuron_worker.device.cpu.library import ISA_VARIABLE
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.options import OPTIONS, OTHER_VARIABLES, read


def test_defaults_come_from_the_table() -> None:
    values, warnings = read({}, {})

    assert values == {option.key: option.default for option in OPTIONS}
    assert warnings == []


def test_the_environment_is_read_and_typed() -> None:
    values, _ = read({}, {"NEURONSERVE_CHUNK_TOKENS": "128", "NEURONSERVE_QUANTIZE_HEAD": "True"})

    assert (values["chunk_tokens"], values["quantize_head"]) == (128, True)


def test_the_command_line_wins() -> None:
    values, _ = read({"chunk_tokens": "64"}, {"NEURONSERVE_CHUNK_TOKENS": "128"})

    assert values["chunk_tokens"] == 64


def test_a_blank_variable_is_none() -> None:
    values, _ = read({}, {"NEURONSERVE_BACKEND": " "})

    assert values["backend"] == "auto"


def test_an_unknown_key_is_refused_with_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"neuronserve\.chunk_token: .*did you mean chunk_tokens\?"):
        read({"chunk_token": 1}, {})


def test_an_unknown_variable_is_one_warning() -> None:
    _, warnings = read({}, {"NEURONSERVE_CHUNK_TOKEN": "1"})

    assert len(warnings) == 1
    assert "did you mean NEURONSERVE_CHUNK_TOKENS?" in warnings[0]


def test_a_variable_of_the_devices_own_is_known() -> None:
    assert set(OTHER_VARIABLES) == {ISA_VARIABLE}
    assert read({}, {ISA_VARIABLE: "avx2"})[1] == []


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({"threads": 0}, {}, r"neuronserve\.threads=0: expected a whole number of at least 1"),
        ({}, {"NEURONSERVE_SAMPLING": "chip"}, "NEURONSERVE_SAMPLING='chip': expected auto or device or host"),
    ],
)
def test_a_bad_value_names_where_it_came_from(given: dict[str, object], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(given, environ)
