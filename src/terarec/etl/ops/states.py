"""States of fitted operators: their files, and those of operators on numbers, a few parameters for each column.

Parameters are saved as JSON, what has a row for each value as Parquet. Described in docs/workflows.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from terarec.errors import DataNotFoundError, FormatError
from terarec.etl.columns import Rows, flat, list_offsets, numbers_of, numpy_values
from terarec.etl.statistics import GrowingSample, Moments, NumberRange, NumberSample
from terarec.formats.parquet import arrow_errors
from terarec.io import AtomicFile, read_versioned_json, write_versioned_json
from terarec.kernels.cpu.encoding import xxh64_int64
from terarec.spec import OperatorSpec
from terarec.spec.quoting import quoted

STATE_FORMAT = "terarec.state"
STATE_VERSION = 1


def write_params(directory: Path, name: str, kind: str, state: Mapping[str, Any]) -> None:
    """Write ``<name>.json``: the parameters of the step `name` of this `kind`; numbers come back bit for bit.

    Raises:
        StorageError: The disk is full.
    """
    write_versioned_json(directory / f"{name}.json", STATE_FORMAT, STATE_VERSION, {"kind": kind, "state": state})


def read_params(directory: Path, name: str, kind: str) -> Mapping[str, Any]:
    """Read what `write_params` wrote.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not a state, or one of another kind.
    """
    path = directory / f"{name}.json"
    content = read_versioned_json(path, STATE_FORMAT, STATE_VERSION)
    if content.get("kind") != kind:
        raise FormatError(f"{path}: $.kind", f"got {quoted(content.get('kind'))}, expected {kind!r}")
    state = content.get("state")
    if not isinstance(state, dict):
        raise FormatError(f"{path}: $.state", f"got {quoted(state)}, expected an object")
    return state


def table_path(directory: Path, name: str, part: str) -> Path:
    """Return ``<name>-<part>.parquet``; characters of `part`, a column, that no file name holds become ``%2F``."""
    return directory / f"{name}-{quote(part, safe=' ')}.parquet"


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file atomically.

    Raises:
        StorageError: The disk is full.
    """
    file = AtomicFile(path)
    with file.guard():
        pq.write_table(table, file.partial, write_page_checksum=True)
    file.commit()


def read_table(path: Path, types: Mapping[str, Sequence[pa.DataType]], nullable: Sequence[str] = ()) -> pa.Table:
    """Read what `write_table` wrote.

    Args:
        path: Path of the file.
        types: Its columns, and the types that each may have.
        nullable: Columns that may hold nulls.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not a Parquet file, other columns or types, or a null.
    """
    if not path.is_file():
        raise DataNotFoundError(path, "no such file")
    with arrow_errors(str(path)):
        table = pq.read_table(path, partitioning=None, page_checksum_verification=True)
    fields = {field.name: field.type for field in table.schema}
    if fields.keys() != types.keys() or any(found not in types[name] for name, found in fields.items()):
        shown = ", ".join(f"{name}: {found}" for name, found in fields.items())
        expected = ", ".join(f"{name}: {' or '.join(map(str, accepted))}" for name, accepted in types.items())
        raise FormatError(path, f"got columns {shown}, expected {expected}")
    for name in types:
        if name not in nullable and table.column(name).null_count:
            raise FormatError(f"{path}, column {name!r}", "holds nulls, expected none")
    return table.combine_chunks()


SAMPLE_SEED = 42
"""Seed of the hash of a row id that decides whether the row's number is in a sample."""

Params: TypeAlias = Mapping[str, Any]
"""Parameter -> float, or a tuple of floats."""

SummandT = TypeVar("SummandT", Moments, NumberRange)


