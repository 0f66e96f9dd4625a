"""The work of a step on a few records, where a `Column` would cost more than the work itself.

n values of a column are here, by their kind:

* number: float64[n], NaN being missing
* integer: a list of int, None being missing
* text: a list of str, None and "" being missing
* hex32: a list of 1 to 8 hexadecimal digits each, None and "" being missing
* id: int64[n]

and `PlainLists` of m of them where a row holds a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from terarec.etl.columns import DTYPES, Kind
from terarec.kernels.cpu.encoding import numbers_of_list
from terarec.kernels.encoding_types import RefusedValueError


class PlainLists(NamedTuple):
    """n lists: their m values one after another, and n + 1 offsets, where each begins."""

    items: Any
    offsets: Sequence[int]

    def each(self) -> list[Any]:
        """The n lists."""
        return [self.items[begin:end] for begin, end in pairwise(self.offsets)]


class PlainFunction(NamedTuple):
    """What makes some columns of a few records of some others. It raises `RefusedValueError` for what it cannot take.

    Attributes:
        reads: the inputs.
        writes: the outputs.
        call: takes an argument for each input, gives a sequence with a member for each output. Of numbers as a matrix
            it takes and gives one float64[c, n], a row for each column.
        takes: "values"; "raw" values, as a caller gave them, of which it refuses those of another kind itself; or
            numbers and integers, one a row, as a "matrix".
        gives: "values" or a "matrix".
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    call: Callable[..., Any]
    takes: Literal["values", "raw", "matrix"] = "values"
    gives: Literal["values", "matrix"] = "values"


def item_function(
    name: str, output: str, call: Callable[[Any], Any], *, is_list: bool, takes: Literal["values", "raw"] = "values"
) -> PlainFunction:
    """What `call` makes of the values of one column, item by item where these are lists."""

    def of_values(values: Any) -> Sequence[Any]:
        return (call(values),)

    def of_lists(lists: PlainLists) -> Sequence[Any]:
        return (PlainLists(call(lists.items), lists.offsets),)

    return PlainFunction((name,), (output,), of_lists if is_list else of_values, takes)


def as_numbers(values: Any) -> Any:
    """Numbers or integers as float64[n], NaN where missing."""
    return numbers_of_list(values, whole=True) if isinstance(values, list) else values


def checked_integers(values: list[Any]) -> list[Any]:
    """`values`, integers of 64 bits and None; raises `RefusedValueError` for others."""
    numbers_of_list(values, whole=True)
    return values


def checked_texts(values: list[Any]) -> list[Any]:
    """`values`, texts and None; raises `RefusedValueError` for others, and for lone surrogates."""
    for row, value in enumerate(values):
        if value is not None and not (isinstance(value, str) and (value.isascii() or is_utf8(value))):
            raise RefusedValueError(row)
    return values


def is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def joined(lists: Sequence[Sequence[Any]], kind: Kind) -> PlainLists:
    """Lists of values of a kind as `PlainLists`."""
    offsets: list[int] = [0]
    items: list[Any] = []
    for values in lists:
        items.extend(values)
        offsets.append(len(items))
    return PlainLists(np.array(items, dtype=DTYPES[kind]) if kind in ("number", "id") else items, offsets)
