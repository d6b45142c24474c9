"""`neuronserve cache list | lookup | push | pull | prune`: what is kept, what a server would find, moving it about.

URLs are fsspec's: a directory, s3://bucket/folder, hf://owner/name. Without one the places are those of a server
started in this shell. Knows no device: a key comes from whoever knows one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server import vllm_flags

from . import prune
from .cache import Cache
from .errors import CacheUnavailable
from .key import ArtifactKey
from .manifest import Damaged, Manifest
from .places import Places, local_or_default, places
from .store import LAYOUT, Store

Value = TypeVar("Value")
AddFlags = Callable[[argparse.ArgumentParser], None]
KeyOf = Callable[[argparse.Namespace], "tuple[ArtifactKey, Places]"]
"""The key of the server these flags would start, and the places it would look in."""

WORK = "work"
ABANDONED = timedelta(days=1)
"""After so long a device's directory is one that a killed server left behind."""


def main(words: Sequence[str], environ: Mapping[str, str], add_serve_flags: AddFlags, key_of: KeyOf) -> int:
    """`words`: what follows `neuronserve cache`. Flags of a server that decide no graph may stand in a lookup."""
    parser, lookup_flags = _parser(environ, add_serve_flags, key_of)
    foreign: list[str] = []
    if words[:1] == ["lookup"]:
        words, foreign = vllm_flags.split(words, lookup_flags)
    options = parser.parse_args(words)
    if foreign:
        print(f"note: not part of a key: {' '.join(foreign)}")
    try:
        return int(options.run(options))
    except CacheUnavailable as error:
        raise ConfigError(str(error)) from None


def _parser(
    environ: Mapping[str, str], add_serve_flags: AddFlags, key_of: KeyOf
) -> tuple[argparse.ArgumentParser, Collection[str]]:
    """The parser, and the flags of `lookup`: what else stands there is vLLM's."""
    parser = argparse.ArgumentParser(prog="neuronserve cache", description="Compiled graphs that are kept.")
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        made.set_defaults(run=run)
        made.add_argument("--artifacts", help="The directory of this machine; by default the server's.")
        return made

    made = verb("list", "the entries of a place", lambda options: _list(options, environ))
    made.add_argument("url", nargs="?", metavar="URL", help="By default this machine's directory.")
    look = verb("lookup", "whether a server would find its graphs, and if not, why", lambda o: _lookup(o, key_of))
    look.usage = "neuronserve cache lookup MODEL [the flags of vllm serve] [--cache-url URL]"
    look.add_argument("--cache-url", help="In the place of the server's shared one.")
    add_serve_flags(look)
    for name, text in (("push", "entries of this machine to a URL"), ("pull", "entries of a URL to this machine")):
        made = verb(name, text, lambda options, name=name: _move(options, environ, name))  # type: ignore[misc]
        made.add_argument("url", metavar="URL")
        made.add_argument("names", nargs="*", metavar="ENTRY", help="Beginnings of names; without any, all.")
    made = verb("prune", "remove what is old, too much, damaged or abandoned", lambda o: _prune(o, environ))
    made.add_argument("url", nargs="?", metavar="URL", help="By default this machine's directory.")
    made.add_argument("--older-than", metavar="AGE", help="Entries made before: 12h, 30d, 4w.")
    made.add_argument("--max-size", metavar="SIZE", help="The oldest entries until the rest fits: 500M, 20G.")
    made.add_argument("--dry-run", action="store_true", help="Say what would go, and touch nothing.")
    return parser, look._option_string_actions


