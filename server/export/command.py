"""`neuronserve export MODEL OUT …`, in our spelling and in that of `optimum-cli export neuron`.

`--batch_size` is `--batch-size`, `-m MODEL OUT` is `MODEL OUT`. Arguments of optimum's that decide nothing here are
taken and named in one line.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from neuronserve.neuron_worker.errors import ConfigError

from .elsewhere import INSTANCES
from .hub import push
from .write import ExportRequest, Say, export

SUMMARY = "a directory that is served with no parameters, and loads faster than the checkpoint"
CASTS = ("bf16", "fp16", "fp32", "bfloat16", "float16", "float32")
TASKS = ("auto", "text-generation", "text-generation-with-past")

WITHOUT_EFFECT = {
    "--trust-remote-code": 0,
    "--disable-neuron-cache": 0,
    "--disable-validation": 0,
    "--dynamic-batch-size": 0,
    "--inline-weights-neff": 0,
    "-O1": 0,
    "-O2": 0,
    "-O3": 0,
    "--auto-cast": 1,
    "--compiler-workdir": 1,
    "--atol": 1,
}
"""Optimum's, and how many words follow."""


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ, say: Say = print) -> int:
    request, repository, private, ignored = parse(arguments)
    if ignored:
        say(f"note: without effect here: {' '.join(ignored)}")
    export(request, environ, say)
    if repository is not None:
        say(push(request.output, repository, private=private))
    return 0


def parse(arguments: Sequence[str]) -> tuple[ExportRequest, str | None, bool, list[str]]:
    """(what to export, repository to push to, whether that is private, flags that decide nothing)."""
    parser = _parser()
    options = parser.parse_intermixed_args([_dashed(word) for word in arguments])
    words = [*([options.model] if options.model else []), *options.words]
    if len(words) != 2:
        raise ConfigError(
            f"export takes a model and a directory to write, here are {' '.join(words) or 'neither'}: "
            "neuronserve export MODEL OUT"
        )
    request = ExportRequest(
        model=words[0],
        output=Path(words[1]),
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        num_cores=options.num_cores,
        auto_cast_type=options.auto_cast_type,
        quantization=None if options.quant is None else "int8",
        quantize_head=options.quantize_head,
        revision=options.revision,
        cache_dir=options.cache_dir,
        overwrite=options.overwrite,
        instance_type=options.instance_type,
    )
    return request, options.push_to_hub, options.private, options.ignored


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"export: {message}")


class _Ignore(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="neuronserve export",
        usage="neuronserve export MODEL OUT [flags]",
        description=f"Writes {SUMMARY}.",
        allow_abbrev=False,
    )
    parser.set_defaults(ignored=[])
    add = parser.add_argument
    add("words", nargs="*", metavar="MODEL OUT", help="A local directory or a hub id, and where to write.")
    add("-m", "--model", help="Another way to name the model.")
    add("--batch-size", type=_positive, default=1, help="Sequences at a time (1).")
    add("--sequence-length", type=_positive, help="Prompt and answer together; the model's own, at most 4096.")
    add("--num-cores", "--tensor-parallel-size", type=_positive, default=1, help="Cores that work as one (1).")
    add("--auto-cast-type", "--torch-dtype", choices=CASTS, help="Type of the weights; the checkpoint's own.")
    add("--quant", choices=("s8", "int8"), help="Weights in int8.")
    add("--quantize-head", action="store_true", help="The language-model head in int8 too.")
    add("--revision", help="Of a hub id.")
    add("--cache-dir", help="Where hub files are kept.")
    add("--instance-type", choices=INSTANCES, help="The chip it is for, on a machine without one.")
    add("--overwrite", action="store_true", help="Replace an export that is there.")
    add("--push-to-hub", metavar="REPO", help="Upload the directory afterwards.")
    add("--private", action="store_true", help="Of a repository that the upload creates.")
    add("--task", choices=TASKS, default="auto", help="text-generation, the one there is.")
    for flag, words in WITHOUT_EFFECT.items():
        add(flag, action=_Ignore, nargs=words or 0, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word
