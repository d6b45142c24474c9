"""Settings as shells and JSON leave them."""

from __future__ import annotations

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.values import boolean, integer, list_of, number, one_of, one_or_list_of, parse, positive


@pytest.mark.parametrize("value", [True, "True", "true", " TRUE ", 1, "1", "yes", "on"])
def test_true_in_every_spelling(value: object) -> None:
    assert boolean(value) is True


@pytest.mark.parametrize("value", [False, "False", "false", 0, "0", "no", "off", ""])
def test_false_in_every_spelling(value: object) -> None:
    assert boolean(value) is False


@pytest.mark.parametrize("value", ["maybe", 2, None, [], 1.5])
def test_what_is_neither_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="True or False"):
        boolean(value)


@pytest.mark.parametrize(("value", "expected"), [(8, 8), ("8", 8), (8.0, 8), ("-3", -3)])
def test_whole_numbers(value: object, expected: int) -> None:
    assert integer(value) == expected


@pytest.mark.parametrize("value", [True, "8.5", "eight", None, float("inf"), "nan"])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        integer(value)


@pytest.mark.parametrize("value", [0, "0", -1, 1.5, False])
def test_positive_starts_at_one(value: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        positive(value)


def test_a_choice_is_found_whatever_its_case() -> None:
    layout = one_of("HSB", "BSH", aliases={"batch": "BSH"})

    assert [layout("bsh"), layout("HSB"), layout("batch")] == ["BSH", "HSB", "BSH"]


def test_a_wrong_choice_names_the_near_one() -> None:
    with pytest.raises(ValueError, match=r"expected left or right; did you mean right\?"):
        one_of("left", "right")("rigth")


def test_lists_are_typed_item_by_item() -> None:
    assert list_of(integer)(["1", 2]) == [1, 2]
    assert one_or_list_of(number)("0.5") == 0.5
    assert one_or_list_of(number)(["0.5", 1]) == [0.5, 1.0]


def test_the_error_names_key_and_value() -> None:
    with pytest.raises(ConfigError, match="fuse_qkv='perhaps': expected True or False"):
        parse("fuse_qkv", "perhaps", boolean)
