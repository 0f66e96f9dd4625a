# SPDX-License-Identifier: Apache-2.0
"""Loading of served tables in the background, from HugeCTR's sparse models and terarec's checkpoints, in parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from terarec.checkpoint import load
from terarec.checkpoint.directory import MANIFEST, state_id, step_of
from terarec.errors import DataNotFoundError, FormatError, StorageError
from terarec.formats.delta import StateId
from terarec.formats.hugectr.weights import (
    CHUNK_ROWS,
    SparseFileLayout,
    SparseRows,
    is_folder,
    open_sparse_folder,
    read_sparse_file,
)
from terarec.memory.guarded import Guarded
from terarec.memory.renewal import Replacement, RowChunk
from terarec.ps.table import TableTiers, last_places
from terarec.spec import ServedModelSpec, ServedTableSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """Rows of a table to load.

    Attributes:
        path: Folder, file or checkpoint of the rows.
        num_rows: Number of rows.
        read: Yields them; errors are `FormatError`.
        has_initial_values: Whether it leaves out rows that have the initial weights of a training.
        earlier: Names of the states from which the deltas of a checkpoint lead.
    """

    path: Path
    num_rows: int
    read: Callable[[], Iterator[RowChunk]]
    has_initial_values: bool = False
    earlier: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """See `source_identity`."""
        return source_identity(self.path)

    @property
    def state(self) -> str:
        """The identity of a checkpoint, which is the same on all machines; "" for other sources."""
        return self.identity if (self.path / MANIFEST).is_file() else ""


def source_identity(path: Path) -> str:
    """Return what tells the rows of the source at `path` from others.

    That is the state of a checkpoint, and path, size and time of other sources.
    """
    if (path / MANIFEST).is_file():
        return state_name(state_id(path, step_of(path)))
    try:
        files = sorted(path.iterdir()) if is_folder(path) else [path]
        stats = [file.stat() for file in files]
    except FileNotFoundError:
        raise _no_source(path) from None
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    return f"{path.resolve()} {sum(stat.st_size for stat in stats)} {newest}"


def state_name(state: StateId) -> str:
    """Return the name of the state of a checkpoint, as tiers store it beside their rows."""
    return f"step-{state.step} {state.id}"


def open_table_source(spec: ServedTableSpec) -> TableSource | None:
    """Open the source of a table, whose sizes are checked; None if the table has none.

    Raises:
        DataNotFoundError: No such file or folder.
        FormatError: A damaged file, or another width.
        ConfigError: A checkpoint without this table.
    """
    if spec.source is None:
        return None
    path = Path(spec.source)
    if (path / MANIFEST).is_file():
        return _checkpoint_source(path, spec)
    if is_folder(path):
        folder = open_sparse_folder(path, spec.width)
        return TableSource(path=path, num_rows=folder.count, read=lambda: _checked(path, folder.chunks(CHUNK_ROWS)))
    if not path.is_file():
        raise _no_source(path)
    layout = SparseFileLayout(width=spec.width, key_bytes=spec.key_bytes, has_slots=spec.has_slots)
    num_rows = path.stat().st_size // layout.record.itemsize
    # A file of such entries has no header: its size is all that shows another width or another type of keys.
    if path.stat().st_size % layout.record.itemsize:
        raise FormatError(path, f"holds {path.stat().st_size} bytes, expected entries of {layout.record.itemsize}")
    return TableSource(
        path=path, num_rows=num_rows, read=lambda: _checked(path, read_sparse_file(path, layout, CHUNK_ROWS))
    )


def _no_source(path: Path) -> DataNotFoundError:
    return DataNotFoundError(path, "no such file or folder, expected a sparse model or a checkpoint")


def _checkpoint_source(path: Path, spec: ServedTableSpec) -> TableSource:
    checkpoint = load(path)
    files = checkpoint.table_files()
    shape = files.shape(spec.name)
    if shape.width != spec.width:
        raise FormatError(path, f"table {spec.name!r} has rows of width {shape.width}, expected {spec.width}")

    def read() -> Iterator[RowChunk]:
        for rows in files.rows(spec.name):
            for begin in range(0, rows.keys.numel(), CHUNK_ROWS):
                part = slice(begin, begin + CHUNK_ROWS)
                yield _finite(path, RowChunk(rows.keys[part], rows.weights[part].float()))

    return TableSource(
        path=path,
        num_rows=shape.num_rows,
        read=read,
        has_initial_values=shape.seed is not None,
        earlier=tuple(map(state_name, checkpoint.earlier)),
    )


def _checked(path: Path, chunks: Iterator[SparseRows]) -> Iterator[RowChunk]:
    for chunk in chunks:
        yield _finite(path, RowChunk(torch.from_numpy(chunk.keys), torch.from_numpy(chunk.vectors)))


def _finite(path: Path, chunk: RowChunk) -> RowChunk:
    # One NaN in a vector would make each score that uses it NaN, long after the file was loaded.
    is_finite = chunk.rows.isfinite().all(1)
    if not bool(is_finite.all()):
        key = int(chunk.keys[~is_finite][0])
        raise FormatError(path, f"key {key}: got a vector with NaN or infinity, expected finite numbers")
    return chunk


def fill_tiers(table: TableTiers, source: TableSource, add: Callable[[int], None]) -> None:
    """Insert the rows of a source into the tiers that take them.

    A tier that fails is stale, unless no other one has all rows.

    Raises:
        FormatError: The source is damaged.
        StorageError: No tier with all rows can be written.
    """
    tiers, number = table.group.stack.levels, table.number
    takers = [tier for tier in tiers if tier.is_writable[number] and tier.share]
    # A store that outlives the process has the identity of its rows, so that a restart does not load it again.
    takers = [tier for tier in takers if tier.fences[number].state != source.identity]
    if not takers:
        add(source.num_rows)
        return
    others = [tier for tier in tiers if tier.is_complete and tier not in takers]

    def each(change: Callable[[Guarded], None]) -> None:
        for tier in tuple(takers):
            try:
                change(tier)
            except StorageError as error:
                takers.remove(tier)
                if not others and not any(other.is_complete for other in takers):
                    raise
                tier.fail(number, error, None)

    replacements: dict[Guarded, Replacement] = {}

    def replace(tier: Guarded) -> None:
        # On a server that several processes share, each with files of its own, only states of checkpoints have a name.
        state = source.state if tier.fences[number].is_shared else source.identity
        replacements[tier] = Replacement(tier, number, state, may_keep=True)

    def insert(tier: Guarded, chunk: RowChunk, begin: int) -> None:
        room = round(tier.share * source.num_rows) - begin
        if room > 0:
            values = chunk.rows[:room].contiguous().view(torch.uint8)
            replacements[tier].write(chunk.keys[:room], values)

    each(replace)
    begin = 0
    for chunk in source.read():
        last = last_places(chunk.keys)
        part = chunk if last is None else RowChunk(chunk.keys[last], chunk.rows[last])
        each(partial(insert, chunk=part, begin=begin))
        begin += chunk.keys.numel()
        add(chunk.keys.numel())
    # After all rows: a load that is cut short has no identity, and the next start loads again.
    each(lambda tier: replacements[tier].end())
    each(lambda tier: tier.commit(number))


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading a model: its rows so far, and all of them."""

    rows: int
    total: int


