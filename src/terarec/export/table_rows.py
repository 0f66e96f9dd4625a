# SPDX-License-Identifier: Apache-2.0
"""The rows of tables in files of other libraries: Parquet, NumPy or faiss."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from terarec.checkpoint import Checkpoint, load
from terarec.checkpoint.directory import KEYS, STATE_PREFIX, WEIGHTS
from terarec.config import load_run
from terarec.config.files import RUN_FILE
from terarec.errors import ConfigError, MissingDependencyError
from terarec.export.artifact import EXPORT_FILE
from terarec.formats.container import BFLOAT16, widen_bfloat16
from terarec.io.directories import atomic_dir, check_replaceable
from terarec.io.files import atomic_file, write_versioned_json
from terarec.io.opening import arrow_file, link, open_file
from terarec.models.artifact import find_checkpoint, load_without_tables
from terarec.ps.table import DefaultRows, default_rows
from terarec.spec import TableSpec
from terarec.spec.registry import Registry, unknown_name

TABLE_FORMATS = Registry("format", {"parquet": "vectors.parquet", "npy": "vectors.npy", "faiss": "vectors.faiss"})
"""Format -> name of the file with the vectors."""
KEYS_FILE = "keys.npy"
_NAME, _VERSION = "terarec.export.table", 1
_CHUNK_ROWS = 65_536
_COMPARED_ROWS = 10_000


class TableChunk(NamedTuple):
    """Rows of a table: keys int64[n], vectors float32[n, D] and states of the row optimizer, [n] or [n, D].

    Rows that training has not changed have no states.
    """

    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]
    states: Mapping[str, NDArray[Any]]


Chunks = Iterator[TableChunk]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableReport:
    """The result of an export of a table.

    Attributes:
        file: The file with the vectors.
        table: Name of the table.
        step: Training steps of the vectors.
        rows: Number of vectors.
        width: Length D of a vector.
        max_abs_difference: Largest difference between vectors that were read back and those of the table.
        bytes: Size of the table's files.
    """

    file: Path
    table: str
    step: int
    rows: int
    width: int
    max_abs_difference: float
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingsReport:
    """The result of an export of all tables.

    Attributes:
        file: The directory, which has one for each table.
        step: Training steps of the vectors.
        rows: Number of vectors in all tables.
        max_abs_difference: The largest difference of all tables; see `TableReport`.
        bytes: Size of the files.
        tables: Report of each table.
    """

    file: Path
    step: int
    rows: int
    max_abs_difference: float
    bytes: int
    tables: tuple[TableReport, ...]


def export_table(
    run: Path | str,
    table: str,
    out: Path | str,
    *,
    format: str = "parquet",  # noqa: A002
    checkpoint: int | str | None = None,
    allow_import: Sequence[str] = (),
) -> TableReport:
    """Write the vectors of a table of a run into the new directory `out`, and compare 10,000 of them with the table.

    Args:
        run: Directory of the run.
        table: Name of the table.
        out: Output directory.
        format: "parquet" for columns ``key`` and ``vector``; "npy" for ``vectors.npy`` float32[n, D] and ``keys.npy``
            int64[n]; "faiss" for a flat index of inner products whose ids are the keys.
        checkpoint: "last", "best" or a step; None as in `terarec.models.artifact.find_checkpoint`.
        allow_import: Packages whose code a model of the kind "python" may name.

    Raises:
        ConfigError: `out` holds something, an unknown format or table, or vectors that were read back are others.
        DataNotFoundError: `run` is not a run, or holds no complete checkpoint.
        FormatError: A damaged file.
        MissingDependencyError: ``faiss`` is not installed.
        StorageError: The disk is full; nothing is left behind.
    """
    run, out = Path(run), Path(out)
    library = _library(format)
    check_replaceable(out)
    opened = _open(run, checkpoint)
    rows = _Rows(opened, table, run, allow_import)
    with atomic_dir(out) as partial:
        return _write(rows, partial, out, format, library, opened.step)


def export_embeddings(
    run: Path | str,
    out: Path | str,
    *,
    format: str = "parquet",  # noqa: A002
    checkpoint: int | str | None = None,
    allow_import: Sequence[str] = (),
) -> EmbeddingsReport:
    """Write the vectors of all tables of a run into the new directory `out`, which gets one directory for each table.

    Arguments and errors are those of `export_table`.
    """
    run, out = Path(run), Path(out)
    library = _library(format)
    check_replaceable(out)
    opened = _open(run, checkpoint)
    reports = []
    with atomic_dir(out) as partial:
        for table in opened.table_files().names:
            rows = _Rows(opened, table, run, allow_import)
            (partial / table).mkdir()
            reports.append(_write(rows, partial / table, out / table, format, library, opened.step))
    return EmbeddingsReport(
        file=out,
        step=opened.step,
        rows=sum(report.rows for report in reports),
        max_abs_difference=max((report.max_abs_difference for report in reports), default=0.0),
        bytes=sum(report.bytes for report in reports),
        tables=tuple(reports),
    )


def write_table_file(
    checkpoint: Path, table: str, out: Path, *, run: Path | None, allow_import: Sequence[str] = ()
) -> int:
    """Write the rows of a table with the states of the row optimizer to a Parquet file, piece by piece.

    The columns are ``key`` (int64), ``vector`` (a list of D float32) and each state by its name: a list of D numbers,
    or a number where it has one for a row; null for a row that training has not changed.

    Args:
        checkpoint: Directory of the checkpoint.
        table: Name of the table.
        out: The file; replaced if it is there.
        run: The run of the checkpoint; None if it is not there. A table in tiers needs it.
        allow_import: Packages whose code a model of the kind "python" may name.

    Returns:
        Number of rows.
    """
    rows = _Rows(load(checkpoint), table, run, allow_import)
    with atomic_file(out) as partial:
        return _write_parquet(partial, rows.chunks(), rows.width, with_states=True)


def table_chunks(
    run: Path | str, table: str, checkpoint: int | str | None = None, *, allow_import: Sequence[str] = ()
) -> Chunks:
    """Yield all rows of a table of a run, piece by piece.

    Arguments and errors are those of `export_table`.
    """
    run = Path(run)
    yield from _Rows(_open(run, checkpoint), table, run, allow_import).chunks()


def _open(run: Path, checkpoint: int | str | None) -> Checkpoint:
    return load(find_checkpoint(run, load_run(run / RUN_FILE), checkpoint))


class _Rows:
    """All rows of a table in a checkpoint, including rows that its files leave out."""

    def __init__(self, checkpoint: Checkpoint, table: str, run: Path | None, allow_import: Sequence[str]) -> None:
        self.table, self.run = table, run
        # Files of the checkpoint and no loaded table: a table may be larger than this machine's memory.
        self._files = checkpoint.table_files()
        if table not in self._files.names:
            raise unknown_name("table", table, self._files.names)
        shape = self._files.shape(table)
        self.width = shape.width
        self._spec: TableSpec | None = None
        self._first_rows: DefaultRows | None = None
        if shape.seed is not None:
            if run is None or not (run / RUN_FILE).is_file():
                problem = f"{checkpoint.path} leaves out rows that training has not changed, expected a RUN"
                raise ConfigError(f"table {table!r}", problem)
            # Initial rows follow from the table's spec and seed, and a run's model alone knows the spec.
            spec = load_without_tables(run, checkpoint.step, allow_import=allow_import).tables[table]
            assert isinstance(spec, TableSpec), "dynamic tables have all their rows"
            self._spec, self._first_rows = spec, default_rows(spec, shape.seed)

    def chunks(self) -> Chunks:
        """Yield the rows in pieces of at most 65,536."""
        # A byte a row, while the rows themselves pass in pieces.
        left_out = None if self._spec is None else np.ones(self._spec.rows, dtype=bool)
        first = 0
        for piece in self._files.pieces(self.table):
            count = len(piece[WEIGHTS])
            keys = piece[KEYS] if KEYS in piece else np.arange(first, first + count)
            if left_out is not None:
                left_out[keys] = False
            states = {name: tensor for name, tensor in piece.items() if name.startswith(STATE_PREFIX)}
            for begin in range(0, count, _CHUNK_ROWS):
                part = slice(begin, begin + _CHUNK_ROWS)
                yield TableChunk(
                    keys=keys[part].astype(np.int64, copy=False),
                    vectors=_wide(piece[WEIGHTS][part]).astype(np.float32, copy=False),
                    states={name.removeprefix(STATE_PREFIX): _wide(tensor[part]) for name, tensor in states.items()},
                )
            first += count
        if left_out is not None and self._first_rows is not None:
            others = np.flatnonzero(left_out)
            for begin in range(0, len(others), _CHUNK_ROWS):
                keys = others[begin : begin + _CHUNK_ROWS]
                yield TableChunk(keys, self._first_rows(torch.from_numpy(keys)).numpy(), {})


def _wide(values: NDArray[Any]) -> NDArray[Any]:
    return widen_bfloat16(values) if values.dtype == BFLOAT16 else values


def _write(rows: _Rows, partial: Path, out: Path, format: str, library: Any, step: int) -> TableReport:  # noqa: A002
    """Write the vectors into an existing directory, and compare them; `out` is the directory's final name."""
    file = TABLE_FORMATS[format]
    if format == "parquet":
        count = _write_parquet(partial / file, rows.chunks(), rows.width, with_states=False)
    elif format == "npy":
        count = _write_npy(partial, rows.chunks(), rows.width)
    else:
        count = _write_faiss(partial / file, rows.chunks(), rows.width, library)
    difference = _largest_difference(partial / file, format, rows.chunks(), library)
    content = {
        "run": str(rows.run),
        "step": step,
        "table": rows.table,
        "file": file,
        "file_format": format,
        "rows": count,
        "width": rows.width,
        "max_abs_difference": difference,
        "compared_rows": min(count, _COMPARED_ROWS),
    }
    write_versioned_json(partial / EXPORT_FILE, _NAME, _VERSION, content)
    return TableReport(
        file=out / file,
        table=rows.table,
        step=step,
        rows=count,
        width=rows.width,
        max_abs_difference=difference,
        bytes=sum(entry.stat().st_size for entry in partial.iterdir()),
    )


