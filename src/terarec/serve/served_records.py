# SPDX-License-Identifier: Apache-2.0
"""`ServedRecords`: a share of the requests, with their scores, as files of raw records."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from terarec.errors import ConfigError, TerarecError
from terarec.etl.cleaning import Cleaning
from terarec.etl.columns import ColumnType
from terarec.etl.workflow.raw_values import RawValues, read_raw_values
from terarec.io.files import AtomicFile
from terarec.io.locks import try_lock
from terarec.io.opening import open_file
from terarec.io.remote import PARTIAL_SUFFIX
from terarec.serve.input_drift import DriftWatch
from terarec.serve.protocol import InferRequest, InferResponse
from terarec.serve.served_model import ServedModel
from terarec.serve.session import InputColumn
from terarec.serve.sinks import QueuedSink
from terarec.spec import SourceColumn
from terarec.spec.checks import FieldError
from terarec.spec.serving_options import WatchingSpec

_LOGGER = logging.getLogger(__name__)

PREFIX = "served."
"""Begins the names of what a server adds to the columns of a record."""

_MOST_WAITING = 1024  # requests
_MOST_BYTES = 64 << 20  # of the requests that wait
_EVERY_SECONDS = 0.2
_UNFINISHED = re.compile(rf"\d{{8}}T\d{{6}}Z-[0-9a-f]{{8}}\.parquet\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}")
_YOUNG_SECONDS = 60.0  # in which an unfinished file stays in any case
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 16 << 20  # of the rows in memory, which become a row group


class _Scored(NamedTuple):
    """A request that was answered with scores.

    Attributes:
        request: The request.
        model: The version that scored it.
        response: Its answer.
        time_us: Time of the answer, in microseconds since 1970.
        num_bytes: About the memory of the request.
    """

    request: InferRequest
    model: ServedModel
    response: InferResponse
    time_us: int
    num_bytes: int


class ServedRecords(QueuedSink[_Scored]):
    """Writes a share of the requests to Parquet files, which ``terarec drift`` and ``prepare`` read as raw logs.

    A file has the raw columns of a model, as clients sent them, and those of `PREFIX`. It appears complete, when it is
    large or old enough. `_adding` guards `_num_bytes` and what comes into the queue; the rest belongs to the thread
    that writes.

    Args:
        spec: Directory, share and size of the files; None as the directory for no files.
        drift: What compares the records with the training data; None for nothing.
    """

    def __init__(self, spec: WatchingSpec, drift: DriftWatch | None = None) -> None:
        self._directory = None if spec.record_directory is None else Path(spec.record_directory)
        self._spec = spec
        self._drift = drift
        check_record_directory(spec)
        self._adding = threading.Lock()
        self._num_bytes = 0
        self._files: dict[tuple[Path, pa.Schema], _RecordFile] = {}
        super().__init__("served_records", _MOST_WAITING, _EVERY_SECONDS)

    def observe(self, request: InferRequest, model: ServedModel, answer: Future[InferResponse]) -> None:
        """See a request and its answer to come, and keep both if they are in the share. It does not wait."""
        if random.random() < self._spec.record_share:
            # Taken out when it is called: an answer that somebody holds keeps its callbacks.
            answer.add_done_callback(partial(self._take, [(request, model)]))

    def _take(self, observed: list[tuple[InferRequest, ServedModel]], answer: Future[InferResponse]) -> None:
        request, model = observed.pop()
        if answer.cancelled() or answer.exception() is not None:
            return
        size = request.num_bytes
        item = _Scored(request, model, answer.result(), time.time_ns() // 1000, size)
        with self._adding:
            is_taken = self._num_bytes + size <= _MOST_BYTES and len(self._waiting) < self._most_waiting
            if is_taken:
                self._num_bytes += size
                self._put(item)
        if not is_taken:
            self._lose("queue_full", request.num_records)

    @override
    def close(self) -> None:
        super().close()
        for key in list(self._files):
            self._finish(key)

    @override
    def _write(self, items: Sequence[_Scored]) -> None:
        with self._adding:
            self._num_bytes -= sum(item.num_bytes for item in items)
        for item in items:
            try:
                self._write_item(item)
            except Exception as error:  # whatever a value or a library raises: the records of others are written
                self._fail(error, item.request.num_records)
        for key in [key for key, file in self._files.items() if file.age >= self._spec.record_file_seconds]:
            self._finish(key)

    def _write_item(self, item: _Scored) -> None:
        columns, num_records = item.model.records(item.request)
        session = item.model.session
        if self._drift is not None:
            values = {column.name: _values(column, columns[column.name]) for column in session.inputs}
            self._drift.add(item.model, values, num_records)
        if self._directory is not None:
            source = session.workflow.spec.source
            values = {
                column.name: _logged(column, columns[column.name], source.column(column.name))
                for column in session.inputs
            }
            self._add(self._directory / item.model.name, _table(item, values, num_records))

    def _add(self, directory: Path, table: pa.Table) -> None:
        key = (directory, table.schema)
        try:
            if key not in self._files:
                self._files[key] = _RecordFile(directory, table.schema)
            self._files[key].add(table)
            is_large = self._files[key].num_bytes >= self._spec.record_file_bytes
        except Exception as error:
            file = self._files.pop(key, None)
            if file is not None:
                file.abort()
            self._fail(error, table.num_rows if file is None else file.rows)
            return
        if is_large:
            self._finish(key)

    def _finish(self, key: tuple[Path, pa.Schema]) -> None:
        """Let a file appear."""
        file = self._files.pop(key)
        try:
            file.finish()
        except Exception as error:
            self._fail(error, file.rows)
        else:
            self._count(file.rows)


class _RecordFile:
    """A file under construction."""

    def __init__(self, directory: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._begun = time.monotonic()
        self._tables: list[pa.Table] = []
        self._table_rows = self._table_bytes = 0
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        # Of several processes, and machines, each has a name of its own.
        self._file = AtomicFile(directory / f"{now}-{os.urandom(4).hex()}.parquet", replace=False)
        with self._file.guard():
            self._writer = pq.ParquetWriter(self._file.partial, schema)

    @property
    def age(self) -> float:
        """Seconds since its beginning."""
        return time.monotonic() - self._begun

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk, and of the rows that are still in memory."""
        return self._file.partial.stat().st_size + self._table_bytes

    def add(self, table: pa.Table) -> None:
        """Add rows."""
        self.rows += table.num_rows
        self._tables.append(table)
        self._table_rows += table.num_rows
        self._table_bytes += table.nbytes
        if self._table_rows >= _GROUP_ROWS or self._table_bytes >= _GROUP_BYTES:
            self._write_group()

    def finish(self) -> None:
        """Let the file appear; it is gone after an error."""
        try:
            self._write_group()
            with self._file.guard():
                self._writer.close()
            self._file.commit()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove the file, after an error."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        self._file.abort()

    def _write_group(self) -> None:
        if not self._tables:
            return
        table = pa.concat_tables(self._tables).combine_chunks()
        self._tables, self._table_rows, self._table_bytes = [], 0, 0
        with self._file.guard():
            self._writer.write_table(table)


