"""The mirror and the shared place together: what is found where, and what a miss says."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuronserve.server.cache.cache import Cache
from neuronserve.server.cache.explain import miss
from neuronserve.server.cache.manifest import Manifest, describe
from neuronserve.server.cache.places import Places
from neuronserve.server.cache.store import Store

from .samples import ABOUT, FIELDS, FILES, key, read_files, write_files


@pytest.fixture
def remote() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def machine(tmp_path: Path, remote: str) -> Callable[[str], Cache]:
    """`machine(name)`: a cache with a mirror of its own and the shared place."""
    return lambda name: Cache(Places(tmp_path / name, remote, "cache_url"))


def test_what_one_machine_made_another_finds_and_then_has_itself(
    machine: Callable[[str], Cache], graphs: Path, tmp_path: Path, remote: str
) -> None:
    lines = machine("one").keep(key(), graphs, ABOUT)
    assert [line.rpartition(" ")[2] for line in lines] == [str(tmp_path / "one"), remote]

    brought = machine("two").bring(key(), tmp_path / "work")
    assert brought.found
    assert f"from {remote}: 3 files" in brought.line
    assert read_files(tmp_path / "work") == FILES

    offline = Cache(Places(tmp_path / "two", "nosuch-host://"))
    assert offline.bring(key(), tmp_path / "work").found


def test_the_mirror_is_asked_first_and_alone(
    machine: Callable[[str], Cache], graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: str
) -> None:
    machine("one").keep(key(), graphs, ABOUT)
    asked: list[str] = []
    find = Store.find
    monkeypatch.setattr(Store, "find", lambda self, name: (asked.append(self.url), find(self, name))[1])

    assert machine("one").bring(key(), tmp_path / "work").found
    assert asked == [str(tmp_path / "one")]


def test_a_place_that_cannot_be_reached_is_a_line(graphs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(Places(tmp_path / "mirror", str(tmp_path / "file")))
    brought = cache.bring(key(), tmp_path / "work")
    assert not brought.found
    lines = cache.keep(key(), graphs, ABOUT)
    assert "are kept in" in lines[0]
    assert "were not kept: " in lines[1]
    assert cache.bring(key(), tmp_path / "work").found


def test_a_damaged_mirror_is_passed_over_and_healed_from_the_shared_place(
    machine: Callable[[str], Cache], graphs: Path, tmp_path: Path
) -> None:
    machine("one").keep(key(), graphs, ABOUT)
    for blob in (tmp_path / "one").rglob("blobs/*/*"):
        blob.write_bytes(b"rot")
    assert machine("one").bring(key(), tmp_path / "work").found
    assert read_files(tmp_path / "work") == FILES
    assert Cache(Places(tmp_path / "one")).bring(key(), tmp_path / "work").found


def test_damage_everywhere_is_a_miss_that_says_so(tmp_path: Path, graphs: Path) -> None:
    cache = Cache(Places(tmp_path / "mirror"))
    cache.keep(key(), graphs, ABOUT)
    for blob in (tmp_path / "mirror").rglob("blobs/*/*"):
        blob.unlink()
    brought = cache.bring(key(), tmp_path / "work")
    assert not brought.found
    assert "its entry is damaged (its file library/a.neff is missing)" in brought.line
    assert read_files(tmp_path / "work") == {}


def test_other_files_under_the_same_key_replace_the_entry(tmp_path: Path, graphs: Path) -> None:
    cache = Cache(Places(tmp_path / "mirror"))
    cache.keep(key(), graphs, ABOUT)
    assert cache.keep(key(), graphs, ABOUT) == []
    write_files(graphs, {"library/a.neff": b"compiled anew"})
    assert cache.keep(key(), graphs, ABOUT)
    cache.bring(key(), tmp_path / "work")
    assert read_files(tmp_path / "work")["library/a.neff"] == b"compiled anew"


def test_a_hub_repository_is_not_written_by_a_start(tmp_path: Path, graphs: Path) -> None:
    [line] = Cache(Places(tmp_path / "mirror", "hf://owner/name/neuronserve")).keep(key(), graphs, ABOUT)
    assert "mirror" in line


def entry(changes: dict[str, Any], model: str = "org/tiny", created: str = "2026-01-01T00:00:00+00:00") -> Manifest:
    return Manifest(key(**changes), (), created, {"model": model})


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], "DIR holds no entry"),
        ([{"compiler": "neuronx-cc 2.19"}], 'differs: compiler is "neuronx-cc 2.20" here and "neuronx-cc 2.19" there'),
        ([{"dtype": "float32"}], 'differs: dtype is "bfloat16" here and "float32" there'),
        ([{"tensor_parallel_size": 8}], "differs: tensor_parallel_size is 2 here and 8 there"),
        ([{"quantization": "int8"}], 'differs: quantization is none here and "int8" there'),
        ([{"compiler_flags": ()}], 'differs: compiler_flags is ["-O1"] here and [] there'),
        ([{"libraries": {"transformers-neuronx": "0.12"}}], 'libraries.transformers-neuronx is "0.13.1216" here and'),
        ([{"neuron_config": {"fuse_qkv": True, "qkv_tiling": True}}], "neuron_config.qkv_tiling is absent here and"),
        ([{"model": {**FIELDS["model"], "hidden_size": 128}}], "differs: model.hidden_size is 64 here and 128 there"),
        (
            [{"shapes": ("decode 4, context 128",)}],
            'shapes is ["decode 4, context 128", "prefill 64, ',
        ),
        ([{"isa": "avx2"}], 'isa is none here and "avx2" there'),
        ([{"max_num_seqs": 8, "dtype": "float32"}, {"max_num_seqs": 8}], "differs: max_num_seqs is 4 here and 8 there"),
        ([{"dtype": "float32", "compiler": "x"}], 'dtype is "bfloat16" here and "float32" there; compiler is'),
    ],
)
def test_a_miss_says_what_differs_from_the_nearest(entries: list[dict[str, Any]], expected: str) -> None:
    line = miss(key(), "DIR", [entry(changes) for changes in entries])
    assert line.startswith(f"no compiled graphs for this configuration ({key().name})")
    assert line.endswith(expected) or expected in line
    assert ("1 entry in DIR" if len(entries) == 1 else "DIR") in line
    assert "\n" not in line


def test_of_two_equally_near_the_newest_is_named() -> None:
    old = entry({"max_num_seqs": 1}, "old")
    new = entry({"max_num_seqs": 2}, "new", "2026-02-01T00:00:00+00:00")
    assert " of new, differs" in miss(key(), "DIR", [new, old])


def test_a_whole_start_again_is_the_same_entry(tmp_path: Path, graphs: Path) -> None:
    assert describe(graphs, key(), ABOUT).name == describe(graphs, key(), {"model": "another name"}).name
