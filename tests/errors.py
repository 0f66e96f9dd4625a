"""Checks of errors by their attributes."""

from collections.abc import Callable

from terarec.errors import TerarecError


def at(where: str) -> Callable[[TerarecError], bool]:
    """Return the `check` of `pytest.raises` that an error is at this argument, JSON path or place in a file."""

    def is_there(error: TerarecError) -> bool:
        assert error.where == where
        return True

    return is_there
