"""Command line and shell, read by the table of arguments.

    read(argv, environ) ──▶ Asked: what was given, each value with the flag or variable that gave it

A flag wins over the variable of its own name, as in TGI. All else that gives a setting must agree, be it a flag and a
variable of another name or two variables; where one of them wins, the other is noted. A blank variable is not set:
`docker run -e HF_TOKEN=${HF_TOKEN}` leaves such ones. Nothing is deduced here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.values import parse

from . import arguments, sagemaker, xla
from .arguments import Argument

TABLE: tuple[Argument, ...] = (*arguments.ARGUMENTS, *xla.ARGUMENTS, *sagemaker.ARGUMENTS)

DESCRIPTION = "Text Generation Inference's launcher, on the engine of `vllm serve`."
HEADINGS = {
    "used": "arguments",
    "no effect": "accepted without effect (one line of the start says so)",
    "refused": "refused by name",
}


@dataclass(frozen=True)
class Given:
    value: object
    origin: str  # "--port" or "PORT"


@dataclass(frozen=True)
class Asked:
    """Filled by `read`."""

    values: Mapping[str, Given] = field(default_factory=dict)
    server_arguments: tuple[str, ...] = ()  # for `vllm serve` as they are
    wants_environment: bool = False  # --env
    unused: tuple[str, ...] = ()  # what gave way to another spelling, one line each

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Given | None:
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        given = self.get(name)
        return None if given is None else str(given.value)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="text-generation-launcher",
        description=DESCRIPTION,
        usage="text-generation-launcher --model-id MODEL [arguments] [-- arguments of `vllm serve`]",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    groups = {fate: made.add_argument_group(heading) for fate, heading in HEADINGS.items()}
    for argument in TABLE:
        if argument.has_flag:
            _add(groups[argument.fate], argument)
    made.add_argument("--env", "-e", action="store_true", help="Print what the server would run with, and exit.")
    made.add_argument("--version", "-V", action="version", version=_version(made.prog), help="Print it, and exit.")
    return made


def _version(program: str) -> str:
    return f"{program} {metadata.version('neuronserve')}"


def _add(group: argparse._ArgumentGroup, argument: Argument) -> None:
    names = [argument.flag, *([argument.short] if argument.short else [])]
    text = _sentence(argument).replace("%", "%%")
    if argument.is_switch:
        group.add_argument(*names, action="store_true", default=None, help=text, dest=argument.name)
    else:
        action = "append" if argument.repeats else "store"
        group.add_argument(*names, action=action, help=text, dest=argument.name, metavar="VALUE")


def _sentence(argument: Argument) -> str:
    default = f" [default: {argument.default}]" if argument.default is not None and not argument.is_switch else ""
    return f"{argument.help or argument.why} [env: {', '.join(argument.variables)}]{default}"


def _epilog() -> str:
    width = max(len(name) for argument in TABLE for name in argument.variables) + 2
    lines = [
        f"  {name:<{width}}{argument.help or f'{argument.fate}: {argument.why}'}"
        for argument in TABLE
        if not argument.has_flag
        for name in argument.variables
    ]
    return "variables without an argument:\n" + "\n".join(lines)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Asked:
    own, rest = _split(argv)
    options = parser().parse_args([_dashed(word) for word in own])
    values, unused = {}, []
    for argument in TABLE:
        found = _given(argument, options, environ)
        if found:
            values[argument.name] = found[0]
            unused += _beaten(argument, found)
    return Asked(values, (*sagemaker.server_arguments(environ), *rest), options.env, tuple(unused))


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"


def _given(argument: Argument, options: argparse.Namespace, environ: Mapping[str, str]) -> list[Given]:
    """Every spelling that gives it, the one that counts first."""
    flag = getattr(options, argument.name) if argument.has_flag else None
    found = [] if flag is None else [Given(_parsed(argument, argument.flag, flag), argument.flag)]
    names = [name for name in argument.variables if flag is None or name != argument.name.upper()]
    return found + [
        Given(_parsed(argument, name, environ[name]), name) for name in names if environ.get(name, "").strip()
    ]


def _beaten(argument: Argument, found: Sequence[Given]) -> list[str]:
    """Lines of those that give another value than the first does, where that may be."""
    first = found[0]
    others = [other for other in found[1:] if other.value != first.value]
    wins = argument.first_wins or (argument.flag_wins and first.origin == argument.flag)
    if others and not wins:
        shown = f"{_shown(argument, first)} and {_shown(argument, others[0])}"
        raise ConfigError(f"{shown} are one setting and disagree: define only {first.origin}")
    return [f"{_shown(argument, other)} is not used: {_shown(argument, first)} is given" for other in others]


def _shown(argument: Argument, given: Given) -> str:
    return given.origin if argument.is_secret else f"{given.origin}={given.value}"


def _parsed(argument: Argument, key: str, value: object) -> object:
    if not argument.is_secret:
        return parse(key, value, argument.parser)
    try:
        return argument.parser(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
