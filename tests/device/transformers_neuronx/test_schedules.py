"""Whatever arrives, waits, ends or leaves, each request gets the tokens it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .server import LONGEST, VOCABULARY, Running, Server

LONGEST_PROMPT = 20

prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST_PROMPT)
arrivals = st.tuples(st.just("arrive"), st.lists(prompts, min_size=1, max_size=3), st.integers(1, 40))
events = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("decode"), st.integers(1, 5), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 2), st.none()),
    ),
    max_size=12,
)


class Schedule:
    """Plays events on a server; prompts wait for a free slot, requests end at their length."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.waiting: list[tuple[list[int], int]] = []
        self.lengths: dict[int, int] = {}
        self.seen: list[Running] = []

    def play(self, kind: str, what: Any, length: int | None) -> None:
        if kind == "arrive":
            self.waiting += [(prompt, length or 1) for prompt in what]
            self.admit()
        elif kind == "decode":
            for _ in range(what):
                self.decode()
        elif self.server.running:
            self.server.end(self.server.running[what % len(self.server.running)])

    def admit(self) -> None:
        """As many as there are slots for, in one call."""
        taken = self.waiting[: len(self.server.free)]
        del self.waiting[: len(taken)]
        if not taken:
            return
        for request, (_, length) in zip(
            self.server.start_together([prompt for prompt, _ in taken]), taken, strict=True
        ):
            self.lengths[id(request)] = length
            self.seen.append(request)
        self.end_the_finished()

    def decode(self) -> None:
        self.admit()
        if self.server.running:
            self.server.decode()
            self.end_the_finished()

    def end_the_finished(self) -> None:
        for request in list(self.server.running):
            if len(request.tokens) >= self.lengths[id(request)] or len(request.all) >= LONGEST:
                self.server.end(request)

    def drain(self) -> None:
        while self.waiting or self.server.running:
            self.decode()


def check(schedule: Schedule, steps: list[Any], answers: Any) -> None:
    for step in steps:
        schedule.play(*step)
    schedule.drain()
    for request in schedule.seen:
        assert request.tokens == answers.greedy(request.prompt, len(request.tokens), VOCABULARY)


quiet = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("sampling", ["host", "device"])
@quiet
@given(steps=events)
def test_same_tokens_as_alone(
    serve: Callable[..., Server], chip: Any, answers: Any, sampling: str, steps: list[Any]
) -> None:
    server = serve(sampling=sampling)
    check(Schedule(server), steps, answers)
    assert chip.chips[-1].stale_reads == []


DRAFTS = {"agrees": {}, "half": {"fake_disagrees_every": 2}, "eagle": {"is_eagle": True}}


@pytest.mark.parametrize("draft", DRAFTS)
@quiet
@given(steps=events)
def test_same_tokens_with_a_draft(
    serve: Callable[..., Server],
    model_dir: Callable[..., str],
    chip: Any,
    answers: Any,
    draft: str,
    steps: list[Any],
) -> None:
    server = serve(draft=model_dir("draft", **DRAFTS[draft]), num_drafts=3, sampling="device")
    check(Schedule(server), steps, answers)
    assert chip.chips[-2].stale_reads == []
