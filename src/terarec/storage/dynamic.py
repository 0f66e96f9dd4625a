# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables: any int64 keys; training inserts rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from terarec.errors import ConfigError, KeyOutOfRangeError, StorageError
from terarec.memory.tiered_rows import TieredRows
from terarec.spec import DynamicTableSpec, EvictionSpec
from terarec.spec.tables import TTLEviction
from terarec.storage.changes import changes_since, discard_changes, follow_changes, mark_changes
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.key_rows import KeyRows
from terarec.storage.store import RowValues, check_import

_KEYS_AT_ONCE = 1 << 20  # that are compared, so that a scan of a large table takes little memory


class DynamicTable:
    """A table of a `DynamicArena` with an index of its keys. Implements `Store`.

    Attributes:
        spec: Name, width, initial weights, and the policies of admission and eviction.
        arena: Arena of the rows.
        number: Index of the table in its arena, which is also the arena row of its default vector.

    Args:
        spec: Description of the table.
        arena: Arena whose specs include this one.
        implementation: Implementation of the index: "auto" or a name of `terarec.kernels.registry.IMPLEMENTATIONS`.
    """

    is_dynamic = True
    is_part = False

    def __init__(self, spec: DynamicTableSpec, arena: DynamicArena, implementation: str = "auto") -> None:
        self.spec = spec
        self.arena = arena
        self._rows = KeyRows(spec, arena, implementation)
        self.number = self._rows.number
        # Tiers move rows by their keys when they are created again, and subtract key indexes from the budget.
        if isinstance(arena.data, TieredRows):
            arena.data.find_rows[self.number] = self._find_from_anywhere
            arena.data.sizes.key_bytes[self.number] = self._key_bytes

    @property
    def keyed(self) -> DynamicTable:
        """This table, whose keys come and go."""
        return self

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.spec.name

    @property
    def width(self) -> int:
        """Length D of a vector."""
        return self.spec.width

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors; empty until an optimizer is attached."""
        return tuple(self.arena.data.state_names)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index, and of the admission counts of keys without rows."""
        with self.arena.lock:
            admission = self._rows.admission
            return self._rows.index.memory_bytes + (admission.memory_bytes if admission is not None else 0)

    @property
    def initial_seed(self) -> int | None:
        """None: `export_changed` returns all rows."""
        return None

    @property
    def num_changed(self) -> int:
        """Rows that `export_changed` returns: all."""
        return len(self)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights, optimizer state and uses."""
        return self.arena.row_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the rows with their state, and of the index."""
        arena = self.arena
        if isinstance(arena.data, TieredRows):  # which its tables share
            return arena.data.memory_bytes // len(arena.specs) + self._key_bytes()
        return len(self) * arena.row_bytes + self.index_bytes

    def _key_bytes(self) -> int:
        return len(self) * (self.arena.row_bytes - self.arena.data.row_bytes) + self.index_bytes

    def _find_from_anywhere(self, keys: Tensor) -> Tensor:
        # The rows move to another device before the index does.
        return self._rows.find(keys.to(self._rows.index.device)).to(keys.device)

    @property
    def num_evicted(self) -> int:
        """Number of rows evicted so far."""
        return self._rows.num_evicted

    @property
    def num_batches(self) -> int:
        """Number of training batches that looked the table up, which ``uses["last_step"]`` refers to."""
        return self._rows.clock

    def __len__(self) -> int:
        with self.arena.lock:  # another thread may have inserted a part of its batch
            return len(self._rows.index)

    def keys(self) -> Tensor:
        """Return the keys int64[n] in ascending order, since the order in an index differs between processes."""
        with self.arena.lock:
            return self._rows.items()[0].sort().values

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return arena rows int64[n] of ``keys int64[n]``; the default row for a key that has none.

        With `train`, `keys` are those of one batch: keys that ``spec.admit`` admits are inserted, a full table evicts
        others for them, and their use is recorded.

        Raises:
            StorageError: Memory or table is full; nothing has changed.
        """
        with self.arena.transaction as transaction:
            rows = self._rows.find_or_insert(keys) if train else self._rows.find(keys)
            rows.masked_fill_(rows < 0, self.number)
            if train:
                # Noted at the end: a batch that is rolled back was no use of its rows, and its clock did not advance.
                transaction.on_commit(lambda: self._rows.note_use(rows))
        return rows

    def begin_part(self, hot: Tensor, most_imported: int | None) -> None:
        """Make an empty table the part of one on this rank.

        Args:
            hot: Keys int64[h], rising, whose rows other ranks have, too: they are never evicted.
            most_imported: ``max_rows`` of the whole table, up to which imports insert keys: of all ranks, this one may
                have the most.
        """
        self._rows.begin_part(hot, most_imported)

    def restart(self, seed: int) -> None:
        """Raise `StorageError`: a dynamic table has no rows without keys."""
        raise StorageError(f"table {self.name!r}: restart", "the table is dynamic, expected a static one")

    def evict(self, by: EvictionSpec | None = None, *, keep_at_least: int | None = None) -> Tensor:
        """Evict the rows that the policy ranks lowest, until `keep_at_least` are left.

        Pending gradients of these rows are lost. The rows are reused for other keys, with initial values and state.

        Args:
            by: Policy; None for ``spec.evict``. A time to live never evicts younger rows.
            keep_at_least: Rows to keep; None for 0 with a time to live, otherwise the size that a full table evicts
                down to.

        Returns:
            The evicted keys, int64[n], in ascending order.

        Raises:
            ConfigError: No policy, no size, or a policy that needs uses that the table does not track.
        """
        policy = self.spec.evict if by is None else by
        if not isinstance(policy, EvictionSpec):
            got = "no policy and the table has none" if policy is None else repr(policy)
            raise ConfigError(f"table {self.name!r}: evict", f"got {got}, expected e.g. lru()")
        if keep_at_least is None:
            keep_at_least = 0 if isinstance(policy, TTLEviction) else self._rows.size_after_eviction(policy)
        if not isinstance(keep_at_least, int) or keep_at_least < 0:
            raise ConfigError(f"table {self.name!r}: evict", f"got keep_at_least {keep_at_least!r}, expected rows >= 0")
        with self.arena.lock:
            return self._rows.evict(policy, keep=keep_at_least)

    def take_evicted(self) -> Tensor:
        """Return the keys int64[n] that were evicted since the last call and have no row now.

        These are the keys that copies of the table must delete.
        """
        with self.arena.lock:
            # A key may have been evicted twice since the last call, or have come back.
            keys: Tensor = torch.unique(self._rows.evicted)
            self._rows.evicted = keys[:0]
            return keys[self._rows.find(keys) < 0]

    def clear(self) -> None:
        """Remove all keys, uses and admission counts, as in a new table."""
        with self.arena.lock:
            self._rows.clear()

    def replace(self, rows: RowValues) -> None:
        """Replace the content by `rows`, as `import_` into a new table.

        Raises:
            ConfigError: A key that is repeated.
            StorageError: The table or memory is full, or weights or state of another shape; nothing has changed.
        """
        check_import(self.name, rows, self.arena.weights, self.arena.state)
        num_rows = rows.keys.numel()
        distinct, times = torch.unique(rows.keys, return_counts=True)
        if distinct.numel() < num_rows:
            key = int(distinct[times > 1][0])
            raise ConfigError(f"table {self.name!r}", f"got key {key} twice, expected distinct keys")
        with self.arena.lock:
            # Allocate first, since `clear` cannot be rolled back.
            self._rows.check_room(num_rows)
            self._rows.clear()
            self.import_(rows)

    def export(self, keys: Tensor) -> RowValues:
        """Return copies of the rows of ``keys int64[n]``."""
        # The lock is held until the rows are copied: an eviction between would give a row to another key.
        keys = keys.to(self.arena.device)
        with self.arena.lock:
            rows = self._rows.find(keys)
            absent = rows < 0
            if bool(absent.any()):
                raise KeyOutOfRangeError(
                    f"table {self.name!r}",
                    f"got key {int(keys[absent][0])}, expected one of the {len(self):,} that it holds",
                )
            return self._copy(keys, rows)

    def export_chunks(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return all rows, `chunk_rows` at a time; an empty table returns one chunk without rows."""
        start, is_first = 0, True
        while start >= 0:
            with self.arena.lock:
                keys, rows, start = self._rows.index.items(start, chunk_rows)
                # The lock is not held while the caller has the chunk, which it may be writing to a file.
                piece = self._copy(keys, rows)
            if keys.numel() or (start < 0 and is_first):  # a part of an index may be empty
                is_first = False
                yield piece
            del piece  # before the next one is copied

    def export_changed(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return all rows; see `export_chunks`."""
        return self.export_chunks(chunk_rows)

    def import_(self, rows: RowValues) -> None:
        """Overwrite the rows of ``rows.keys``; keys without rows are inserted, without admission.

        Empty ``rows.state`` and ``rows.uses`` do not change state and uses; those of new keys are initial.

        Raises:
            StorageError: The table or memory is full, or weights or state of another shape; nothing has changed.
        """
        arena = self.arena
        uses = {name: arena.uses[name] for name in self._rows.tracked if name in rows.uses}
        # Before a key is inserted: rows of another shape leave the table as it was.
        check_import(self.name, rows, arena.weights, arena.state, uses)
        with arena.transaction:
            keys = rows.keys.to(arena.device)
            target = self._rows.insert(keys)
            mark_changes(arena, target)
            arena.data.write(self.number, target, keys, rows.weights, rows.state)
            for name in uses:
                arena.uses[name].index_copy_(0, target, rows.uses[name].to(arena.device))

    def snapshot(self, directory: Path) -> bool:
        """Write the rows as a row file that shares those of a tier; see `Store.snapshot`."""
        data = self.arena.data
        return isinstance(data, TieredRows) and data.snapshot(self.number, directory)

    def adopt(self, directory: Path) -> bool:
        """Hold the rows of a row file in place of all rows; see `Store.adopt`."""
        data = self.arena.data
        # Which rows of the file differ from those before is not known.
        discard_changes(self.arena)
        return isinstance(data, TieredRows) and data.adopt(self.number, directory)

    def export_keys(self, chunk_keys: int) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Return the keys int64[n] and their uses; see `KeyedRows.export_keys`."""
        start = 0
        while start >= 0:
            with self.arena.lock:
                keys, rows, start = self._rows.index.items(start, chunk_keys)
                uses = {name: self.arena.uses[name][rows] for name in self._rows.tracked}
            if keys.numel():
                yield keys, uses

    def import_keys(self, keys: Tensor, uses: Mapping[str, Tensor]) -> None:
        """Insert ``keys int64[n]`` with their initial values; see `KeyedRows.import_keys`."""
        arena = self.arena
        with arena.transaction:
            target = self._rows.insert(keys.to(arena.device))
            mark_changes(arena, target)
            for name in self._rows.tracked:
                if name in uses:
                    arena.uses[name].index_copy_(0, target, uses[name].to(arena.device))

    @property
    def changes_since(self) -> str | None:
        """Id of the checkpoint after which all changes of rows are known; None if they are not."""
        return changes_since(self.arena)

    def follow_changes(self, since: str) -> None:
        """Begin to note which rows change; see `Store.follow_changes`."""
        with self.arena.lock:
            # The checkpoint knows that these keys are gone.
            self._rows.removed = []
            follow_changes(self.arena, since)

    @property
    def num_since(self) -> int:
        """Rows that changed after `changes_since`."""
        return sum(keys.numel() for keys in self._changed_keys())

    def export_since(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return the rows that changed after `changes_since`; see `Store.export_since`."""
        for changed in self._changed_keys():
            for part in torch.split(changed, chunk_rows) if changed.numel() else ():
                yield self.export(part)

    def _changed_keys(self) -> Iterator[Tensor]:
        start = 0 if self.arena.changes is not None else -1
        while start >= 0:
            with self.arena.lock:
                keys, rows, start = self._rows.index.items(start, _KEYS_AT_ONCE)
                assert self.arena.changes is not None, "changes are followed until the table goes"
                changed = keys[self.arena.changes.contains(rows)]
            yield changed

    def removed_since(self) -> Tensor:
        """Return the keys that were removed after `changes_since`; see `KeyedRows.removed_since`."""
        with self.arena.lock:
            # The empty first part gives `cat` device and type where nothing was removed.
            keys: Tensor = torch.unique(torch.cat([self._rows.evicted[:0], *self._rows.removed]))
            return keys[self._rows.find(keys) < 0]

    def remove(self, keys: Tensor) -> None:
        """Remove ``keys int64[n]``, which are not counted as evicted; see `KeyedRows.remove`."""
        with self.arena.lock:
            self._rows.remove(keys.to(self.arena.device))

    def export_memory(self, chunk_keys: int) -> Iterator[dict[str, Tensor]]:
        """Return the state other than rows: the clock, evicted keys not yet reported, admission counts.

        The pieces are named tensors of at most `chunk_keys` keys.
        """
        rows = self._rows
        yield {"clock": torch.tensor([rows.clock]), "num_evicted": torch.tensor([rows.num_evicted])}
        for start in range(0, rows.evicted.numel(), chunk_keys):
            yield {"evicted": rows.evicted[start : start + chunk_keys]}
        if rows.admission is not None:
            yield from rows.admission.export_chunks(chunk_keys)

    def import_memory(self, piece: Mapping[str, Tensor]) -> None:
        """Import a piece that `export_memory` of a table of the same spec returned."""
        rows = self._rows
        if set(piece) == {"clock", "num_evicted"}:
            rows.clock, rows.num_evicted = int(piece["clock"]), int(piece["num_evicted"])
        elif set(piece) == {"evicted"}:
            rows.evicted = torch.cat([rows.evicted, piece["evicted"].to(rows.evicted.device)])
        elif rows.admission is not None and set(piece) == rows.admission.names:
            rows.admission.import_(piece)
        else:
            raise StorageError(
                f"table {self.name!r}", f"got {sorted(piece)}, which belongs to another admission policy"
            )

    def follow_arena(self) -> None:
        """Move the index to the device of the arena."""
        self._rows.move()

    def _copy(self, keys: Tensor, rows: Tensor) -> RowValues:
        arena, tracked = self.arena, self._rows.tracked
        weights, state = arena.data.read(self.number, rows, keys)
        return RowValues(
            keys=keys,
            weights=weights,
            state=state,
            uses={name: arena.uses[name][rows] for name in tracked},
        )


def dynamic_tables(arena: DynamicArena, implementation: str = "auto") -> list[DynamicTable]:
    """Return a store for each table of `arena`."""
    return [DynamicTable(spec, arena, implementation) for spec in arena.specs]
