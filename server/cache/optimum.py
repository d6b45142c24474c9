"""`optimum-cli neuron cache lookup MODEL …` over our cache, in the words that optimum-neuron prints.

    lookup(argv) ──▶ exit status

Up to 0.3 it printed a line with the count and every entry as `key: value`; from 0.4 on a table, asked for with other
arguments. The arguments that were given decide which of the two is printed; without any, the older form.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from neuronserve.neuron_worker.errors import ConfigError

from .errors import CacheUnavailable
from .manifest import Manifest
from .places import hub_place, places
from .store import Store

_CASTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
INSTANCES = ("inf2", "trn1", "trn2")
TASK = "text-generation"
COLUMNS = ("batch size", "sequence length", "tensor parallel", "dtype", "instance type")


def lookup(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv` as after the word `lookup`."""
    options = _parser().parse_args(list(argv))
    try:
        asked = urls(options.repo_id, environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found: dict[str, Manifest] = {}
    failures = []
    for url in asked:
        try:
            found |= {each.name: each for each in _entries(url, options)}
        except (CacheUnavailable, ConfigError) as error:
            failures.append(error)
    for failure in failures:
        print(f"{'note' if len(failures) < len(asked) else 'error'}: not looked into: {failure}", file=sys.stderr)
    if failures and len(failures) == len(asked):
        return 1
    entries = list(found.values())
    print(_table(options.model_id, entries) if _is_newer(options) else _list(options.model_id, options.mode, entries))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="optimum-cli neuron cache lookup")
    parser.add_argument("model_id", help="The model's id on the hub, or its directory.")
    parser.add_argument("--repo_id", help="A hub repository in the place of CUSTOM_CACHE_REPO.")
    parser.add_argument("--task", help="text-generation is what is served.")
    parser.add_argument("--mode", choices=("training", "inference", "all"), help="Of the older form.")
    parser.add_argument("--instance_type", choices=INSTANCES, help="Of the newer form.")
    parser.add_argument("--dtype", help="bfloat16, float16 or float32.")
    for name in ("tensor_parallel_size", "batch_size", "sequence_length"):
        parser.add_argument(f"--{name}", type=int)
    return parser


def _is_newer(options: argparse.Namespace) -> bool:
    names = ("instance_type", "dtype", "tensor_parallel_size", "batch_size", "sequence_length", "task")
    return options.mode is None and any(getattr(options, name) is not None for name in names)


def urls(repo: str | None, environ: Mapping[str, str]) -> list[str]:
    """Where a lookup looks: in the repository it was given alone, else where a start would."""
    if repo:
        return [str(hub_place(environ, repo)[0])]
    given = {name: environ.get(f"NEURONSERVE_{name.upper()}") or None for name in ("artifacts", "cache_url")}
    where = places(environ, given["artifacts"], given["cache_url"])
    return [str(place) for place in (where.local, where.remote) if place is not None]


def _entries(url: str, options: argparse.Namespace) -> list[Manifest]:
    if options.mode == "training" or options.task not in (None, TASK):
        return []  # nothing here trains
    wanted = {
        "max_num_seqs": options.batch_size,
        "max_model_len": options.sequence_length,
        "tensor_parallel_size": options.tensor_parallel_size,
        "dtype": _DTYPES.get(options.dtype, options.dtype),
    }
    return [
        each
        for each in Store(url).manifests()[0]
        if each.about.get("model") == options.model_id
        and all(value is None or getattr(each.key, name) == value for name, value in wanted.items())
    ]


def _list(model: str, mode: str | None, entries: Sequence[Manifest]) -> str:
    lines = ["", f"*** {len(entries)} entrie(s) found in cache for {model} for {mode or 'inference'}.***"]
    for entry in entries:
        lines += ["", *(f"{name}: {value}" for name, value in sorted(_facts(entry).items()))]
    return "\n".join(lines)


def _facts(entry: Manifest) -> dict[str, object]:
    key = entry.key
    compiler, _, version = key.compiler.partition(" ")
    return {
        "auto_cast_type": _CASTS.get(key.dtype, key.dtype),
        "batch_size": key.max_num_seqs,
        "checkpoint_id": entry.about.get("model", ""),
        "compiler_type": compiler,
        "compiler_version": version,
        "num_cores": key.tensor_parallel_size,
        "sequence_length": key.max_model_len,
        "task": TASK,
    }


def _table(model: str, entries: Sequence[Manifest]) -> str:
    if not entries:
        return f"No cached entries found for {model}."
    rows = [COLUMNS, *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"Cached entries for {model}", *lines])


def _row(entry: Manifest) -> tuple[str, ...]:
    key = entry.key
    # The classic library compiles for one target, which Inf2 and Trn1 both run.
    return str(key.max_num_seqs), str(key.max_model_len), str(key.tensor_parallel_size), key.dtype, "inf2, trn1"
