"""Raw values of a few records, as callers hold them in lists -> plain values. What is refused is told elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np

from terarec.etl.cleaning import Cleaning
from terarec.etl.columns import ColumnType
from terarec.etl.ops.record_values import Ragged, checked_integers, checked_texts
from terarec.etl.ops.values import HEX_DIGITS
from terarec.etl.workflow.raw_values import cut_text, time_reader
from terarec.kernels.cpu.encoding import numbers_of_list
from terarec.kernels.encoding_types import RefusedValueError
from terarec.spec import SourceColumn

PlainReader: TypeAlias = Callable[[list[Any]], Any]
"""Makes plain values of raw ones, or raises `RefusedValueError`."""


def plain_reader(
    found: ColumnType, source: SourceColumn | None, cleaning: Cleaning, *, is_checked: bool
) -> PlainReader | None:
    """What reads a column of raw values; None where they are plain values already.

    Args:
        found: the type that is wanted.
        source: how files spell the column, as for `read_column`.
        cleaning: what is done to the items of lists.
        is_checked: whether what takes the values refuses those of another kind.
    """
    is_time = source is not None and source.type == "time"
    items = None if is_checked and not is_time else _item_reader(found, source)
    if not found.is_list:
        return items
    separator = None if source is None else source.separator
    return partial(_read_lists, items, cleaning if cleaning.is_needed else None, separator, found.max_length)


def _item_reader(found: ColumnType, source: SourceColumn | None) -> PlainReader:
    if source is not None and source.type == "time":
        return partial(_read_times, time_reader(source.format))
    readers: dict[str, PlainReader] = {
        "number": numbers_of_list,
        "integer": checked_integers,
        "text": checked_texts,
        "hex32": _checked_digits,
    }
    return readers[found.kind]


def _checked_digits(values: list[Any]) -> list[Any]:
    for row, value in enumerate(values):
        if not (value is None or value == "" or (isinstance(value, str) and HEX_DIGITS.fullmatch(value))):
            raise RefusedValueError(row)
    return values


def _read_times(read: Callable[[Any], int], values: list[Any]) -> list[int | None]:
    try:
        return [None if value is None or value == "" else read(value) for value in values]
    except ValueError:
        raise RefusedValueError(0) from None


def _read_lists(
    items: PlainReader | None,
    cleaning: Cleaning | None,
    separator: str | None,
    max_length: int | None,
    values: list[Any],
) -> Any:
    lists = [_listed(value, separator) for value in values]
    flat = list(chain.from_iterable(lists))
    if cleaning is not None:
        flat = cleaning.values(flat)
    lengths = list(map(len, lists))
    if max_length is not None and max(lengths, default=0) > max_length:
        raise RefusedValueError(0)
    return Ragged(flat if items is None else items(flat), list(accumulate(lengths, initial=0)))


def _listed(value: Any, separator: str | None) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value)
    if separator is None or not isinstance(value, str):
        raise RefusedValueError(0)
    return cut_text(value, separator)
