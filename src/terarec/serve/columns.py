# SPDX-License-Identifier: Apache-2.0
"""Tensors of a request -> the raw columns of a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from terarec.errors import ConfigError
from terarec.etl.workflow.raw_values import RawValues, as_list
from terarec.etl.workflow.record_program import make_getter
from terarec.serve.padding import LENGTHS, MISSING, unpad, with_missing
from terarec.serve.protocol import (
    FLOATS,
    INTEGER_BITS,
    Elements,
    InferRequest,
    RequestTooLargeError,
    Tensor,
    TensorMetadata,
)
from terarec.serve.request_layouts import InputLayout, LaidOutTensors
from terarec.serve.request_memory import HeldMemory
from terarec.serve.session import ColumnKind, InputColumn
from terarec.spec.checks import quoted
from terarec.spec.registry import unknown_name

_DATATYPES: Mapping[ColumnKind, tuple[str, ...]] = {
    "string": ("BYTES",),
    "integer": tuple(INTEGER_BITS),
    "number": (*FLOATS, *INTEGER_BITS),
}
"""Kind of a raw column -> the datatypes that it accepts; the first is the one that the metadata names."""


class RecordColumns(NamedTuple):
    """Raw columns of the records of one request.

    Attributes:
        columns: Name -> B raw values.
        num_records: Number of records B.
    """

    columns: Mapping[str, RawValues]
    num_records: int


MOST_REPEATED = 2**24
"""Largest number of characters, or of items of lists, that a column takes after its one value was repeated.

