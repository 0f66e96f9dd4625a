"""Loading of served tables in the background, from HugeCTR's sparse models and terarec's checkpoints, in parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.checkpoint import load
from terarec.checkpoint.directory import MANIFEST
from terarec.errors import DataNotFoundError, FormatError, StorageError
from terarec.formats.hugectr import CHUNK_ROWS, SparseFileLayout, SparseRows, open_sparse_folder, read_sparse_file
from terarec.ps.disk import RowStoreTier
from terarec.ps.tier import Tier
from terarec.spec import ServedModelSpec, ServedTableSpec, TierSpec

_LOADED = "loaded"  # key in a row store's metadata: what its rows were loaded from


class RowChunk(NamedTuple):
    """Some rows of a table: keys int64[n] and rows float32[n, D]."""

    keys: Tensor
    rows: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """Rows of a table to load.

    Attributes:
        path: Folder, file or checkpoint of the rows.
        num_rows: Number of rows.
        read: Yields them; errors are `FormatError`.
        has_initial_values: Whether it leaves out rows that have the initial weights of a training.
    """

    path: Path
    num_rows: int
    read: Callable[[], Iterator[RowChunk]]
    has_initial_values: bool = False

    @property
    def identity(self) -> str:
        """Path, size and time of the source: other rows have another identity."""
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        stats = [file.stat() for file in files]
        return f"{self.path.resolve()} {sum(stat.st_size for stat in stats)} {max(stat.st_mtime_ns for stat in stats)}"


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
    if path.is_dir():
        folder = open_sparse_folder(path, spec.width)
        return TableSource(path=path, num_rows=folder.count, read=lambda: _checked(path, folder.chunks(CHUNK_ROWS)))
    if not path.is_file():
        raise DataNotFoundError(path, "no such file or folder, expected a sparse model or a checkpoint")
    layout = SparseFileLayout(width=spec.width, key_bytes=spec.key_bytes, has_slots=spec.has_slots)
    num_rows = path.stat().st_size // layout.record.itemsize
    # A file of such entries has no header: its size is all that shows another width or another type of keys.
    if path.stat().st_size % layout.record.itemsize:
        raise FormatError(path, f"holds {path.stat().st_size} bytes, expected entries of {layout.record.itemsize}")
    return TableSource(
        path=path, num_rows=num_rows, read=lambda: _checked(path, read_sparse_file(path, layout, CHUNK_ROWS))
    )


def _checkpoint_source(path: Path, spec: ServedTableSpec) -> TableSource:
    files = load(path).table_files()
    held = files.shape(spec.name)
    if held.width != spec.width:
        raise FormatError(path, f"table {spec.name!r} has rows of width {held.width}, expected {spec.width}")

    def read() -> Iterator[RowChunk]:
        for rows in files.rows(spec.name):
            for begin in range(0, rows.keys.numel(), CHUNK_ROWS):
                part = slice(begin, begin + CHUNK_ROWS)
                yield _finite(path, RowChunk(rows.keys[part], rows.weights[part].float()))

    has_initial_values = held.seed is not None
    return TableSource(path=path, num_rows=held.num_rows, read=read, has_initial_values=has_initial_values)


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


def fill_tiers(
    tiers: Sequence[Tier], specs: Sequence[TierSpec], source: TableSource, add: Callable[[int], None]
) -> None:
    """Insert the rows of a source into the tiers that take them.

    Args:
        tiers: Tiers of the table.
        specs: Their specs.
        source: Where the rows are.
        add: Called with the number of rows of each part.

    Raises:
        FormatError: The source is damaged.
        StorageError: A tier cannot be written.
    """
    takers: list[tuple[Tier, int]] = []
    for spec, tier in zip(specs, tiers, strict=True):
        share = spec.load_share
        # A store that outlives the process has the identity of its source, so that a restart does not load it again.
        has_them = isinstance(tier, RowStoreTier) and tier.metadata.get(_LOADED) == source.identity
        if tier.is_writable and share and not has_them:
            takers.append((tier, round(share * source.num_rows)))
    begin = 0
    for chunk in source.read():
        for tier, most in takers:
            if begin < most:
                part = RowChunk(chunk.keys[: most - begin], chunk.rows[: most - begin])
                tier.insert(*part)
        begin += chunk.keys.numel()
        add(chunk.keys.numel())
    for tier, _ in takers:
        if isinstance(tier, RowStoreTier):
            # After all rows: a load that is cut short has no identity, and the next start loads again.
            tier.commit({_LOADED: source.identity})


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
