"""requirements.lock describes the environment the suite runs in, for every Python and architecture supported."""

from __future__ import annotations

import lock
import pytest

ALL = set(lock.ENVIRONMENTS)


def test_the_lock_is_what_this_environment_gives() -> None:
    assert lock.lock() == lock.LOCK.read_text(), "run `make lock`"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (ALL, ""),
        ({(python, "x86_64") for python in lock.PYTHONS}, 'platform_machine == "x86_64"'),
        ({("3.12", machine) for machine in lock.MACHINES}, 'python_version == "3.12"'),
        (
            {("3.12", "aarch64"), ("3.13", "aarch64")},
            '(python_version == "3.12" or python_version == "3.13") and platform_machine == "aarch64"',
        ),
    ],
)
def test_a_marker_says_where_a_line_is_needed(where: set[lock.Environment], expected: str) -> None:
    assert lock.marker(where) == expected


def test_where_no_simple_marker_fits_it_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no simple marker"):
        lock.marker({("3.11", "x86_64"), ("3.12", "aarch64")})


def test_what_another_section_brings_is_left_out_where_it_brings_it() -> None:
    serve = {"six": {("3.12", "x86_64"), ("3.13", "x86_64")}, "numpy": ALL}
    s3 = {"six": {("3.11", "x86_64"), ("3.12", "x86_64")}, "numpy": ALL, "s3fs": ALL}

    assert lock.without(s3, serve) == {"six": {("3.11", "x86_64")}, "s3fs": ALL}
