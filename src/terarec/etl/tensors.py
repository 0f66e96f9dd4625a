"""Columns as tensors on a device, and operations on their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.etl.columns import (
    REJECTED_SHOWN,
    Kind,
    RowFaultError,
    flat,
    kind_of,
    list_offsets,
    numpy_values,
    validity,
)
from terarec.etl.values import ValueIds
from terarec.kernels.encoding_types import HASH_SEED
from terarec.kernels.hash_index import new_hash_index
from terarec.ragged import Ragged, flat_values
from terarec.spec import MISSING_ID


@dataclass(frozen=True, slots=True)
class TensorColumn:
    """m values of one kind on a device.

    Attributes:
        type: Kind of the values; there is no text on a device.
        values: Number: float64[m], NaN being missing. integer, hex32 and id: int64[m].
        missing: Integer and hex32: bool[m], their values being 0 there; None where nothing is missing, and for other
            kinds.
    """

    type: Kind
    values: Tensor
    missing: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of values m."""
        return self.values.shape[0]

    def is_missing(self) -> Tensor:
        """Return which of the m values are missing, bool[m]."""
        if self.type == "number":
            return self.values.isnan()
        return torch.zeros_like(self.values, dtype=torch.bool) if self.missing is None else self.missing

    def numbers(self) -> Tensor:
        """Return the m values as float64, NaN where missing; may share memory with `values`."""
        numbers = self.values.to(torch.float64)
        return numbers if self.missing is None else numbers.masked_fill(self.missing, torch.nan)

    def interval_ids(self, boundaries: Tensor) -> TensorColumn:
        """Return 0 for missing values, else 1 + the number of ``boundaries float64[k]``, rising, that are <= x."""
        numbers = self.numbers()
        ids = torch.searchsorted(boundaries, numbers, right=True) + 1
        return TensorColumn("id", ids.masked_fill(numbers.isnan(), MISSING_ID))

    def bucket_ids(self, buckets: int, seed: int) -> TensorColumn:
        """Return 0 for missing values, else ``1 + hash mod buckets``."""
        # torch's `remainder` has the sign of the divisor, like NumPy's: the ids are those of the CPU.
        ids = xxh64_int64(self.values, seed).remainder(buckets) + 1
        return TensorColumn("id", ids.masked_fill(self.is_missing(), MISSING_ID))


DeviceColumn: TypeAlias = TensorColumn | Ragged[TensorColumn, Tensor]
"""A value a row, or a list of values."""


@dataclass(frozen=True, slots=True)
class _ValueCheck:
    """Values that a step does not take, as far as there are any: `wrong` is bool[m], or bool[n] of lengths of lists."""

    name: str
    column: DeviceColumn
    wrong: Tensor
    expected: str
    kind: str
    of_lengths: bool


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """Rows on a device. Steps make new blocks, which share the checks.

    Attributes:
        columns: Name -> column.
        num_rows: Number of rows n.
    """

    columns: Mapping[str, DeviceColumn]
    num_rows: int
    _checks: list[_ValueCheck] = field(default_factory=list)

    def with_columns(self, columns: Mapping[str, DeviceColumn]) -> TensorBlock:
        """Return this block with `columns` added or replaced."""
        return TensorBlock({**self.columns, **columns}, self.num_rows, self._checks)

    def reject(
        self, name: str, wrong: Tensor, expected: str, *, kind: str = "rejected", of_lengths: bool = False
    ) -> None:
        """Reject the values of column `name` where `wrong`, as `raise_rejected` reports: this does not wait.

        Args:
            name: The column.
            wrong: bool[m], of its m values.
            expected: Accepted values.
            kind: One word for the kind of fault.
            of_lengths: Whether `wrong` is bool[n], of the lengths of its lists.
        """
        self._checks.append(_ValueCheck(name, self.columns[name], wrong, expected, kind, of_lengths))

    def failed_checks(self) -> Tensor | None:
        """Return bool[number of checks], on the device: which rejected a value; None without checks."""
        return torch.stack([check.wrong.any() for check in self._checks]) if self._checks else None

    def raise_rejected(self, failed: Tensor | None) -> None:
        """Wait for the device, once, and raise if `failed_checks` has a check that failed.

        Raises:
            RowFaultError: Of the first check that failed.
        """
        # One transfer for all checks: each would wait for the device.
        found = [] if failed is None else failed.tolist()
        if True in found:
            raise _row_fault(self._checks[found.index(True)])


