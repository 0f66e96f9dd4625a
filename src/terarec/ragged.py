# SPDX-License-Identifier: Apache-2.0
"""`Ragged`: lists of different lengths as values and offsets, wherever they are not an Arrow array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

Values = TypeVar("Values")
Offsets = TypeVar("Offsets")
Results = TypeVar("Results")
Values_co = TypeVar("Values_co", covariant=True)
Offsets_co = TypeVar("Offsets_co", covariant=True)


class Ragged(NamedTuple, Generic[Values_co, Offsets_co]):
    """n lists of m values in all. List i is ``values[offsets[i] : offsets[i + 1]]``.

    Attributes:
        values: The values of all lists, one list after the other: a NumPy array, a tensor, a Python list, or any
            column of m values.
        offsets: N + 1 integers, rising from 0 to m: int64 in an array or a tensor.
    """

    values: Values_co
    offsets: Offsets_co


ArrayLists = Ragged[NDArray[Any], NDArray[np.int64]]
"""Lists in NumPy arrays."""


@overload
def flat_values(column: Ragged[Values, Any]) -> Values: ...
@overload
def flat_values(column: Values) -> Values: ...
def flat_values(column: Any) -> Any:
    """Return the values of a column, without the lists that they are in, if any."""
    return column.values if isinstance(column, Ragged) else column


def like_values(column: object, values: Values) -> Values | Ragged[Values, Any]:
    """Return m `values` in the lists of a column of m values, or unchanged if it has no lists."""
    return Ragged(values, column.offsets) if isinstance(column, Ragged) else values


def map_values(
    column: Values | Ragged[Values, Offsets], call: Callable[[Values], Results]
) -> Results | Ragged[Results, Offsets]:
    """Return the results of `call` for the values of a column, m for m values, in the lists of the column, if any."""
    return Ragged(call(column.values), column.offsets) if isinstance(column, Ragged) else call(column)


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the offsets int64[n + 1] of lists of ``lengths[n]`` values."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def slice_lists(lists: ArrayLists, start: int, stop: int) -> ArrayLists:
    """Return the lists ``start <= i < stop``; the values are a view."""
    values, offsets = lists
    # The offsets of a slice count from its first value, so they are a copy where the values are a view.
    return Ragged(values[offsets[start] : offsets[stop]], offsets[start : stop + 1] - offsets[start])


def take_lists(lists: ArrayLists, order: NDArray[np.int64]) -> ArrayLists:
    """Return the lists at the positions ``order[k]``."""
    values, offsets = lists
    taken = offsets_of(np.diff(offsets)[order])
    # Position of every value: where its list began, plus its place in the list.
    index = np.repeat(offsets[order] - taken[:-1], np.diff(taken)) + np.arange(taken[-1])
    return Ragged(np.take(values, index), taken)


def concatenate_lists(parts: list[ArrayLists]) -> ArrayLists:
    """Return the lists of at least one part, one part after the other."""
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))
