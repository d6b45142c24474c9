"""Any field that changes gives another name, and nothing else does."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from hypothesis import assume, given
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


@given(KEYS, st.data())
def test_any_changed_field_is_another_name_and_is_said(one: ArtifactKey, data: st.DataObject) -> None:
    changed = data.draw(st.sampled_from(fields(ArtifactKey)))
    value = data.draw(BY_TYPE[str(changed.type)])
    # 1 and true are equal to Python, and different settings.
    assume(json.dumps(value, sort_keys=True) != json.dumps(getattr(one, changed.name), sort_keys=True))
    other = replace(one, **{changed.name: value})

    assert other.name != one.name
    said = {difference.field.partition(".")[0] for difference in one.differences(other)}
    assert said <= {changed.name}


@given(KEYS)
def test_a_key_that_was_written_down_is_the_same_key(one: ArtifactKey) -> None:
    read = ArtifactKey.from_json(json.loads(json.dumps(one.to_json())))
    assert read.name == one.name
    assert one.differences(read) == ()


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