def _row_fault(check: _ValueCheck) -> RowFaultError:
    column, items = check.column, check.wrong.nonzero().flatten().cpu().numpy()
    rows = items
    if isinstance(column, Ragged) and not check.of_lengths:
        offsets = column.offsets.cpu().numpy()
        rows, first = np.unique(np.searchsorted(offsets, items, side="right") - 1, return_index=True)
        items = items[first]
    shown = torch.from_numpy(items[:REJECTED_SHOWN]).to(check.wrong.device)
    if check.of_lengths and isinstance(column, Ragged):
        got = [f"got a list of {length}" for length in column.offsets.diff()[shown].tolist()]
    else:
        found = flat_values(column)
        missing, values = found.is_missing()[shown].tolist(), found.values[shown].tolist()
        got = ["got a missing value" if gone else f"got {value}" for value, gone in zip(values, missing, strict=True)]
    return RowFaultError(check.name, rows.astype(np.int64), got, check.expected, kind=check.kind)


TensorFunction: TypeAlias = Callable[[TensorBlock], Mapping[str, DeviceColumn]]
"""A step on a device: rows -> the columns that it writes."""


class TensorDevice:
    """Puts parameters and columns on a device.

    Args:
        device: The device.
        implementation: Implementation of the hash index there; see `terarec.kernels.registry`.
    """

    def __init__(self, device: torch.device | str, implementation: str = "auto") -> None:
        self.device = torch.device(device)
        self._implementation = implementation

    def numbers(self, values: Sequence[float] | NDArray[np.float64]) -> Tensor:
        """Return numbers as float64 of the same shape."""
        return torch.as_tensor(np.asarray(values, dtype=np.float64), device=self.device)

    def stack(self, rows: Sequence[Tensor]) -> Tensor:
        """Return vectors of one length as the rows of a matrix."""
        return torch.stack(list(rows))

    def values(self, kind: Kind, values: Tensor, missing: Tensor | None = None) -> TensorColumn:
        """Return values of a kind; see `TensorColumn`."""
        return TensorColumn(kind, values, missing)

    def ids(self, ids: ValueIds) -> DeviceIds:
        """Return a vocabulary of integers or hex32."""
        return DeviceIds(ids, self.device, self._implementation)

    def columns(self, arrays: Sequence[pa.Array]) -> list[DeviceColumn]:
        """Return the columns of Arrow arrays of `terarec.etl.columns.from_arrow`, other than text."""
        hosts = [_HostColumn.of(array) for array in arrays]
        values = _moved([host.values for host in hosts], self.device)
        bitmaps = _moved([host.valid for host in hosts if host.valid is not None], self.device)
        offsets = iter(_moved([host.offsets for host in hosts if host.offsets is not None], self.device))
        missing = iter(_missing(bitmaps))
        columns: list[DeviceColumn] = []
        for host, numbers in zip(hosts, values, strict=True):
            mask = None if host.valid is None else next(missing)[: numbers.shape[0]]
            if host.kind == "number":
                column = TensorColumn("number", numbers if mask is None else numbers.masked_fill(mask, torch.nan))
            else:
                column = TensorColumn(host.kind, numbers if mask is None else numbers.masked_fill(mask, 0), mask)
            columns.append(column if host.offsets is None else Ragged(column, next(offsets)))
        return columns


