"""The `neuronserve` command. `plan` answers from config.json alone, so neither vLLM nor torch is loaded here.

Knows the flags of `vllm serve` that decide shapes and memory, by their names; everything else about serving is vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from neuronserve.neuron_worker import doctor, legacy_args, overrides, speculation
from neuronserve.neuron_worker.config import ASKED_KEY, OPTIONS_KEY, ServeRequest, user_options
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.model_files import config_directory
from neuronserve.neuron_worker.resolve import resolve

from . import vllm_flags
from .cache.key import ArtifactKey
from .cache.places import Places

SHOWN = ("neuronserve", "vllm", "torch", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(_as_vllm_reads_them(sys.argv[1:] if argv is None else argv))
    if words[:1] == ["export"]:
        return _export(words[1:])
    if words[:1] == ["cache"]:
        return _cache(words[1:])
    if words[:1] == ["train-eagle"]:
        return _train_eagle(words[1:])
    parser, plan_flags = _parser()
    foreign: list[str] = []
    if words[:1] == ["plan"]:
        words, foreign = vllm_flags.split(words, plan_flags)
    options = parser.parse_args(words)
    try:
        return int(options.run(options, foreign))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """The parser, and the flags of `plan`: what else stands there is vLLM's."""
    parser = argparse.ArgumentParser(prog="neuronserve", description="Serve LLMs with static-shape graphs.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="the graphs that would be compiled, and their memory",
        description="Shapes, padding and memory per core, from the model's config.json alone.",
        usage="neuronserve plan MODEL [the flags of vllm serve]",
        allow_abbrev=False,
    )
    _add_plan_flags(plan)
    plan.set_defaults(run=_plan)
    look = commands.add_parser(
        "doctor",
        help="what this machine has, which device would serve, what to install",
        description="Exits with 1 where a server would refuse to start. Loads no SDK and no model.",
    )
    _add_device_flags(look)
    look.set_defaults(run=_doctor)
    check = commands.add_parser(
        "verify",
        help="contract, exactness and faults of this machine's device, as one table",
        description="Brings the device up, on a tiny random model unless told otherwise. Exits with 1 on a failure.",
    )
    _add_device_flags(check)
    check.add_argument("--model", help="A local directory; without it a tiny random model.")
    check.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="Cores of the device.")
    check.set_defaults(run=_verify)
    commands.add_parser("export", help="a directory that is served with no parameters, and loads faster")
    commands.add_parser("cache", help="compiled graphs that are kept: list, lookup, push, pull, prune")
    commands.add_parser("train-eagle", help="an EAGLE head for a model, trained on the model's own answers")
    show = commands.add_parser("version", help="versions of this package and what it serves with")
    show.set_defaults(run=_version)
    return parser, plan._option_string_actions


def _add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="A local directory or a hub id.")
    parser.add_argument("--model", help="Another way to name it.")
    parser.add_argument("--revision", help="Of a hub id.")
    parser.add_argument("--download-dir", help="Where hub files are kept.")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="Cores of the device.")
    parser.add_argument("--max-num-seqs", type=_size, help="Sequences at a time.")
    parser.add_argument("--max-model-len", type=_length, help="Tokens of a prompt and its answer.")
    parser.add_argument("--max-num-batched-tokens", type=_size, help="Tokens of a step.")
    parser.add_argument("--block-size", type=int, help="Tokens of a cache block.")
    parser.add_argument("--dtype", default="auto", help="float32, float16 or bfloat16, in any spelling.")
    parser.add_argument("--quantization", "-q", help="neuron_quant for int8 weights.")
    parser.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--additional-config", type=lambda text: legacy_args.json_object("additional_config", text))
    parser.add_argument("--speculative-config", type=lambda text: legacy_args.json_object("speculative_config", text))
    legacy_args.add_flags(parser)


def _add_device_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", help="The device: auto, cpu, ...; without it NEURONSERVE_BACKEND, then auto.")
    parser.add_argument("--device-python", help="The interpreter the device runs in, such as the SDK's own.")


def _given(options: argparse.Namespace) -> dict[str, object]:
    return {key: value for key in ("backend", "device_python") if (value := getattr(options, key)) is not None}


def _doctor(options: argparse.Namespace, foreign: Sequence[str]) -> int:
    diagnosis = doctor.examine(_given(options), os.environ)
    print(diagnosis.text)
    return 0 if diagnosis.is_well else 1


