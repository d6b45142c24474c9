"""Any field that changes gives another name, and nothing else does."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from neuronserve.server.cache.key import ArtifactKey

from .samples import FIELDS, key

TEXT = st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)
BY_TYPE: Mapping[str, st.SearchStrategy[Any]] = {
    "str": TEXT,
    "int": st.integers(0, 10**6),
    "bool": st.booleans(),
    "str | None": st.none() | TEXT,
    "tuple[str, ...]": st.lists(TEXT, max_size=4).map(tuple),
    "Mapping[str, Any]": OBJECTS,
    "Mapping[str, str]": st.dictionaries(TEXT, TEXT, max_size=3),
    "Mapping[str, Any] | None": st.none() | OBJECTS,
}
KEYS = st.builds(ArtifactKey, **{each.name: BY_TYPE[str(each.type)] for each in fields(ArtifactKey)})


@pytest.mark.parametrize("changed", fields(ArtifactKey), ids=lambda field: field.name)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_changed_field_is_another_name_and_is_said(changed: Field[Any], data: st.DataObject) -> None:
    value = data.draw(BY_TYPE[str(changed.type)])
    # 1 and true are equal to Python, and different settings.
    assume(json.dumps(value, sort_keys=True) != json.dumps(getattr(key(), changed.name), sort_keys=True))
    other = replace(key(), **{changed.name: value})

    assert other.name != key().name
    said = {difference.field.partition(".")[0] for difference in key().differences(other)}
    assert said == {changed.name}


@settings(max_examples=50, deadline=None)
@given(KEYS)
def test_a_key_that_was_written_down_is_the_same_key(one: ArtifactKey) -> None:
    read = ArtifactKey.from_json(json.loads(json.dumps(one.to_json())))
    assert read.name == one.name
    assert one.differences(read) == ()


@settings(max_examples=50, deadline=None)
@given(OBJECTS, st.randoms(use_true_random=False))
def test_the_order_of_a_mapping_decides_nothing(values: dict[str, Any], rng: random.Random) -> None:
    shuffled = list(values.items())
    rng.shuffle(shuffled)
    assert key(neuron_config=values).name == key(neuron_config=dict(shuffled)).name


def test_differences_name_nested_fields_in_the_order_of_the_key() -> None:
    other = key(model={**FIELDS["model"], "rope_scaling": {"factor": 4.0}, "extra": 1}, compiler="neuronx-cc 2.19")
    assert [str(difference) for difference in key().differences(other)] == [
        "model.extra is absent here and 1 there",
        "model.rope_scaling.factor is 8.0 here and 4.0 there",
        'compiler is "neuronx-cc 2.20" here and "neuronx-cc 2.19" there',
    ]
