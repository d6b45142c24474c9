"""VLLM_PLUGINS as our routes need it: what would have been loaded without it still is."""

from __future__ import annotations

from neuronserve.neuron_worker.endpoint_plugin import NAMES, VARIABLE, switch_on


def test_without_the_variable_everything_that_loads_unasked_is_named() -> None:
    environ: dict[str, str] = {}
    switch_on(environ)
    names = environ[VARIABLE].split(",")
    assert {"neuronserve", "neuronserve_general", *NAMES} <= set(names)
    assert len(names) == len(set(names))


def test_a_list_of_the_user_s_is_kept() -> None:
    environ = {VARIABLE: "neuronserve,theirs"}
    switch_on(environ)
    assert environ[VARIABLE] == ",".join(["neuronserve", "theirs", *NAMES])


def test_twice_is_once() -> None:
    environ: dict[str, str] = {}
    switch_on(environ)
    once = dict(environ)
    switch_on(environ)
    assert environ == once