def _verify(options: argparse.Namespace, foreign: Sequence[str]) -> int:
    from neuronserve.neuron_worker.verify import Asked, verify

    asked = Asked(_given(options), options.model, options.tensor_parallel_size)
    verdict = verify(asked, os.environ, lambda line: print(line, file=sys.stderr, flush=True))
    print(verdict.text)
    return 0 if verdict.passed else 1


def _plan(options: argparse.Namespace, foreign: Sequence[str]) -> int:
    options.model = options.model or options.model_tag
    if not options.model:
        raise ConfigError("no model: give a directory or a hub id, such as neuronserve plan path/to/model")
    if foreign:
        print(f"note: not part of a plan: {' '.join(foreign)}")
    resolution = resolve(_request(options), os.environ)
    print(resolution.device)
    for warning in resolution.warnings:
        print(f"warning: {warning}")
    for note in resolution.notes:
        print(f"note: {note}")
    print(resolution.report)
    return 0


def _cache(words: Sequence[str]) -> int:
    from .cache import command
    from .cache.wanted import wanted

    def key_of(options: argparse.Namespace) -> tuple[ArtifactKey, Places]:
        options.model = options.model or options.model_tag
        if not options.model:
            raise ConfigError("no model: give a directory or a hub id, such as neuronserve cache lookup path/to/model")
        return wanted(_request(options), os.environ, options.artifacts, options.cache_url)

    try:
        return command.main(words, os.environ, _add_plan_flags, key_of)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


ASKED_OF_PLAN = (
    *("model", "quantization", "dtype", "max_num_seqs", "additional_config", "speculative_config"),
    *("max_model_len", "tensor_parallel_size", "revision", "download_dir"),
    *legacy_args.ASKED,
)
"""Arguments of vLLM that a plan depends on."""


def _request(options: argparse.Namespace) -> ServeRequest:
    asked = legacy_args.translate({name: getattr(options, name) for name in ASKED_OF_PLAN}, os.environ)
    extra: dict[str, Any] = asked["additional_config"]
    if asked.get("quantization"):
        raise ConfigError(f"--quantization {asked['quantization']} is not supported; neuron_quant is, for int8 weights")
    drafts = speculation.planned(asked)
    return ServeRequest(
        model_dir=config_directory(options.model, options.revision, options.download_dir),
        max_model_len=asked["max_model_len"],
        max_num_seqs=asked["max_num_seqs"],
        tensor_parallel_size=asked["tensor_parallel_size"],
        dtype=asked["dtype"],
        speculation=drafts,
        draft_dir=speculation.draft_directory(drafts, options.download_dir),
        block_size=options.block_size,
        override=extra.get(overrides.KEY, {}),
        options=user_options(extra),
        **extra.get(OPTIONS_KEY, {}).get(ASKED_KEY, {}),
    )


def _export(words: Sequence[str]) -> int:
    from .export import command

    try:
        return command.main(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _train_eagle(words: Sequence[str]) -> int:
    # By its name: nothing of a server knows drafts, and only this command loads torch for itself.
    command = import_module("neuronserve.speculative.train_eagle.command")
    try:
        return int(command.main(words))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _version(options: argparse.Namespace, foreign: Sequence[str]) -> int:
    for name in SHOWN:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    print(f"python {sys.version.split()[0]}")
    return 0


_SUFFIXES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


def _size(text: str) -> int:
    """A whole number, or one such as 4k (4000) and 4K (4096), as vLLM reads them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    size = int(float(match[1]) * _SUFFIXES.get(match[2], 1)) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number; write 4096 or 4k")
    return size


def _length(text: str) -> int | None:
    return None if text.strip().lower() in ("-1", "auto") else _size(text)


def _as_vllm_reads_them(arguments: Sequence[str]) -> Iterator[str]:
    """--max_num_seqs is --max-num-seqs, and --neuronserve.chunk_tokens 128 is --neuronserve '{"chunk_tokens": 128}'."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("--"):
            yield word
            continue
        name, separator, value = word.partition("=")
        flag, *path = name.split(".")
        yield flag.replace("_", "-") + (f"{separator}{value}" if not path else "")
        if path:
            yield _nested(path, value if separator else next(words, ""))


def _nested(path: Sequence[str], text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(path):
        value = {key: value}
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
