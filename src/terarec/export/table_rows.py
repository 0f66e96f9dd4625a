"""`export_table`: the vectors of one table, as Parquet, NumPy or faiss files."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from terarec.checkpoint import load
from terarec.config import load_run
from terarec.errors import ConfigError, MissingDependencyError
from terarec.export.artifact import EXPORT_FILE
from terarec.io import atomic_dir, check_replaceable, write_versioned_json
from terarec.models.artifact import RUN_FILE, find_checkpoint, load_model
from terarec.models.artifact import tables as tables_of
from terarec.spec.registry import Registry

TABLE_FORMATS = Registry("format", {"parquet": "vectors.parquet", "npy": "vectors.npy", "faiss": "vectors.faiss"})
"""Format -> name of the file with the vectors."""
KEYS_FILE = "keys.npy"
_NAME, _VERSION = "terarec.export.table", 1
_CHUNK_ROWS = 65_536
_COMPARED_ROWS = 10_000

Chunks = Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableReport:
    """The result of an export of a table.

    Attributes:
        file: The file with the vectors.
        table: Name of the table.
        step: Training steps behind the vectors.
        rows: Number of vectors.
        width: Length D of a vector.
        max_abs_difference: Largest difference between vectors that were read back and those of the table.
        bytes: Size of the directory's files.
    """

    file: Path
    table: str
    step: int
    rows: int
    width: int
    max_abs_difference: float
    bytes: int


def export_table(
    run: Path | str,
    table: str,
    out: Path | str,
    *,
    format: str = "parquet",  # noqa: A002
    checkpoint: int | str | None = None,
) -> TableReport:
    """Write the vectors of a table of a run into the new directory `out`, and compare 10,000 of them with the table.

    Args:
        run: Directory of the run.
        table: Name of the table.
        out: Output directory.
        format: "parquet" for columns ``key`` and ``vector``; "npy" for ``vectors.npy`` float32[n, D] and ``keys.npy``
            int64[n]; "faiss" for a flat index of inner products whose ids are the keys.
        checkpoint: "last", "best" or a step; None as in `terarec.models.artifact.find_checkpoint`.

    Raises:
        ConfigError: `out` holds something, an unknown format or table, or vectors that were read back are others.
        DataNotFoundError: `run` is no run, or holds no complete checkpoint.
        FormatError: A damaged file.
        MissingDependencyError: ``faiss`` is not installed.
        StorageError: The disk is full; nothing is left behind.
    """
    run, out = Path(run), Path(out)
    file = TABLE_FORMATS.find(format)
    library = _faiss() if format == "faiss" else None
    check_replaceable(out)
    path = find_checkpoint(run, load_run(run / RUN_FILE), checkpoint)
    opened = load(path)
    files = opened.table_files()
    if table not in files.names:
        raise ConfigError("table", f"got {table!r}, expected one of {', '.join(files.names)}")
    shape = files.shape(table)

    def chunks() -> Chunks:
        if shape.seed is None:
            pieces = ((rows.keys, rows.weights) for rows in files.rows(table))
        else:  # the files leave out rows that training has not changed
            held = tables_of(load_model(run, opened.step).model)[table]
            all_keys = held.keys()
            begins = range(0, all_keys.numel(), _CHUNK_ROWS)
            exported = (held.export(all_keys[begin : begin + _CHUNK_ROWS]) for begin in begins)
            pieces = ((rows.keys, rows.weights) for rows in exported)
        for keys, weights in pieces:
            for begin in range(0, len(keys), _CHUNK_ROWS):
                part = slice(begin, begin + _CHUNK_ROWS)
                yield keys[part].cpu().numpy(), weights[part].float().cpu().numpy()

    with atomic_dir(out) as partial:
        if format == "parquet":
            rows = _write_parquet(partial / file, chunks(), shape.width)
        elif format == "npy":
            rows = _write_npy(partial, chunks(), shape.width)
        else:
            rows = _write_faiss(partial / file, chunks(), shape.width, library)
        difference = _largest_difference(partial / file, format, chunks(), library)
        content = {
            "run": str(run),
            "step": opened.step,
            "table": table,
            "file": file,
            "file_format": format,
            "rows": rows,
            "width": shape.width,
            "max_abs_difference": difference,
            "compared_rows": min(rows, _COMPARED_ROWS),
        }
        write_versioned_json(partial / EXPORT_FILE, _NAME, _VERSION, content)
        size = sum(held.stat().st_size for held in partial.iterdir())
    return TableReport(
        file=out / file,
        table=table,
        step=opened.step,
        rows=rows,
        width=shape.width,
        max_abs_difference=difference,
        bytes=size,
    )


def _write_parquet(path: Path, chunks: Chunks, width: int) -> int:
    schema = pa.schema([("key", pa.int64()), ("vector", pa.list_(pa.float32(), width))])
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for keys, vectors in chunks:
            column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), width)
            writer.write_table(pa.Table.from_arrays([pa.array(keys), column], schema=schema))
            count += len(keys)
    return count


def _write_npy(directory: Path, chunks: Chunks, width: int) -> int:
    """Write both arrays as they come; their headers are written last, when the number of rows is known."""
    kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        KEYS_FILE: (np.dtype("<i8"), ()),
        TABLE_FORMATS["npy"]: (np.dtype("<f4"), (width,)),
    }
    count = 0
    for name, (dtype, _) in kinds.items():
        with (directory / name).open("wb") as file:
            _npy_header(file, dtype, (2**62, *kinds[name][1]))
    start = {name: (directory / name).stat().st_size for name in kinds}
    with (directory / KEYS_FILE).open("ab") as of_keys, (directory / TABLE_FORMATS["npy"]).open("ab") as of_vectors:
        for keys, vectors in chunks:
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
    index = library.IndexIDMap2(library.IndexFlatIP(width))
    for keys, vectors in chunks:
        index.add_with_ids(np.ascontiguousarray(vectors), keys)
    library.write_index(index, str(path))
    return int(index.ntotal)


def _largest_difference(path: Path, format: str, chunks: Chunks, library: Any) -> float:  # noqa: A002
    """Return the largest difference of the first 10,000 vectors that were read back, whose keys have to be equal."""
    largest, begin = 0.0, 0
    read = _reader(path, format, library)
    for keys, vectors in chunks:
        keys, vectors = keys[: _COMPARED_ROWS - begin], vectors[: _COMPARED_ROWS - begin]
        found_keys, found = read(begin, len(keys))
        if not np.array_equal(found_keys, keys):
            raise ConfigError("export", f"the keys of rows {begin} to {begin + len(keys)} were read back as others")
        largest = max(largest, float(np.abs(found - vectors).max(initial=0.0)))
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
        held_keys, held = np.load(path.parent / KEYS_FILE, mmap_mode="r"), np.load(path, mmap_mode="r")
        return lambda begin, count: (held_keys[begin : begin + count], held[begin : begin + count])
    table = next(iter(pq.ParquetFile(path).iter_batches(_COMPARED_ROWS)), None)

    def read(begin: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        assert table is not None
        part = table.slice(begin, count)
        vectors = part.column("vector")
        return part.column("key").to_numpy(), vectors.flatten().to_numpy().reshape(count, vectors.type.list_size)

    return read


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        raise MissingDependencyError("faiss", "not installed, expected pip install faiss-cpu") from None