def check_record_directory(spec: WatchingSpec) -> None:
    """Make the directory of served records, before a model is loaded, which may take minutes.

    What a process that was killed has left there of unfinished files, which nothing can read, is removed.
    """
    if spec.record_directory is None:
        return
    directory = Path(spec.record_directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(directory, os.W_OK | os.X_OK)
        problem = "" if is_writable else "cannot be written to"
    except OSError as error:
        problem = f"cannot be made ({os.strerror(error.errno or 0)})"
    if not problem:
        _remove_abandoned(directory)
    else:
        expected = "a directory for files of records"
        raise FieldError(
            "WatchingSpec", "record_directory", f"got {str(directory)!r}, which {problem}, expected {expected}"
        )


def _remove_abandoned(directory: Path) -> None:
    """Remove unfinished files of servers that are gone, by their names, their locks and their age."""
    for file in directory.glob(f"*/*{PARTIAL_SUFFIX}"):
        if _UNFINISHED.fullmatch(file.name) is None:
            continue
        with contextlib.suppress(OSError, TerarecError):  # finished or removed meanwhile, or of another user
            # A new one may not have its lock yet.
            if time.time() - file.stat().st_mtime < _YOUNG_SECONDS:
                continue
            with open_file(file) as opened:
                if not try_lock(opened):
                    continue
                file.unlink()
            _LOGGER.info("removed %s, which a server that is gone did not finish", file)


def _table(item: _Scored, columns: Mapping[str, pa.Array], num_records: int) -> pa.Table:
    """Return the raw columns of a request, and what a server adds to them."""
    table, response = dict(columns), item.response
    scores = np.asarray(response.outputs[0].data, dtype=np.float32).reshape(response.outputs[0].shape)
    added = {
        **{name: pa.array(column) for name, column in zip(item.model.session.score_names, scores.T, strict=True)},
        "model": pa.repeat(response.model_name, num_records),
        "version": pa.repeat(response.model_version, num_records),
        "step": pa.repeat(pa.scalar(response.parameters["step"], pa.int64()), num_records),
        "time": pa.repeat(pa.scalar(item.time_us, pa.timestamp("us", "UTC")), num_records),
        "request": pa.repeat(pa.scalar(response.id, pa.string()), num_records),
    }
    for name, values in added.items():
        if PREFIX + name in table:
            raise ConfigError(f"column {PREFIX + name!r}", "has a name that served records need, expected another one")
        table[PREFIX + name] = values
    return pa.table(table)


def _values(column: InputColumn, values: RawValues) -> pa.Array:
    # Texts stay as they are: a workflow trims and reads them, once more, when it reads the file.
    kind = "text" if column.kind == "string" else column.kind
    return read_raw_values(column.name, values, ColumnType(kind, column.hotness != 1), None, Cleaning())


def _logged(column: InputColumn, values: RawValues, source: SourceColumn | None) -> pa.Array:
    """Return the values of a column as the logs have them, whose integers a model may take for numbers."""
    if column.kind == "number" and source is not None and source.type == "integer":
        column = replace(column, kind="integer")
        if isinstance(values, np.ndarray) and values.dtype.kind == "f":
            values = values.astype(np.float64)  # as JSON has them: they are no ids, which a narrow type would round
    return _values(column, values)