def _list(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    store = _store(options.url or str(_local(options, environ)))
    found, damaged = store.manifests()
    for manifest in sorted(found, key=lambda each: each.created, reverse=True):
        print(line_of(manifest))
    for name, damage in damaged.items():
        print(f"{name}  damaged: {damage}")
    print(f"{_count(len(found), 'entry', 'entries')}, {_size(sum(each.size for each in found))}, in {store.url}")
    return 0


def line_of(manifest: Manifest) -> str:
    """One line: what a person tells entries apart by."""
    key = manifest.key
    settings = (
        f"{key.dtype}{f'/{key.quantization}' if key.quantization else ''}, {key.tensor_parallel_size} cores, "
        f"{key.max_num_seqs} x {key.max_model_len}, {key.compiler}"
    )
    model = manifest.about.get("model", "?")
    return f"{manifest.name}  {manifest.created}  {_size(manifest.size):>9}  {model}  {settings}"


def _lookup(options: argparse.Namespace, key_of: KeyOf) -> int:
    key, where = key_of(options)
    if where.local is None and where.export is None:
        raise ConfigError(where.note or "there is no cache to look in: give --artifacts DIRECTORY or --cache-url URL")
    if where.note:
        print(where.note)
    # As a start would do it, verification and all; what comes from a URL is in the mirror afterwards.
    with tempfile.TemporaryDirectory(prefix="neuronserve-lookup-") as scratch:
        brought = Cache(where).bring(key, Path(scratch) / "files")
    print("\n".join(brought.lines))
    return 0 if brought.found else 1


def _move(options: argparse.Namespace, environ: Mapping[str, str], verb: str) -> int:
    here, there = _store(str(_local(options, environ))), _store(options.url)
    source, target = (here, there) if verb == "push" else (there, here)
    names = _chosen(source, options.names)
    num_damaged = 0
    for name in names:
        try:
            manifest = source.find(name)
            if manifest is not None:  # None: removed meanwhile
                print(f"{name}  {_moved(manifest, source, target)}")
        except Damaged as damage:
            num_damaged += 1
            source.set_aside(name, damage)
            print(f"{name}  is damaged ({damage}): not copied")
    if not names:
        print(f"no entries in {source.url}")
    return 1 if num_damaged else 0


def _moved(manifest: Manifest, source: Store, target: Store) -> str:
    """What was done, for the line of this entry. `Damaged` is the source's own; a damaged target is written anew."""
    instead = _what_differs(manifest, target)
    if instead is None:
        return "is there already"
    with tempfile.TemporaryDirectory(prefix="neuronserve-cache-") as scratch:
        source.fetch(manifest, Path(scratch))
        target.publish(manifest, Path(scratch))
    return f"{_size(manifest.size)} copied{instead}"


def _what_differs(manifest: Manifest, target: Store) -> str | None:
    """What a copy takes the place of; empty: of nothing. None: the target has the same files, and whole."""
    try:
        found = target.find(manifest.name)
        if found is None:
            return ""
        if found.files != manifest.files:
            return f" in the place of {_count(len(found.files), 'other file')}"
        target.verify(found)
    except Damaged as damage:
        return f" in the place of a damaged entry: {damage}"
    return None


def _store(url: str) -> Store:
    store = Store(url)
    if store.is_a_file:
        raise ConfigError(f"cache URL={url!r} is a file; name the directory that holds {LAYOUT}/")
    return store


def _chosen(store: Store, beginnings: Sequence[str]) -> list[str]:
    names = store.names()
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in names):
            raise ConfigError(f"no entry of {store.url} begins with {beginning!r}; `neuronserve cache list` names them")
    return [name for name in names if not beginnings or name.startswith(tuple(beginnings))]


def _prune(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    older_than = _read("--older-than", options.older_than, prune.age)
    max_size = _read("--max-size", options.max_size, prune.size)
    store = _store(options.url or str(_local(options, environ)))
    pruning = prune.plan(store, datetime.now(UTC), older_than, max_size)
    left_behind = [] if options.url else _abandoned(_local(options, environ))
    for manifest in pruning.entries:
        print(line_of(manifest))
    print(
        f"{'would remove' if options.dry_run else 'removed'} {_count(len(pruning.entries), 'entry', 'entries')}, "
        f"{_count(len(pruning.blobs), 'file')} of {_size(pruning.num_bytes)}, "
        f"{_count(len(pruning.quarantined), 'damaged file')}, "
        f"{_count(len(left_behind), 'abandoned directory', 'abandoned directories')}; "
        f"{_count(len(pruning.kept), 'entry stays', 'entries stay')} in {store.url}"
    )
    if not options.dry_run:
        prune.apply(store, pruning)
        for directory in left_behind:
            prune.remove_directory(directory)
    return 0


def _read(flag: str, text: str | None, reader: Callable[[str], Value]) -> Value | None:
    try:
        return None if text is None else reader(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _abandoned(local: Path) -> list[Path]:
    folder, oldest = local / WORK, time.time() - ABANDONED.total_seconds()
    return sorted(each for each in folder.iterdir() if each.stat().st_mtime < oldest) if folder.is_dir() else []


def _local(options: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    found = places(environ, options.artifacts or environ.get("NEURONSERVE_ARTIFACTS")).local
    return found or local_or_default(environ, options.artifacts)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