class Loading:
    """A version of a model that is being loaded in the background.

    Attributes:
        spec: The version.
    """

    def __init__(self, spec: ServedModelSpec, total: int, work: Callable[[Callable[[int], None]], None]) -> None:
        self.spec = spec
        self._total = total
        self._rows = 0
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"terarec-load-{spec.name}", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> LoadProgress:
        """Progress so far."""
        return LoadProgress(self._rows, self._total)

    @property
    def is_done(self) -> bool:
        """Whether loading ended, with or without an error."""
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """The error with which it ended; None while it runs or if it succeeded."""
        return self._error if self.is_done else None

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the end, and raise the error with which it ended.

        Raises:
            TimeoutError: It has not ended by then.
            TerarecError: The version was rejected; the active one is as before.
        """
        self._thread.join(timeout_seconds)
        if not self.is_done:
            raise TimeoutError(f"model {self.spec.name!r}: still loading, {self._rows:,} of {self._total:,} rows")
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Stop after the present part, and wait for that; the version is rejected then."""
        self._is_cancelled = True
        self._thread.join()

    def _run(self, work: Callable[[Callable[[int], None]], None]) -> None:
        try:
            work(self._add)
        except BaseException as error:  # raised by `wait`
            self._error = error

    def _add(self, rows: int) -> None:
        self._rows += rows
        # Raised between two parts, in the thread that loads, whose way out discards the version.
        if self._is_cancelled:
            raise StorageError(f"model {self.spec.name!r}", "loading was cancelled")
