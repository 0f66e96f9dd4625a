"""`RowStoreTier`: rows on a disk, in row files or RocksDB."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from terarec.checkpoint.directory import WEIGHTS
from terarec.errors import FormatError, StorageError
from terarec.kernels.cpu.host import empty_floats
from terarec.kernels.slots import SLOT_BYTES, RowBatch
from terarec.ps.tier import Found, TierStatistics, as_bytes, as_rows, check_insert, check_key_tensor
from terarec.spec import RocksDBSpec, RowFileSpec
from terarec.storage.cached_rows import CachedRows, read_together
from terarec.storage.rocksdb_store import RocksDBStore
from terarec.storage.row_file import RowFile
from terarec.storage.row_format import RowColumn, read_description
from terarec.storage.row_levels import TableStores
from terarec.storage.row_store import LEAST_ROW_BYTES, SCAN_ROWS, RowStore


class RowStoreTier:
    """Rows of a table in a row store. Implements `terarec.ps.Tier`.

    Rows may hold more than the vector, such as a training's optimizer state; then they are read alone.

    Attributes:
        store: The row store.

    Args:
        name: "row_file" or "rocksdb".
        store: An open store; None for one that does not exist yet.
        width: Length D of a vector.
        create: Creates the store when the first row is inserted, or again after `clear`; None to serve it read-only.
        column: Offset in bytes and element type of the vector in a row.
        cache_bytes: Maximum host memory for rows that were read or written; 0 for none.
    """

    def __init__(
        self,
        name: str,
        store: RowStore | None,
        width: int,
        create: Callable[[], RowStore] | None = None,
        column: tuple[int, str] = (0, "float32"),
        cache_bytes: int = 0,
    ) -> None:
        self.name = name
        self.width = width
        self.store = store
        self._cache_bytes = cache_bytes
        self._rows: TableStores | CachedRows | None = None if store is None else self._level(store)
        self._create = create
        self._column = column
        self._lock = threading.Lock()
        self._counted = TierStatistics()

    @property
    def is_writable(self) -> bool:
        """Whether rows can be inserted and erased."""
        return self._create is not None

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the store's last commit; nothing where there is no store."""
        return {} if self.store is None else self.store.metadata

    def count(self) -> int:
        """Return the number of rows."""
        return 0 if self._rows is None else self._rows.count(0)

    def lookup(self, keys: Tensor) -> Found:
        """Look up keys; see `Tier.lookup`."""
        # Both are read once: the first insertion may create them while this runs.
        keys, store, rows = check_key_tensor(keys), self.store, self._rows
        if store is None or rows is None:
            self._add(keys=keys.numel())
            return Found(torch.empty(keys.numel(), self.width), torch.zeros(keys.numel(), dtype=torch.bool))
        # Of floats, since large results come from memory that the core keeps, on pages that were touched before.
        held = empty_floats(keys.numel(), -(-store.row_bytes // 4)).view(torch.uint8)[:, : store.row_bytes]
        mask = rows.read(_batch(keys), held)
        self._add(keys=keys.numel(), hits=int(mask.count_nonzero()))
        return Found(as_rows(held.numpy(), self.width, *self._column), mask)

    @property
    def cached(self) -> CachedRows | None:
        """Rows in host memory in front of the store if they are stored as the looked-up floats; None otherwise."""
        return self._rows if isinstance(self._rows, CachedRows) and self._holds_vectors() else None

    def _holds_vectors(self) -> bool:
        return self._column == (0, "float32") and self.store is not None and self.store.row_bytes == 4 * self.width

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Set rows; see `Tier.insert`. Rows are visible at once, and durable after `flush`."""
        keys, rows = check_insert(keys, rows, self.width)
        store, level = self._writable()
        level.write(_batch(keys), torch.from_numpy(as_bytes(rows, store.row_bytes)))
        self._add(inserted=keys.numel())

    def erase(self, keys: Tensor) -> None:
        """Remove rows; see `Tier.erase`."""
        if self.store is not None or self._create is None:
            self._writable()[1].erase(_batch(torch.unique(check_key_tensor(keys))))

    def clear(self) -> None:
        """Remove all rows."""
        if self.store is None:
            return
        _, level = self._writable()
        # All keys first: a store must not be changed during a scan.
        held = [keys for keys, _ in level.items(0, SCAN_ROWS)]
        for keys in held:
            level.erase(_batch(keys))
        level.commit({})

    def flush(self) -> None:
        """Make inserted and erased rows durable."""
        # The metadata say what the rows were loaded from; a commit without them would drop that.
        self.commit(self.metadata)

    def commit(self, metadata: Mapping[str, str]) -> None:
        """Make inserted and erased rows durable, with `metadata`."""
        self._writable()[1].commit(metadata)

    def refresh(self) -> bool:
        """Read the last commit of another process, in a read-only row file; other stores have a single writer."""
        has_moved = isinstance(self.store, RowFile) and not self.is_writable and self.store.refresh()
        if has_moved and isinstance(self._rows, CachedRows):
            self._rows.forget()  # which rows the other process changed is not known
        return has_moved

    def statistics(self) -> TierStatistics:
        """Return the counters of the tier."""
        return self._counted

    def close(self) -> None:
        """Close the store; changes that were not flushed are lost."""
        if self.store is not None:
            self.store.close()

    def _level(self, store: RowStore) -> TableStores | CachedRows:
        stores = TableStores([store])
        if not self._cache_bytes:
            return stores
        return CachedRows(
            self._cache_bytes, store.row_bytes, stores, slot_bytes=SLOT_BYTES, name=self.name, keeps_read=True
        )

    def _writable(self) -> tuple[RowStore, TableStores | CachedRows]:
        if self._create is None:
            raise StorageError(self.name, "is open for reading only, expected no insertion")
        # Two insertions at the same time must not create the store twice.
        with self._lock:
            if self.store is None or self._rows is None:
                self.store = self._create()
                self._rows = self._level(self.store)
            return self.store, self._rows

    def note_lookup(self, keys: int, hits: int) -> None:
        """Count keys that were looked up, and those of them that had a row."""
        self._add(keys=keys, hits=hits)

    def _add(self, *, keys: int = 0, hits: int = 0, inserted: int = 0) -> None:
        with self._lock:
            # A new object each time, so that `statistics` needs no lock.
            old = self._counted
            self._counted = TierStatistics(keys=old.keys + keys, hits=old.hits + hits, inserted=old.inserted + inserted)


def look_up_cached(tiers: Sequence[tuple[RowStoreTier, CachedRows]], keys: Tensor, ends: Sequence[int]) -> Found:
    """Look up keys of tiers of one width with rows in host memory, in one pass over these.

    Args:
        tiers: Distinct tiers, each with its `cached` rows.
        keys: int64[n], which may repeat; those of tier i end before ``ends[i]``, where those of the next begin.
        ends: As above, rising; the last is n.

    Raises:
        StorageError: A file is damaged.
    """
    rows = empty_floats(keys.numel(), tiers[0][0].width)
    mask = read_together([cached for _, cached in tiers], keys, ends, rows.view(torch.uint8))
    all_there = bool(mask.all())
    for (tier, _), begin, end in zip(tiers, (0, *ends), ends, strict=False):
        hits = end - begin if all_there else int(mask[begin:end].count_nonzero())
        tier.note_lookup(end - begin, hits)
    return Found(rows, mask)


def row_file_tier(spec: RowFileSpec, directory: Path, table: str, width: int) -> RowStoreTier:
    """Open or create the row file of a table.

    Args:
        spec: Whether it is read-only.
        directory: Directory of the file.
        table: Name of the table.
        width: Length D of a vector.

    Raises:
        FormatError: No row file, or one of other vectors.
        StorageError: It is open for writing already, or damaged.
    """

    def create() -> RowStore:
        columns = (RowColumn(name=WEIGHTS, dtype="float32", shape=(width,)),)
        return RowFile.create(directory, _row_bytes(width), table=table, columns=columns)

    # An empty directory is as good as none: `RowFile.create` takes it.
    is_there = directory.is_dir() and any(directory.iterdir())
    if not is_there:
        if spec.read_only:
            raise FormatError(directory, "no such row file, expected one to open for reading only")
        return RowStoreTier(spec.kind, None, width, create, cache_bytes=spec.cache_bytes)
    column = _vector_column(directory, width)
    # Rows of a checkpoint have optimizer state next to the vector, which an insertion would have to make up.
    is_writable = not spec.read_only and len(read_description(directory).columns) == 1 and column == (0, "float32")
    store = RowFile.open(directory, read_only=spec.read_only)
    return RowStoreTier(spec.kind, store, width, create if is_writable else None, column, spec.cache_bytes)


def rocksdb_tier(spec: RocksDBSpec, directory: Path, table: str, width: int) -> RowStoreTier:
    """Open or create the RocksDB database of a table; the arguments are those of `row_file_tier`.

    Raises:
        FormatError: A database of others, or rows of another size.
        MissingDependencyError: ``rocksdict`` is not installed.
        StorageError: The database cannot be opened.
    """

    def create() -> RowStore:
        return RocksDBStore(directory, _row_bytes(width))

    if not directory.is_dir():
        return RowStoreTier(spec.kind, None, width, None if spec.read_only else create)
    store = RocksDBStore.open(directory)
    if store.row_bytes != _row_bytes(width):
        got = store.row_bytes
        store.close()
        raise FormatError(directory, f"holds rows of {got} bytes, expected {_row_bytes(width)} for table {table!r}")
    return RowStoreTier(spec.kind, store, width, None if spec.read_only else create)


def _batch(keys: Tensor) -> RowBatch:
    """Return keys of the only table of a store."""
    return RowBatch(keys, keys, torch.zeros_like(keys))


def _row_bytes(width: int) -> int:
    return max(LEAST_ROW_BYTES, 4 * width)


def _vector_column(directory: Path, width: int) -> tuple[int, str]:
    """Return the offset and the element type of the vector in the rows of a row file."""
    layout, offset = read_description(directory), 0
    for column in layout.columns:
        if column.name == WEIGHTS:
            if column.shape != (width,) or column.dtype not in ("float32", "bfloat16", "float16"):
                got = f"{column.dtype}{list(column.shape)}"
                raise FormatError(directory, f"holds weights {got}, expected floats [{width}]")
            return offset, column.dtype
        offset += column.num_bytes
    raise FormatError(directory, f"holds no column {WEIGHTS!r}, expected the rows of a table")