A request states a long value once, and each of its records costs the workflow as much as if it were sent with it.
"""

ITEM_BYTES, _LIST_BYTES = 64, 72
"""Memory of an element that becomes an object of Python, short texts included, and of the list of a record."""

_MOST_LAYOUTS = 512
"""Layouts of requests that are kept."""

_FEW_RECORDS = 64
"""Records up to which the places of repeated values are not counted."""


class _Order(NamedTuple):
    """How the columns of a request follow from its tensors.

    Attributes:
        of_inputs: Elements of the tensors -> those of each input of the model, in their order.
        num_records: Number of records.
    """

    of_inputs: Callable[[Any], Sequence[Elements]]
    num_records: int


class ColumnReader:
    """Reads the raw columns of requests. Thread-safe.

    A column with one value counts for all records of its request: those of a user next to those of many items.

    Args:
        inputs: The raw columns that a record has.
        max_batch: Maximum number of records accepted in one request.
        absent_is_missing: Whether a column that a request does not have is taken as missing values.
    """

    def __init__(self, inputs: Sequence[InputColumn], *, max_batch: int, absent_is_missing: bool = False) -> None:
        self._max_batch = max_batch
        self._absent_is_missing = absent_is_missing
        self._inputs = {column.name: column for column in inputs}
        # Of the layouts that have come; read and changed by single operations of a dict.
        self._orders: dict[InputLayout, _Order | None] = {}
        self._lists = frozenset(column.name for column in inputs if column.hotness != 1)
        self._plain = {column.name: frozenset(_DATATYPES[column.kind]) for column in inputs if column.hotness == 1}

    def metadata(self) -> tuple[TensorMetadata, ...]:
        """Return the tensors of a request, one per column."""
        return tuple(
            TensorMetadata(
                name=column.name,
                datatype=_DATATYPES[column.kind][0],
                shape=(-1,) if column.hotness == 1 else (-1, column.hotness or -1),
            )
            for column in self._inputs.values()
        )

    def __call__(self, request: InferRequest, held: HeldMemory | None = None) -> RecordColumns:
        """Return the columns of a request.

        Args:
            request: The request.
            held: Counts the memory of columns that are made of its tensors; None for no limit.

        Raises:
            ServerBusyError: Other requests hold the memory that it needs.
            RequestTooLargeError: More records than `max_batch`.
            ConfigError: An input that is unknown, missing, repeated or of the wrong type or shape.
        """
        plain = self._plain_columns(request.inputs)
        if plain is not None:
            return plain
        columns: dict[str, tuple[Tensor, int]] = {}
        lengths: dict[str, tuple[Tensor, int]] = {}
        missing: dict[str, tuple[Tensor, int]] = {}
        for index, tensor in enumerate(request.inputs):
            name, target = tensor.name, columns
            if name in self._inputs:
                self._check_column(tensor, index)
            elif name.removesuffix(MISSING) in self._inputs:
                name, target = name.removesuffix(MISSING), missing
            else:
                name, target = name.removesuffix(LENGTHS), lengths
                if name not in self._lists or name == tensor.name:
                    raise unknown_name(f"inputs[{index}].name", tensor.name, self._inputs)
                _check_lengths(tensor, index)
            if name in target:
                problem = f"the input {quoted(tensor.name)} occurs twice, expected it once"
                raise ConfigError(f"inputs[{index}].name", problem)
            target[name] = tensor, index
        for name in lengths:
            if name not in columns:
                raise ConfigError("inputs", f"got the lengths of {name!r} without {name!r} itself, expected both")
        for name, (tensor, index) in missing.items():
            if name not in columns:
                problem = f"got the missing values of {name!r} without {name!r} itself, expected both"
                raise ConfigError("inputs", problem)
            _take_elements(held, columns[name][0])
            columns[name] = _masked(columns[name][0], tensor, index), columns[name][1]
        num_records = self._num_records({name: tensor for name, (tensor, _) in columns.items()})
        # In the order of the inputs, so that the columns of requests can be joined one by one.
        read: dict[str, RawValues] = {}
        absent: list[None] = []  # one for all columns
        counted = held if num_records > _FEW_RECORDS else None
        for name in self._inputs:
            if name not in columns:
                if not absent:
                    _take(counted, 8 * num_records)
                    absent = [None] * num_records
                read[name] = absent
                continue
            tensor, index = columns[name]
            values: RawValues = tensor.data
            if name in self._lists:
                _take_elements(held, tensor, _LIST_BYTES * tensor.shape[0])
                values = _lists(tensor, index, lengths.get(name))
            if len(values) != num_records:
                _take(counted, 8 * num_records)
                values = _repeated(name, values, num_records)
            read[name] = values
        return RecordColumns(read, num_records)

    def _plain_columns(self, tensors: Sequence[Tensor]) -> RecordColumns | None:
        """Return the columns of tensors that are all as they are in most requests; None for any other ones."""
        if isinstance(tensors, LaidOutTensors):
            layout, data = tensors.layout, tensors.data
            try:
                order = self._orders[layout]
            except KeyError:
                if len(self._orders) >= _MOST_LAYOUTS:
                    self._orders.clear()
                order = self._orders[layout] = self._order(layout.forms)
        else:
            data = [tensor.data for tensor in tensors]
            order = self._order([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors])
        if order is None:
            return None
        return RecordColumns(dict(zip(self._inputs, order.of_inputs(data), strict=True)), order.num_records)

    def _order(self, forms: Sequence[tuple[str, str, tuple[int, ...]]]) -> _Order | None:
        """Return how the columns follow from tensors of these names, datatypes and shapes; None for unusual ones."""
        places = {name: place for place, (name, _, _) in enumerate(forms)}
        # Fewer if one occurs twice.
        if not forms or len(forms) != len(self._inputs) or len(places) != len(forms):
            return None
        shape = forms[0][2]
        if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)) or shape[0] > self._max_batch:
            return None
        for name, datatype, other in forms:
            accepted = self._plain.get(name)
            if accepted is None or other != shape or datatype not in accepted:
                return None
        # In the order of the inputs, so that requests can be joined column by column.
        return _Order(make_getter([places[name] for name in self._inputs]), shape[0])

    def _num_records(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the number of records; raise unless every column is there and has that many, or one for all."""
        first, num_records = "", 1
        for name in self._inputs:
            if name not in tensors:
                if self._absent_is_missing and tensors:
                    continue
                raise ConfigError(f"column {name!r}", f"missing, expected {', '.join(self._inputs)}")
            size = tensors[name].shape[0]
            if size == num_records or size == 1:
                continue
            if first:
                problem = f"holds {size} values, expected {num_records} as in column {first!r}, or one for all records"
                raise ConfigError(f"column {name!r}", problem)
            first, num_records = name, size
        return num_records

    def _check_column(self, tensor: Tensor, index: int) -> None:
        """Check that datatype and shape of `tensor` are those of a raw column."""
        column = self._inputs[tensor.name]
        accepted = _DATATYPES[column.kind]
        if tensor.datatype not in accepted:
            raise ConfigError(
                f"inputs[{index}].datatype",
                f"got {tensor.datatype} for {tensor.name!r}, expected {' or '.join(accepted)}",
            )
        if not _fits(tensor.shape, column.hotness):
            bound = "" if column.hotness is None else f" with n <= {column.hotness}"
            expected = "[B] or [B, 1]" if column.hotness == 1 else f"[B, n]{bound}"
            raise ConfigError(
                f"inputs[{index}].shape",
                f"got {quoted(list(tensor.shape))} for {tensor.name!r}, expected {expected} for B records",
            )
        # The size of a body bounds records only roughly; what a batch takes in the model follows from their number.
        if tensor.shape[0] > self._max_batch:
            raise RequestTooLargeError(
                f"inputs[{index}].shape",
                f"got {tensor.shape[0]} records, expected at most {self._max_batch} in one request",
            )


