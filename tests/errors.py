# SPDX-License-Identifier: Apache-2.0
"""Checks of errors by their attributes."""

from collections.abc import Callable
from pathlib import Path

from terarec.errors import TerarecError


def at(where: str | Path, problem: str = "") -> Callable[[TerarecError], bool]:
    """Return the `check` of `pytest.raises` that an error is at this argument, JSON path or place in a file.

    Args:
        where: The place.
        problem: Part of the problem, such as the received value, where several errors have the same place.
    """

    def is_there(error: TerarecError) -> bool:
        assert error.where == str(where), f"got an error at {error.where!r}"
        assert problem in error.problem, f"got the problem {error.problem!r}"
        return True

    return is_there
