"""Settings that contradict each other: refused with the rule, the two values and what to do. Pure.

TGI's own words where it has some. A rule of one document that another document breaks is no contradiction (`eras`):
the batch need not be the number of concurrent requests, and the prefill limit has three different rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from neuronserve.neuron_worker.errors import ConfigError

from .arguments import BY_NAME
from .deduce import BATCH, BATCH_TOTAL, CORES, INPUT, LENGTH, PREFILL, TOTAL, Settings
from .eras import BACKEND_PAGE, DOCKER_README
from .model import Export, Model
from .reading import TABLE, Asked

_BATCH_RULE = BACKEND_PAGE.rules[0].says
_TOTAL_RULE = BACKEND_PAGE.rules[2].says
_BATCH_TOTAL_RULE = DOCKER_README.rules[4].says


_OF_THE_SHELL = {"--api-key": "API_KEY", "--hf-token": "HF_TOKEN"}
"""Secrets among the server's own arguments -> the variable that takes them."""


def check_asked(asked: Asked) -> None:
    """What needs no model to be wrong."""
    for word in asked.server_arguments:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in _OF_THE_SHELL:
            raise ConfigError(
                f"{flag} behind `--` stands on the server's command line, where everybody on the machine could read "
                f"it: give {_OF_THE_SHELL[flag]} as a variable"
            )
    for argument in TABLE:
        given = asked.get(argument.name)
        if argument.fate == "refused" and given is not None and given.value not in argument.harmless:
            shown = "" if argument.is_secret else f" {given.value}"
            raise ConfigError(f"{given.origin}{shown}: {argument.why}")
    new, old = asked.get(INPUT), asked.get("max_input_length")
    if new is not None and old is not None and new.value != old.value:
        raise ConfigError(
            f"Both `max_input_tokens` ({new.value}) and `max_input_length` ({old.value}) are set. Please define only "
            "`max_input_tokens` as `max_input_length is deprecated for naming consistency."
        )
    for name, least in (("validation_workers", 1), ("max_batch_size", 1)):
        found = asked.get(name)
        if found is not None and int(str(found.value)) < least:
            raise ConfigError(f"`{name}` must be > 0 ({found.origin}={found.value})")


def check(settings: Settings, asked: Asked) -> None:
    for problem in (*_against_export(settings, asked), *_among_limits(settings)):
        raise ConfigError(problem)


def idle(asked: Asked) -> list[str]:
    """One line for each setting that changes nothing."""
    return [
        f"{given.origin} has no effect: {argument.why}"
        for argument in TABLE
        if argument.fate == "no effect"
        and (given := asked.get(argument.name)) is not None
        and given.value not in argument.harmless
    ]


def remarks(settings: Settings, asked: Asked) -> list[str]:
    """What was done with settings that can be read in two ways."""
    lines = _beside_export(settings, asked)
    total, length = settings.number(TOTAL), settings.number(LENGTH)
    if total != length:
        lines.append(f"requests have up to {total} tokens ({settings[TOTAL].origin}), the export's graphs {length}")
    given = settings.number(BATCH_TOTAL)
    if given is not None and total is not None and not settings[BATCH].is_given and given % total:
        lines.append(
            f"max_batch_total_tokens={given} is {given // total} sequences of {total} tokens, and {given % total} over"
        )
    if settings.value("revision") is not None and settings.model.is_local:
        lines.append(f"Revision {settings.value('revision')} ignored for local model at {settings.model.name}")
    return lines


def _beside_export(settings: Settings, asked: Asked) -> list[str]:
    export, lines = settings.model.export or Export(), []
    batch, cores = settings[BATCH], asked.get(CORES)
    if batch.is_given and export.batch_size not in (None, batch.value):
        lines.append(
            f"{batch.origin}={batch.value} is served, and the export's batch size is {export.batch_size}: a chip "
            f"compiles graphs for {batch.value}; leave {batch.origin} out to have the export's"
        )
    if cores is not None and export.num_cores not in (None, cores.value):
        own = f"the export runs on the {export.num_cores} cores it was made for"
        lines.append(f"{cores.origin}={cores.value} is the least: {own}")
    return lines


