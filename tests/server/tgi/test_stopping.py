"""When an answer ends, token by token."""

from __future__ import annotations

import pytest

from neuronserve.server.tgi.stopping import Stopping


@pytest.mark.parametrize(
    ("stop", "text", "ends"),
    [
        ([], "abc", None),
        (["bc"], "abc", "stop_sequence"),
        (["b"], "abc", None),  # in the middle of a token's text
        (["x", "bc"], "abc", "stop_sequence"),
        (["bc"], "abc\n", "stop_sequence"),  # one newline may follow
        (["bc"], "abc\n\n", None),
        (["bc\n"], "abc\n", "stop_sequence"),
        (["."], "abc", None),  # a stop sequence is no pattern
        (["."], "ab.", "stop_sequence"),
        ([""], "abc", "stop_sequence"),
        (["a" * 200], "a" * 400, "stop_sequence"),
        (["a" * 201], "a" * 400, None),  # of a long text the last 200 characters are looked at
        (["a" * 250], "a" * 300, "stop_sequence"),
    ],
)
def test_stop_sequences(stop: list[str], text: str, ends: str | None) -> None:
    assert Stopping(stop, max_new_tokens=9)(1, text, is_end=False) == ends


def test_at_the_last_token_the_length_ended_it() -> None:
    stopping = Stopping(["abc"], max_new_tokens=3)
    assert stopping(3, "abc", is_end=True) == "length"
    assert stopping(2, "abc", is_end=True) == "eos_token"
    assert stopping(2, "abc", is_end=False) == "stop_sequence"
