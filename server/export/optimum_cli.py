"""`optimum-cli` as the documents of the older images have it; in our images alone, where the real one is not.

    optimum-cli export neuron …             neuronserve export …
    optimum-cli neuron cache VERB …         neuronserve cache …, in the words of optimum-neuron where it printed them
    optimum-cli neuron serve …              vllm serve …

Not installed as a command by the package: it would stand before the real one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.model_files import export_settings
from neuronserve.server.cache.places import hub_place

from .. import cli
from . import command

USAGE = "optimum-cli export neuron -m MODEL OUT … | optimum-cli neuron cache … | optimum-cli neuron serve …"

Run = Callable[[Sequence[str]], object]


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(words, os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(words: Sequence[str], environ: Mapping[str, str], become: Run | None = None) -> int:
    if list(words[:2]) == ["export", "neuron"]:
        return command.main(words[2:], environ)
    if list(words[:2]) == ["neuron", "cache"]:
        return _cache(words[2:], environ)
    if list(words[:2]) == ["neuron", "serve"]:
        (become or _become)(serve_command(words[2:]))
        return 0
    raise ConfigError(f"optimum-cli {' '.join(words[:2])}: not answered here; {USAGE}")


# -- neuron cache


def _cache(words: Sequence[str], environ: Mapping[str, str]) -> int:
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if verb == "lookup":
        from neuronserve.server.cache import optimum

        return optimum.lookup(rest, environ)
    if verb in ("synchronize", "status", "cleanup"):
        return cli.main(["cache", *_cache_words(verb, rest, environ)])
    if verb in ("create", "set"):
        raise ConfigError(
            f"neuron cache {verb}: nothing is written down here; make the repository on the hub and name it with "
            "CUSTOM_CACHE_REPO=owner/name"
        )
    raise ConfigError(f"neuron cache {verb or '?'}: known are lookup, synchronize, status and cleanup")


def _cache_words(verb: str, rest: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    parser = _Parser(prog=f"optimum-cli neuron cache {verb}", allow_abbrev=False)
    if verb == "status":
        parser.parse_args(rest)
        return ["list"]
    if verb == "cleanup":
        for flag in ("--all", "--old-versions", "--wipe", "--dry-run"):
            parser.add_argument(flag, action="store_true")
        options = parser.parse_args(rest)
        if options.all or options.old_versions or options.wipe:
            raise ConfigError("neuron cache cleanup: say what may go, with neuronserve cache prune --older-than 30d")
        return ["prune", *(["--dry-run"] if options.dry_run else [])]
    parser.add_argument("--repo_id", "--repo-id")
    parser.add_argument("--cache_dir", "--cache-dir")
    options = parser.parse_args(rest)
    url, _ = hub_place(environ, options.repo_id)
    if url is None:
        raise ConfigError("neuron cache synchronize: to which repository? give --repo_id or set CUSTOM_CACHE_REPO")
    local = ["--artifacts", options.cache_dir] if options.cache_dir else []
    return ["push", url, *local]


# -- neuron serve

SERVED_AS = {
    "batch_size": "--max-num-seqs",
    "sequence_length": "--max-model-len",
    "tensor_parallel_size": "--tensor-parallel-size",
}
EXPORTED_AS = {"batch_size": "batch_size", "sequence_length": "sequence_length", "tensor_parallel_size": "num_cores"}


def serve_command(words: Sequence[str]) -> list[str]:
    """The line of `vllm serve` for optimum's arguments; what it does not know goes on as it is."""
    parser = _Parser(prog="optimum-cli neuron serve", allow_abbrev=False)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--served_model_name", "--served-model-name")
    parser.add_argument("--task", choices=("generate",), default="generate")
    for name in SERVED_AS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--data-parallel-size", "--data_parallel_size", type=int, choices=(1,), default=1)
    parser.add_argument("--allow_non_cached_model", "--allow-non-cached-model", action="store_true")
    options, rest = parser.parse_known_args(words)
    _check_against_export(options)
    line = ["serve", options.model, "--device", "neuron", "--port", str(options.port)]
    line += ["--served-model-name", options.served_model_name] if options.served_model_name else []
    for name, flag in SERVED_AS.items():
        if (value := getattr(options, name)) is not None:
            line += [flag, str(value)]
    return [*line, *rest]


def _check_against_export(options: argparse.Namespace) -> None:
    """Here a value that is given must be the export's own."""
    found = export_settings(options.model)
    if found is None:
        return
    directory, settings = found
    for name, field in EXPORTED_AS.items():
        asked, made_for = getattr(options, name), getattr(settings, field)
        if asked is not None and asked != made_for:
            raise ConfigError(f"--{name} {asked}: the export in {directory} has {made_for}; leave --{name} out")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{self.prog}: {message}")


def _become(words: Sequence[str]) -> None:
    vllm = Path(sys.executable).parent / "vllm"
    os.execv(sys.executable, [sys.executable, str(vllm), *words])


if __name__ == "__main__":
    sys.exit(main())
