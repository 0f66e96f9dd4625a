"""What the tests of several ops share."""

from collections.abc import Callable, Iterator

import pytest

from terarec.kernels.cpu import host


@pytest.fixture
def select() -> Iterator[Callable[[str], None]]:
    """Takes an instruction set for the rest of a test."""
    yield host.select
    host.select("auto")
