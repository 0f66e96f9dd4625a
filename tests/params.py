# SPDX-License-Identifier: Apache-2.0
"""Parameters of tests: those of every run of the suite, and those that `make test-all` alone takes."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def in_every_run(chosen: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return `values`; those that are not `chosen` are slow.

    Raises:
        AssertionError: A chosen value is not among `values`.
    """
    values = list(values)
    assert all(value in values for value in chosen), chosen
    marks = [() if value in chosen else pytest.mark.slow for value in values]
    parts = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*part, marks=mark) for part, mark in zip(parts, marks, strict=True)]


def examples(most: int) -> int:
    """Return how many examples of a property are tried: `most` in `make test-all`, a quarter in other runs."""
    return most if settings.get_current_profile_name() == "thorough" else most // 4


def paired(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[Any]:
    """Return the product of three lists, the last of which is the shortest.

    Those that are not slow hold every pair of values of two lists at least once.
    """
    assert len(third) <= min(len(first), len(second))
    return [
        pytest.param(one, two, three, marks=() if (i + j) % len(third) == k else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, two in enumerate(second)
        for k, three in enumerate(third)
    ]