def _take(held: HeldMemory | None, num_bytes: int) -> None:
    if held is not None:
        held.take(num_bytes)


def _take_elements(held: HeldMemory | None, tensor: Tensor, more: int = 0) -> None:
    """Count the elements of a tensor in new lists, and further bytes; those of a list are objects already."""
    each = 8 if isinstance(tensor.data, list) else ITEM_BYTES
    _take(held, each * len(tensor.data) + more)


def _fits(shape: tuple[int, ...], hotness: int | None) -> bool:
    if len(shape) == 1 or hotness is None:
        # A flat tensor has one value a record; lists of any length need their second dimension.
        return len(shape) == (1 if hotness == 1 else 2)
    return len(shape) == 2 and shape[1] <= hotness and (hotness > 1 or shape[1] == 1)


def _check_lengths(tensor: Tensor, index: int) -> None:
    if tensor.datatype not in INTEGER_BITS:
        problem = f"got {tensor.datatype} for {quoted(tensor.name)}, expected INT64"
        raise ConfigError(f"inputs[{index}].datatype", problem)
    if not _fits(tensor.shape, 1):
        got = quoted(list(tensor.shape))
        raise ConfigError(f"inputs[{index}].shape", f"got {got} for {quoted(tensor.name)}, expected [B] for B records")


def _masked(tensor: Tensor, mask: Tensor, index: int) -> Tensor:
    """Return a tensor without the elements that another one states to be missing."""
    if mask.datatype != "BOOL":
        problem = f"got {mask.datatype} for {quoted(mask.name)}, expected BOOL"
        raise ConfigError(f"inputs[{index}].datatype", problem)
    if mask.shape != tensor.shape:
        got, expected = quoted(list(mask.shape)), quoted(list(tensor.shape))
        raise ConfigError(f"inputs[{index}].shape", f"got {got}, expected {expected} as {quoted(tensor.name)}")
    return tensor._replace(data=with_missing(tensor.data, mask.data))


def _lists(tensor: Tensor, index: int, lengths: tuple[Tensor, int] | None) -> list[list[Any]]:
    """Return the items of each record of a tensor [B, n]."""
    num_records, width = tensor.shape
    counts, place = (None, "") if lengths is None else (as_list(lengths[0].data), f"inputs[{lengths[1]}].data")
    return unpad(as_list(tensor.data), (num_records, width), counts, where=f"inputs[{index}].data", lengths_where=place)


def check_repeated(name: str, value: object, num_records: int) -> int:
    """Return the number of characters or items of a value that `num_records` records are to have.

    Raises:
        RequestTooLargeError: They would have more than `MOST_REPEATED` in all.
    """
    size = value_size(value)
    if size * num_records > MOST_REPEATED:
        raise RequestTooLargeError(
            f"column {name!r}",
            f"got a value of {size} characters or items for {num_records} records, expected at most {MOST_REPEATED} "
            "in all; send fewer records at a time",
        )
    return size


def _repeated(name: str, values: Elements, num_records: int) -> RawValues:
    """Return the one value of a column for each record."""
    check_repeated(name, values[0], num_records)
    if isinstance(values, np.ndarray):
        return np.repeat(values, num_records)
    # Not `take`, which would copy the text for each record.
    return values.to_pylist() * num_records if isinstance(values, pa.Array) else [*values] * num_records


def value_size(value: Any) -> int:
    """Return the number of characters or items of a value."""
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if isinstance(value, list):
        return sum(map(value_size, value), start=1)
    return len(value) if isinstance(value, str | bytes) else 1