@dataclass(frozen=True, slots=True)
class _HostColumn:
    """An Arrow array as NumPy arrays that share its memory.

    Attributes:
        kind: Kind of the values.
        values: Values[m]; undefined where missing.
        valid: Validity bitmap, uint8[ceil(m / 8)]; None where nothing is missing.
        offsets: int64[n + 1] of lists; None for one value a row.
    """

    kind: Kind
    values: NDArray[Any]
    valid: NDArray[np.uint8] | None
    offsets: NDArray[np.int64] | None

    @classmethod
    def of(cls, array: pa.Array) -> _HostColumn:
        values = flat(array)
        valid = validity(values)
        if valid is not None:
            valid = valid[: -(-len(values) // 8)]
        return cls(kind_of(values), numpy_values(values), valid, list_offsets(array))


_ALIGNMENT = 16
"""Bytes; the size of the largest load of a thread on a GPU."""


def _moved(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors on a device, integers of 32 bits as int64.

    The arrays of a type go as one buffer, from pinned memory to a GPU: 40 copies and conversions of columns of 65,536
    rows take longer to launch than to run, and the host waits for copies from other memory (20 ms instead of 5, H100).
    """
    moved: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        chosen = [position for position, array in enumerate(arrays) if array.dtype == dtype]
        step = _ALIGNMENT // dtype.itemsize
        lengths = [len(arrays[position]) for position in chosen]
        ends = list(accumulate(-(-length // step) * step for length in lengths))
        is_pinned = device.type == "cuda"
        # torch reuses pinned memory only after copies from it have ended.
        host = torch.empty(ends[-1] * dtype.itemsize, dtype=torch.uint8, pin_memory=is_pinned)
        buffer = host.numpy().view(dtype)
        starts = [0, *ends[:-1]]
        for position, start, length in zip(chosen, starts, lengths, strict=True):
            buffer[start : start + length] = arrays[position]
        there = host.to(device, non_blocking=is_pinned).view(_TENSOR_TYPES[dtype.name])
        if dtype.name in ("int32", "uint32"):
            there = there.to(torch.int64)
        if dtype.name == "uint32":
            # Few operations of torch take uint32. Widening repeated the sign bit, which the mask takes off again.
            there &= 0xFFFFFFFF
        for position, start, length in zip(chosen, starts, lengths, strict=True):
            moved[position] = there[start : start + length]
    return [moved[position] for position in range(len(arrays))]


_TENSOR_TYPES = {
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint32": torch.int32,
    "uint8": torch.uint8,
}


def _missing(bitmaps: Sequence[Tensor]) -> list[Tensor]:
    """Return validity bitmaps uint8[k] as masks of the missing values, bool[8 k]."""
    if not bitmaps:
        return []
    valid = torch.cat(list(bitmaps))
    bits = torch.arange(8, dtype=torch.uint8, device=valid.device)
    missing = ((valid.unsqueeze(1) >> bits) & 1).flatten() == 0
    return list(torch.split(missing, [8 * bitmap.shape[0] for bitmap in bitmaps]))


class DeviceIds:
    """A vocabulary of integers or hex32 in a hash index on a device; see `ValueIds`, which it equals.

    Args:
        ids: The vocabulary.
        device: The device.
        implementation: Implementation of the hash index.
    """

    def __init__(self, ids: ValueIds, device: torch.device, implementation: str) -> None:
        self._hash_buckets = ids.hash_buckets
        self._index = new_hash_index(device, implementation)
        # Keys of a hash index are int64: hex32 are their numbers.
        values = torch.from_numpy(numpy_values(ids.values).astype(np.int64))
        self._index.assign(values.to(device), torch.arange(ids.first_id, ids.num_ids, device=device))

    def find(self, column: TensorColumn) -> TensorColumn:
        """Return the ids of the values."""
        found = self._index.find(column.values)
        if self._hash_buckets == 1:
            ids = found.clamp(min=1)  # -1 is absent, and ids of values begin at 2
        else:
            others = xxh64_int64(column.values, HASH_SEED).remainder(self._hash_buckets) + 1
            ids = found.where(found >= 0, others)
        return TensorColumn("id", ids if column.missing is None else ids.masked_fill(column.missing, MISSING_ID))


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_PRIMES: Sequence[int] = [
    _signed(prime)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
]


def xxh64_int64(values: Tensor, seed: int) -> Tensor:
    """Return the hashes int64[...] of ``values int64[...]``; see `terarec.kernels.ref.encoding.xxh64_int64`.

    Products and sums of int64 wrap around in torch as those of unsigned words do; right shifts are masked.
    """
    word = _rotate(values * _PRIMES[1], 31) * _PRIMES[0]
    hashed = word ^ _signed((seed + _PRIMES[4] + 8) % 2**64)
    hashed = _rotate(hashed, 27) * _PRIMES[0] + _PRIMES[3]
    hashed = (hashed ^ _shifted(hashed, 33)) * _PRIMES[1]
    hashed = (hashed ^ _shifted(hashed, 29)) * _PRIMES[2]
    return hashed ^ _shifted(hashed, 32)


def _shifted(word: Tensor, bits: int) -> Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _rotate(word: Tensor, bits: int) -> Tensor:
    return (word << bits) | _shifted(word, 64 - bits)
