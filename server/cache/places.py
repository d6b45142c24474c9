"""Where artifacts are kept: a directory of this machine, and beside it one URL that machines share.

    places(environ, artifacts, cache_url) ──▶ Places(local, remote)

The options come first, then what the classic tools read: NEURON_COMPILE_CACHE_URL, the flags of NEURON_CC_FLAGS,
CUSTOM_CACHE_REPO, and the file that `optimum-cli neuron cache set` writes. Opens nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from neuronserve.neuron_worker.errors import ConfigError

OPTION = "cache_url"
FLAGS_KEY = "NEURON_CC_FLAGS"
COMPILE_CACHE_KEY = "NEURON_COMPILE_CACHE_URL"
REPO_KEY = "CUSTOM_CACHE_REPO"
HUB_CACHE_KEYS = ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE", "HF_HOME")
REPO_FILE = "optimum_neuron_custom_cache"
GRAPHS_OF_EXPORT = "compiled-graphs"
"""Folder of an exported directory."""

FOLDER = "neuronserve"
"""Ours in a place that others keep things in too."""


@dataclass(frozen=True)
class Places:
    """None: not there. The local one is looked into first; without it nothing is kept."""

    local: Path | None
    remote: str | None = None
    remote_from: str = ""  # what says so, for messages
    note: str = ""
    export: str | None = None  # of an exported model, with graphs of its own: read before the others, never written

    def beside(self, model_dir: str) -> Places:
        """With the graphs of an export in that directory, unless the compiler's own flag turns all of it off."""
        export = Path(model_dir) / GRAPHS_OF_EXPORT
        is_off = self.local is None and bool(self.note)
        return self if is_off or not export.is_dir() else replace(self, export=str(export))

    @property
    def is_asked_for(self) -> bool:
        """The shared one, of this server; the classic tools' variables may be there for others."""
        return self.remote_from == OPTION

    @property
    def writes_remote(self) -> bool:
        """A hub repository gets commits from `cache push` alone, and never because a server started."""
        return self.remote is not None and not self.remote.startswith("hf://")

    @property
    def compiler_cache(self) -> str | None:
        """For what the compiler keeps by itself, where the user gave it no other place."""
        return None if self.local is None else str(self.local / "compiler")


def places(environ: Mapping[str, str], artifacts: str | None = None, cache_url: str | None = None) -> Places:
    if no_cache := next((flag for flag in _flags(environ) if flag in ("--no-cache", "--no_cache")), None):
        given = [name for name, value in (("artifacts", artifacts), ("cache_url", cache_url)) if value]
        beside = f", {' and '.join(given)} notwithstanding" if given else ""
        return Places(None, note=f"{FLAGS_KEY}={no_cache}: compiled graphs are neither looked up nor kept{beside}")
    remote, remote_from = _remote(environ, cache_url)
    return Places(_local(environ, artifacts, has_remote=remote is not None), remote, remote_from)


def _local(environ: Mapping[str, str], artifacts: str | None, *, has_remote: bool) -> Path | None:
    if artifacts:
        return _directory("artifacts", artifacts)
    compile_cache, said_by = _compile_cache(environ)
    if compile_cache and not is_remote(compile_cache):
        return _directory(said_by, compile_cache) / FOLDER
    for key in HUB_CACHE_KEYS:
        if environ.get(key, "").strip():
            return Path(environ[key].strip()).expanduser() / FOLDER
    if has_remote:
        root = environ.get("XDG_CACHE_HOME", "").strip()
        return (Path(root) if root else Path.home() / ".cache") / FOLDER / "artifacts"
    return None


def _directory(key: str, text: str) -> Path:
    if is_remote(text):
        raise ConfigError(f"{key}={text!r} is a URL, and this is a directory of this machine; use cache_url for URLs")
    return Path(text.removeprefix("file://")).expanduser()


def _remote(environ: Mapping[str, str], cache_url: str | None) -> tuple[str | None, str]:
    if cache_url:
        return cache_url.rstrip("/"), OPTION
    url, said_by = hub_place(environ)
    if url is not None:
        return url, said_by
    compile_cache, said_by = _compile_cache(environ)
    return (f"{compile_cache.rstrip('/')}/{FOLDER}", said_by) if is_remote(compile_cache) else (None, "")


def hub_place(environ: Mapping[str, str], repo: str | None = None) -> tuple[str | None, str]:
    """(URL in a hub repository, what says so): `repo`, the flag of optimum's commands, else what its tools read."""
    if repo:
        return _hub_url("--repo_id", repo), "--repo_id"
    if named := environ.get(REPO_KEY, "").strip():
        return _hub_url(REPO_KEY, named), REPO_KEY
    if chosen := _chosen_repo(environ):
        return _hub_url(REPO_FILE, chosen), REPO_FILE
    return None, ""


def _hub_url(key: str, repo: str) -> str:
    if not _is_repo(repo):
        raise ConfigError(f"{key}={repo!r} is no repository of the hub; give owner/name")
    return f"hf://{repo}/{FOLDER}"


def _is_repo(text: str) -> bool:
    owner, slash, name = text.partition("/")
    return bool(owner and slash and name) and "/" not in name and " " not in text


def _chosen_repo(environ: Mapping[str, str]) -> str:
    home = environ.get("HF_HOME", "").strip() or "~/.cache/huggingface"
    try:
        found = (Path(home).expanduser() / REPO_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return found if _is_repo(found) else ""


def _compile_cache(environ: Mapping[str, str]) -> tuple[str, str]:
    """(the compiler's own cache, where the user says one, what says so): its flag, then its variable."""
    flags = _flags(environ)
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in ("--cache_dir", "--cache-dir"):
            return value if equals else next(iter(flags[place + 1 :]), ""), f"{FLAGS_KEY}: {name}"
    return environ.get(COMPILE_CACHE_KEY, "").strip(), COMPILE_CACHE_KEY


def _flags(environ: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(environ.get(FLAGS_KEY, ""))
    except ValueError as error:
        raise ConfigError(f"{FLAGS_KEY}={environ[FLAGS_KEY]!r}: {error}; check its quotes") from None


def is_remote(text: str) -> bool:
    return "://" in text and not text.startswith("file://")


def local_or_default(environ: Mapping[str, str] = os.environ, artifacts: str | None = None) -> Path:
    """For a command that needs a directory whatever the server would do."""
    found = _local(environ, artifacts, has_remote=True)
    assert found is not None
    return found
