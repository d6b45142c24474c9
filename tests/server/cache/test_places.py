"""Which directory and which URL, by the options and by what the classic tools read."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.cache.places import Places, places

HOME = {"HF_HOME": "/no/home"}


@pytest.mark.parametrize(
    ("environ", "artifacts", "cache_url", "local", "remote"),
    [
        ({}, None, None, None, None),
        ({}, "/kept", None, "/kept", None),
        ({"HF_HOME": "/data"}, None, None, "/data/neuronserve", None),
        ({"HF_HOME": "/data", "HUGGINGFACE_HUB_CACHE": "/mnt"}, None, None, "/mnt/neuronserve", None),
        ({"HF_HUB_CACHE": "/hub"}, None, None, "/hub/neuronserve", None),
        ({"NEURON_COMPILE_CACHE_URL": "/var/cache"}, None, None, "/var/cache/neuronserve", None),
        ({"NEURON_COMPILE_CACHE_URL": "/var/cache", **HOME}, None, None, "/var/cache/neuronserve", None),
        ({"NEURON_COMPILE_CACHE_URL": "file:///var/cache"}, None, None, "/var/cache/neuronserve", None),
        ({"NEURON_COMPILE_CACHE_URL": "/var/cache"}, "/kept", None, "/kept", None),
        ({"NEURON_COMPILE_CACHE_URL": "s3://b/c/", **HOME}, None, None, "/no/home/neuronserve", "s3://b/c/neuronserve"),
        ({"NEURON_CC_FLAGS": "-O1 --cache_dir=/flag"}, None, None, "/flag/neuronserve", None),
        ({"NEURON_CC_FLAGS": "--cache_dir /flag"}, None, None, "/flag/neuronserve", None),
        (
            {"NEURON_CC_FLAGS": "--cache_dir=/flag", "NEURON_COMPILE_CACHE_URL": "s3://b"},
            None,
            None,
            "/flag/neuronserve",
            None,
        ),
        ({"NEURON_CC_FLAGS": "--cache_dir=s3://f", **HOME}, None, None, "/no/home/neuronserve", "s3://f/neuronserve"),
        ({"CUSTOM_CACHE_REPO": "org/cache"}, "/kept", None, "/kept", "hf://org/cache/neuronserve"),
        ({"CUSTOM_CACHE_REPO": "org/cache"}, "/kept", "s3://b/c", "/kept", "s3://b/c"),
        ({"CUSTOM_CACHE_REPO": "o/c", "NEURON_COMPILE_CACHE_URL": "s3://b"}, "/k", None, "/k", "hf://o/c/neuronserve"),
        ({"XDG_CACHE_HOME": "/xdg"}, None, "s3://b/c", "/xdg/neuronserve/artifacts", "s3://b/c"),
        ({"NEURON_CC_FLAGS": "--no-cache"}, "/kept", "s3://b/c", None, None),
        ({"NEURON_CC_FLAGS": "-O1 --no_cache", **HOME}, None, None, None, None),
    ],
)
def test_the_order(
    environ: dict[str, str],
    artifacts: str | None,
    cache_url: str | None,
    local: str | None,
    remote: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/nowhere")  # a user's own `optimum-cli neuron cache set` is no part of the test
    found = places(environ, artifacts, cache_url)
    assert (None if found.local is None else str(found.local), found.remote) == (local, remote)


def test_the_repository_that_optimum_was_told(tmp_path: Path) -> None:
    (tmp_path / "optimum_neuron_custom_cache").write_text("org/mine\n")
    found = places({"HF_HOME": str(tmp_path)})
    assert (found.remote, found.remote_from) == ("hf://org/mine/neuronserve", "optimum_neuron_custom_cache")


@pytest.mark.parametrize(
    ("environ", "cache_url", "said_by"),
    [
        ({"NEURON_CC_FLAGS": "-O1 --cache_dir=s3://b", "NEURON_COMPILE_CACHE_URL": "s3://c"}, None, "--cache_dir"),
        ({"NEURON_CC_FLAGS": "--cache-dir s3://b"}, None, "--cache-dir"),
        ({"NEURON_COMPILE_CACHE_URL": "s3://b"}, None, "NEURON_COMPILE_CACHE_URL"),
        ({"CUSTOM_CACHE_REPO": "o/c", "NEURON_COMPILE_CACHE_URL": "s3://b"}, None, "CUSTOM_CACHE_REPO"),
        ({"NEURON_COMPILE_CACHE_URL": "s3://b"}, "s3://b/c", "cache_url"),
    ],
)
def test_a_shared_place_is_known_by_what_named_it(environ: dict[str, str], cache_url: str | None, said_by: str) -> None:
    found = places({**HOME, **environ}, None, cache_url)
    assert found.remote_from == (f"NEURON_CC_FLAGS: {said_by}" if said_by.startswith("--") else said_by)
    assert found.is_asked_for == (cache_url is not None)


def test_no_cache_is_said() -> None:
    found = places({"NEURON_CC_FLAGS": "--no-cache"}, "/kept")
    assert found.note.startswith("NEURON_CC_FLAGS=--no-cache: compiled graphs are neither looked up nor kept")
    assert found.note.endswith("artifacts notwithstanding")


@pytest.mark.parametrize(
    ("environ", "artifacts", "message"),
    [
        ({}, "s3://bucket", "artifacts='s3://bucket' is a URL.*use cache_url"),
        ({"CUSTOM_CACHE_REPO": "only-a-name"}, None, "CUSTOM_CACHE_REPO='only-a-name'.*give owner/name"),
        ({"NEURON_CC_FLAGS": "--cache_dir='open"}, None, "NEURON_CC_FLAGS=.*check its quotes"),
    ],
)
def test_what_is_no_place(environ: dict[str, str], artifacts: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        places(environ, artifacts)


def test_a_hub_repository_is_read_alone() -> None:
    assert not Places(None, "hf://org/cache/neuronserve").writes_remote
    assert Places(None, "s3://b/c").writes_remote
