"""Places are tried, never awaited, and come back whatever happens."""

from __future__ import annotations

import pytest

from neuronserve.server.tgi.admission import Admission, share
from neuronserve.server.tgi.errors import Overloaded


def test_a_full_house_refuses() -> None:
    admission = Admission(3)
    with admission.admit(2):
        with pytest.raises(Overloaded, match=r"^Model is overloaded$"), admission.admit(2):
            pass
        with admission.admit(1):
            assert admission.num_free == 0
    assert admission.num_free == 3


def test_a_failure_gives_its_places_back() -> None:
    admission = Admission(1)
    with pytest.raises(KeyError), admission.admit(1):
        raise KeyError
    assert admission.num_free == 1


@pytest.mark.parametrize(("places", "processes", "each"), [(128, 1, 128), (128, 2, 64), (1, 4, 1)])
def test_processes_share(places: int, processes: int, each: int) -> None:
    assert share(places, processes) == each
