"""A device that fails under a real server: one clear error for who was running, an answer for who waited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from neuronserve.neuron_worker.engine_end import CLIENTS_ARE_TOLD, LAST_WORDS
from neuronserve.neuron_worker.vllm_changes import STEP_FAILED

from ..tools.faults import CASES, SHORT, Answer, Case, FaultyServer, exhaust, faulty_server

ALWAYS = ("prefill", "decode", "decode, then the restart's compile")
"""Phases of the kills that are tested without `--full`."""


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    with faulty_server(tmp_path_factory.mktemp("faulty")) as server:
        yield server


def marked(case: Case) -> object:
    is_main = case.fault.startswith("kill") and case.phase in ALWAYS
    return pytest.param(case, id=f"{case.fault} in {case.phase}", marks=() if is_main else pytest.mark.full)


def test_a_device_that_dies_idle_is_replaced_before_anybody_asks(faulty: FaultyServer) -> None:
    """First of its server, so that no other restart is in the log."""
    faulty.replace_idle_device()

    assert faulty.complete(SHORT) == Answer(200, faulty.good, (), "length")
    assert faulty.health() == 200


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_who_ran_gets_one_error_and_who_waited_is_served(faulty: FaultyServer, case: Case) -> None:
    outcome = faulty.run(case)

    for answer, status in ((outcome.streaming, 200), (outcome.third, 200), (outcome.whole, 500)):
        assert (answer.status, answer.errors, answer.finish_reason) == (status, (STEP_FAILED,), None)
    served = Answer(200, faulty.good, (), "length")
    assert (outcome.waiting, outcome.after) == (served, served)
    assert outcome.leaks.words == "nothing"
    assert faulty.health() == 200


def test_a_device_that_does_not_come_back_ends_the_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    with faulty_server(tmp_path_factory.mktemp("hopeless"), restarts=1) as server:
        ending = exhaust(server, restarts=1)

    assert ending.running.errors == (STEP_FAILED,)
    assert (ending.waiting.status, ending.waiting.errors) == (500, (CLIENTS_ARE_TOLD,))
    assert ending.after == ending.waiting
    assert ending.health in ((503,), (503, None))  # for as long as there is somebody to answer
    assert ending.exit_code == 1
    assert ending.log.rstrip().splitlines()[-1] == LAST_WORDS
    said = [line for line in ending.log.splitlines() if "1 attempts to restart it in a row" in line]
    assert any("CRITICAL" in line and "The last reason: " in line for line in said)
    assert ending.left == ()