@dataclass(frozen=True, slots=True)
class FittedNumbers:
    """State of a step on numbers.

    Attributes:
        kind: Kind of the step.
        columns: Input column -> its parameters.
    """

    kind: str
    columns: Mapping[str, Params]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``."""
        write_params(directory, name, self.kind, {"columns": self.columns})

    @classmethod
    def load(cls, directory: Path, name: str, spec: OperatorSpec, params: Sequence[str]) -> FittedNumbers:
        """Read what `save` wrote.

        Args:
            directory: Directory of the file.
            name: Name of the step.
            spec: The step.
            params: Names of the parameters of each column; plural ones are lists of numbers.

        Raises:
            DataNotFoundError: No such file.
            FormatError: Another kind, another parameter, or one that is no finite number.
        """
        columns = read_params(directory, name, spec.kind).get("columns")
        for column in spec.reads:
            found = columns.get(column) if isinstance(columns, dict) else None
            if not _are_params(found, params):
                expected = " and ".join(params)
                raise FormatError(
                    f"{directory / name}.json: $.state.columns.{column}", f"got {quoted(found)}, expected {expected}"
                )
        assert isinstance(columns, dict)
        return cls(spec.kind, {column: dict(map(_decoded, found.items())) for column, found in columns.items()})


def _are_params(found: Any, names: Sequence[str]) -> bool:
    def is_number(param: Any) -> bool:
        return isinstance(param, int | float) and not isinstance(param, bool) and math.isfinite(param)

    if not isinstance(found, dict) or set(found) != set(names):
        return False
    lists = {name for name in names if name.endswith("s")}
    return all(
        isinstance(param, list) and all(map(is_number, param)) if name in lists else is_number(param)
        for name, param in found.items()
    )


def _decoded(item: tuple[str, Any]) -> tuple[str, Any]:
    name, param = item
    return name, tuple(map(float, param)) if isinstance(param, list) else float(param)


class SummedStatistic(Generic[SummandT]):
    """Gathers statistics of columns that add up.

    Args:
        kind: Kind of the step.
        columns: Its inputs, numbers or integers; each item of a list counts.
        summand: Statistic of numbers, NaN being missing: `Moments` or `NumberRange`.
        params: Function from a column's sum to its parameters.
    """

    def __init__(
        self, kind: str, columns: Sequence[str], summand: type[SummandT], params: Callable[[SummandT], Params]
    ) -> None:
        self._kind = kind
        self._summand: type[SummandT] = summand
        self._figures: Callable[[SummandT], Params] = params
        self._sums: dict[str, SummandT] = {name: summand() for name in columns}

    def observe(self, rows: Rows) -> Mapping[str, SummandT]:
        """Return the summands of the columns of some training rows."""
        return {name: self._summand.of(_summands(rows.columns[name])) for name in self._sums}

    def merge(self, partial: Mapping[str, SummandT]) -> None:
        """Add the summands of a block."""
        for name, summand in partial.items():
            self._sums[name] = self._sums[name] + summand

    def partial(self) -> Mapping[str, SummandT]:
        """Return the sums so far."""
        return dict(self._sums)

    def finish(self) -> FittedNumbers:
        """Return the parameters."""
        return FittedNumbers(self._kind, {name: self._figures(total) for name, total in self._sums.items()})


def _summands(array: pa.Array) -> NDArray[Any]:
    """Return the m numbers of an array; integers as they are where none is missing, which spares a copy."""
    values = flat(array)
    return numbers_of(values) if values.null_count else numpy_values(values)


class SampleStatistic:
    """Gathers a `NumberSample` of columns; arguments as for `SummedStatistic`."""

    def __init__(self, kind: str, columns: Sequence[str], params: Callable[[NumberSample], Params]) -> None:
        self._kind = kind
        self._figures = params
        self._samples = {name: GrowingSample() for name in columns}

    def observe(self, rows: Rows) -> Mapping[str, NumberSample]:
        """Return samples of the columns of some training rows."""
        hashes = xxh64_int64(rows.ids, SAMPLE_SEED)
        return {name: _sample(rows.columns[name], hashes) for name in self._samples}

    def merge(self, partial: Mapping[str, NumberSample]) -> None:
        """Add the samples of a block."""
        for name, sample in partial.items():
            self._samples[name].add(sample)

    def partial(self) -> Mapping[str, NumberSample]:
        """Return the samples so far."""
        return {name: growing.sample() for name, growing in self._samples.items()}

    def finish(self) -> FittedNumbers:
        """Return the parameters."""
        samples = {name: growing.sample() for name, growing in self._samples.items()}
        return FittedNumbers(self._kind, {name: self._figures(sample) for name, sample in samples.items()})


def _sample(array: pa.Array, hashes: NDArray[np.int64]) -> NumberSample:
    numbers, offsets = numbers_of(array), list_offsets(array)
    if offsets is not None:
        hashes = np.repeat(hashes, np.diff(offsets))
    present = ~np.isnan(numbers)
    return NumberSample(hashes[present], numbers[present]).lowest()