def _write_parquet(path: Path, chunks: Chunks, width: int, *, with_states: bool) -> int:
    columns: dict[str, pa.DataType] = {"key": pa.int64(), "vector": pa.list_(pa.float32(), width)}
    # The exit stack closes a writer that is opened only with the first piece.
    writer, count = None, 0
    with ExitStack() as stack:
        for chunk in chunks:
            arrays_of_chunk = {"vector": chunk.vectors, **(chunk.states if with_states else {})}
            arrays = {
                "key": pa.array(chunk.keys),
                **{name: _column(values) for name, values in arrays_of_chunk.items()},
            }
            if writer is None:  # the states are known with the first rows
                columns |= {name: array.type for name, array in arrays.items()}
                writer = stack.enter_context(pq.ParquetWriter(path, pa.schema(columns.items())))
            columns_of_chunk = [arrays.get(name, pa.nulls(len(chunk.keys), kind)) for name, kind in columns.items()]
            writer.write_table(pa.Table.from_arrays(columns_of_chunk, schema=writer.schema))
            count += len(chunk.keys)
        if writer is None:
            stack.enter_context(pq.ParquetWriter(path, pa.schema(columns.items())))
    return count


def _column(values: NDArray[Any]) -> pa.Array:
    """Return values [n] or [n, D] as an Arrow column."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _write_npy(directory: Path, chunks: Chunks, width: int) -> int:
    """Write both arrays as they come; their headers are written last, when the number of rows is known."""
    kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        KEYS_FILE: (np.dtype("<i8"), ()),
        TABLE_FORMATS["npy"]: (np.dtype("<f4"), (width,)),
    }
    count = 0
    # By hand, since `np.save` takes whole arrays and `open_memmap` the number of rows, which no piece knows.
    for name, (dtype, _) in kinds.items():
        with (directory / name).open("wb") as file:
            # As many digits as any number of rows has, so that the true one fits in its place.
            _npy_header(file, dtype, (2**62, *kinds[name][1]))
    start = {name: (directory / name).stat().st_size for name in kinds}
    with (directory / KEYS_FILE).open("ab") as of_keys, (directory / TABLE_FORMATS["npy"]).open("ab") as of_vectors:
        for keys, vectors, _ in chunks:
            of_keys.write(keys.astype("<i8", copy=False).tobytes())
            of_vectors.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
            count += len(keys)
    for name, (dtype, rest) in kinds.items():
        with (directory / name).open("r+b") as file:
            _npy_header(file, dtype, (count, *rest))
            assert file.tell() == start[name], "headers leave room for the digits of a length"
    return count


def _npy_header(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _write_faiss(path: Path, chunks: Chunks, width: int, library: Any) -> int:
    # IDMap2 rather than IDMap, as it can also reconstruct the vector of a key.
    index = library.IndexIDMap2(library.IndexFlatIP(width))
    for keys, vectors, _ in chunks:
        index.add_with_ids(np.ascontiguousarray(vectors), keys)
    library.write_index(index, str(path))
    return int(index.ntotal)


def _largest_difference(path: Path, format: str, chunks: Chunks, library: Any) -> float:  # noqa: A002
    """Return the largest difference of the first 10,000 vectors that were read back, whose keys have to be equal."""
    largest, begin = 0.0, 0
    read = _reader(path, format, library)
    for keys, vectors, _ in chunks:
        keys, vectors = keys[: _COMPARED_ROWS - begin], vectors[: _COMPARED_ROWS - begin]
        found_keys, vectors_of_file = read(begin, len(keys))
        if not np.array_equal(found_keys, keys):
            raise ConfigError("export", f"the keys of rows {begin} to {begin + len(keys)} were read back as others")
        largest = max(largest, float(np.abs(vectors_of_file - vectors).max(initial=0.0)))
        begin += len(keys)
        if begin == _COMPARED_ROWS:
            break
    if largest:
        raise ConfigError("export", f"vectors that were read back are {largest:.3g} off the table's, expected the same")
    return largest


def _reader(path: Path, format: str, library: Any) -> Any:  # noqa: A002
    if format == "faiss":
        index = library.read_index(str(path))
        keys = library.vector_to_array(index.id_map)
        return lambda begin, count: (keys[begin : begin + count], index.index.reconstruct_n(begin, count))
    if format == "npy":
        held_keys, mapped = _mapped(path.parent / KEYS_FILE), _mapped(path)
        return lambda begin, count: (held_keys[begin : begin + count], mapped[begin : begin + count])
    # The first rows alone are read, as no more are compared.
    with arrow_file(path) as file:
        table = next(iter(pq.ParquetFile(file).iter_batches(_COMPARED_ROWS)), None)

    def read(begin: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        assert table is not None
        part = table.slice(begin, count)
        vectors = part.column("vector")
        return part.column("key").to_numpy(), vectors.flatten().to_numpy().reshape(count, vectors.type.list_size)

    return read


def _mapped(path: Path) -> NDArray[Any]:
    with open_file(path) as file:
        array: NDArray[Any] = np.load(link(file.fileno(), path), mmap_mode="r", allow_pickle=False)
        return array


def _library(format: str) -> Any:  # noqa: A002
    """Return the library that a format needs; raise errors before anything is read."""
    TABLE_FORMATS.find(format)
    if format != "faiss":
        return None
    try:
        return importlib.import_module("faiss")
    except ImportError:
        raise MissingDependencyError("faiss", "not installed, expected pip install 'terarec[ann]'") from None