def warnings(model: Model) -> list[str]:
    """What its files and the hub do not say."""
    return [] if model.pipeline_tag is not None else [f"no pipeline tag found for model {model.name}"]


def _against_export(settings: Settings, asked: Asked) -> Iterator[str]:
    export = settings.model.export
    if export is None:
        return
    batch = asked.get("max_batch_size")
    if batch is not None and export.batch_size is not None and int(str(batch.value)) > export.batch_size:
        yield _mismatch(_BATCH_RULE, batch.origin, batch.value, "batch size", export.batch_size)
    total = settings[TOTAL]
    if export.sequence_length is not None and int(str(total.value)) > export.sequence_length:
        yield _mismatch(_TOTAL_RULE, total.origin, total.value, "sequence length", export.sequence_length)
    cores = asked.get(CORES)
    if cores is not None and export.num_cores is not None and int(str(cores.value)) > export.num_cores:
        rule = "an export runs on as many cores as it was made for"
        yield _mismatch(rule, cores.origin, cores.value, "number of cores", export.num_cores)
    cast = asked.get("dtype")
    if cast is not None and export.auto_cast_type is not None:
        exported = BY_NAME["dtype"].parser(export.auto_cast_type)
        if cast.value != exported:
            rule = "an export computes in the type it was made for"
            yield _mismatch(rule, cast.origin, cast.value, "type", exported)


def _mismatch(rule: str, origin: str, value: object, what: str, exported: object) -> str:
    return (
        f"{rule}: {origin}={value}, and the export's {what} is {exported}; leave {origin} out, or set it to {exported}"
    )


def _among_limits(settings: Settings) -> Iterator[str]:
    longest, total = settings[INPUT], settings[TOTAL]
    x, y = int(str(longest.value)), int(str(total.value))
    if x >= y and longest.is_given:
        yield (
            f"`max_input_tokens`({x}) must be < `max_total_tokens`({y}): an input of the whole total leaves no room "
            f"for an answer; set {longest.origin} to {y - 1} or less"
            + (f", or raise {total.origin}" if total.is_given and y < _most(settings.model) else "")
        )
    if y < 2:
        yield f"`max_total_tokens`({y}) must hold an input and an answer: set {total.origin} to 2 or more"
    positions = settings.model.positions
    if positions is not None and y > positions:
        yield (
            f"`max_total_tokens`({y}) must be <= the model's own limit of {positions} positions; set {total.origin} to "
            f"{positions} or less"
        )
    yield from _batch_total(settings, y)
    prefill = settings[PREFILL]
    if prefill.value is not None and longest.is_given and int(str(prefill.value)) < x:
        yield (
            f"`max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: {prefill.value} and {x}; raise "
            f"{prefill.origin} to {x}, or leave it out"
        )


def _most(model: Model) -> float:
    """Tokens of a request that the model's files allow."""
    export = model.export and model.export.sequence_length
    return min(export or math.inf, model.positions or math.inf)


def _batch_total(settings: Settings, total: int) -> Iterator[str]:
    given, batch = settings[BATCH_TOTAL], settings[BATCH]
    if given.value is None:
        return
    tokens = int(str(given.value))
    if total > tokens:
        yield (
            f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {tokens}; leave "
            f"{given.origin} out, or set it to a multiple of {total}"
        )
        return
    length = settings.number(LENGTH) or total
    if (batch.is_given or batch.origin == "the export") and tokens != int(str(batch.value)) * length:
        right = int(str(batch.value)) * length
        yield (
            f"{_BATCH_TOTAL_RULE}, batch size times length: {given.origin}={tokens}, and {batch.value} "
            f"({batch.origin}) times {length} is {right}; leave {given.origin} out, or set it to {right}"
        )
