# SPDX-License-Identifier: Apache-2.0
"""The tables of a served run in a parameter server, and changed rows over them, so that a delta is seen at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.checkpoint import Checkpoint
from terarec.checkpoint.table_chain import TableChain
from terarec.embedding.lookups import BagSource, RowLookup
from terarec.errors import StorageError
from terarec.formats.delta import StateId
from terarec.kernels.hash_index import new_hash_index
from terarec.models.artifact import ModelWithoutTables
from terarec.ps import ParameterServer
from terarec.ps.cache import EmbeddingCache
from terarec.ps.group_cache import CacheStatistics
from terarec.ps.loading import state_name
from terarec.ps.server import TableChange
from terarec.ps.table import DefaultRows, TableStatistics, default_rows
from terarec.spec import (
    CacheSpec,
    DynamicTableSpec,
    ParameterServerSpec,
    ServedModelSpec,
    ServedTableSpec,
    TableSpec,
)


class TableOverlay:
    """The changed rows of a table. They take their own memory once, and some 24 bytes a key.

    Args:
        changes: The changes, in their order.
        width: Length D of a vector.
        default: Vectors of keys that lose their rows.
    """

    def __init__(self, changes: Sequence[TableChange], width: int, default: DefaultRows) -> None:
        self._default = default
        rows = [torch.empty(0, width), *(change.rows for change in changes)]
        self._rows = torch.cat(rows)
        self._index = new_hash_index()
        self.changes: list[TableChange] = []
        begin, gone = 0, self._rows.shape[0]  # the number behind the last row stands for none
        for removed, keys, _ in changes:
            end = begin + keys.numel()
            self._index.assign(removed, torch.full_like(removed, gone))
            self._index.assign(keys, torch.arange(begin, end))
            # Views of the rows here: those that were read are given up.
            self.changes.append(TableChange(removed, keys, self._rows[begin:end]))
            begin = end

    def over(self, rows: RowLookup, keys: Tensor) -> Tensor:
        """Return the rows float32[n, D] of ``keys int64[n]``: those that changed, and those of `rows` for others."""
        values = rows(keys)
        mine = keys.cpu()
        places = self._index.find(mine)
        is_changed = places >= 0
        if not bool(is_changed.any()):
            return values
        at, places, mine = is_changed.nonzero()[:, 0], places[is_changed], mine[is_changed]
        changed = torch.empty(at.numel(), self._rows.shape[1])
        has_row = places < self._rows.shape[0]
        changed[has_row] = self._rows[places[has_row]]
        if not bool(has_row.all()):
            changed[~has_row] = self._default(mine[~has_row])
        return values.index_copy(0, at.to(values.device), changed.to(values.device))


def overlaid(rows: Mapping[str, RowLookup], overlays: Mapping[str, TableOverlay]) -> Mapping[str, RowLookup]:
    """Return lookups that find the changed rows of tables before those of the tiers."""
    return {name: partial(overlays[name].over, lookup) for name, lookup in rows.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTables:
    """Location of the rows of a session's tables.

    Attributes:
        server: A parameter server that others may use, too, or the spec of one for this session alone.
        name: Name of the model there. A version that is there is used.
        cache: Cache of each table in front of the tiers; None for none.
        version: Number of its version there; 0 for the step of the checkpoint, or any version with its rows.
    """

    server: ParameterServer | ParameterServerSpec
    name: str = "model"
    cache: CacheSpec | None = None
    version: int = 0


class ServedLookups(NamedTuple):
    """Lookups of the tables of a run.

    Attributes:
        rows: Table -> its rows.
        bags: Looks up the bags of tables of one width at once; None for one table after the other.
    """

    rows: Mapping[str, RowLookup]
    bags: BagSource | None = None


class OverlaidTables(NamedTuple):
    """Tables with changed rows in memory over those of the tiers.

    Attributes:
        lookups: Lookups of the tables.
        changes: Table -> the changed rows, as the lookups hold them.
    """

    lookups: ServedLookups
    changes: Mapping[str, Sequence[TableChange]]


class TableUse(NamedTuple):
    """How a table is used.

    Attributes:
        tiers: Counters of the table in its tiers.
        cache: Counters of its cache; None for no cache.
    """

    tiers: TableStatistics
    cache: CacheStatistics | None


class ServedRun:
    """The tables of a run in a parameter server."""

    def __init__(
        self, described: ServedTables, tables: Mapping[str, TableSpec | DynamicTableSpec], device: torch.device
    ) -> None:
        server = described.server
        self.server = server if isinstance(server, ParameterServer) else ParameterServer(server)
        self._is_own = self.server is not server
        self.name = described.name
        self._number = self.version = described.version
        self._has_rows = False  # whether there is such a version
        self._has_loaded = False  # whether it is there on account of this session
        self.tables = tables
        self._cache = described.cache
        self._device = device

    @contextmanager
    def loaded(self, checkpoint: Checkpoint) -> Iterator[ServedLookups]:
        """Load the rows of a checkpoint, unless a version has them, and look them up in the block.

        If the block succeeds, they replace the former version, which is unloaded; if it fails, that one stays.

        Raises:
            ConfigError: A name that a parameter server does not take.
            FormatError: A damaged file.
            StorageError: A tier cannot be written, or not enough memory.
        """
        version, is_new = self._load(checkpoint)
        former = self.version if self._has_rows else version
        try:
            yield self._lookups(version)
        except BaseException:
            if is_new:
                self.server.unload(self.name, version, also_active=True, keeps_earlier=True)
            raise
        self.version, self._has_rows, self._has_loaded = version, True, is_new
        if former != version:
            self.server.unload(self.name, former, also_active=True)

    def _load(self, checkpoint: Checkpoint) -> tuple[int, bool]:
        """Return the version with the rows of a checkpoint, and whether it is a new one."""
        source = str(checkpoint.path)
        tables = [ServedTableSpec(name=name, width=table.width, source=source) for name, table in self.tables.items()]
        spec = ServedModelSpec(name=self.name, version=self._number, tables=tuple(tables))
        # Sessions may share a server: the first one loads a version, the others find it there.
        version = self.server.version_of(spec)
        if version is not None:
            return version, False
        files, others = checkpoint.table_files(), self.server.versions.get(self.name, ())
        version = self._number or checkpoint.step
        # A training that began anew has the steps of the former one.
        version = version if version not in others else max(others) + 1
        # A checkpoint may leave out rows that training did not change; their initial values follow from its seed.
        defaults = {
            name: default_rows(_sized(table, files), files.shape(name).seed) for name, table in self.tables.items()
        }
        self.server.load(replace(spec, version=version), defaults).wait()
        return version, True

    def lookups(self) -> ServedLookups:
        """Return the lookups of the tables of the version."""
        return self._lookups(self.version)

    def _lookups(self, version: int) -> ServedLookups:
        if self._cache is None:
            return ServedLookups({name: self.server.table(self.name, name, version).lookup for name in self.tables})
        caches = self.server.caches(self.name, version, self._device, self._cache)
        return ServedLookups({name: cache.lookup for name, cache in caches.caches.items()}, caches.bags)

    def overlaid(self, changes: Mapping[str, Sequence[TableChange]]) -> OverlaidTables:
        """Return lookups that find changed rows before those of the version, which has to get them later."""
        overlays = {
            name: TableOverlay(changes[name], table.width, self.server.table(self.name, name, self.version).default)
            for name, table in self.tables.items()
        }
        rows = overlaid(self.lookups().rows, overlays)
        return OverlaidTables(ServedLookups(rows), {name: overlay.changes for name, overlay in overlays.items()})

    def follow(self, state: StateId) -> bool:
        """Read what other processes wrote; from now on by these calls alone. Return whether all rows are of `state`."""
        return self.server.follow(self.name, state_name(state), self.version)

    def write(
        self,
        changes: Mapping[str, Sequence[TableChange]],
        state: StateId,
        checkpoint: Path,
        through: Sequence[StateId] = (),
    ) -> bool:
        """Change the rows of the version, and bring stale tiers up to date; return whether all rows are of `state` now.

        Files that another process writes follow when that has written them, so that another call is needed.

        Args:
            changes: Table -> what leads from the state of the rows to `state`; nothing where the rows are of that.
            state: State of a checkpoint.
            checkpoint: Its directory.
            through: The states between which the changes lead there: other processes may have made some of them.

        Raises:
            FormatError: The checkpoint is damaged.
            StorageError: No tier with all rows of a table can be written.
        """
        name = state_name(state)
        # Files first: what a cache or host memory read from them before would be older than what they get here.
        if not self.follow(state):
            return False
        if changes:
            apply = partial(self.server.apply, self.name, changes, name, self.version, list(map(state_name, through)))
            try:
                apply()
            except StorageError:
                # A single tier that came back with earlier rows gets all of them from the checkpoint.
                if not self.server.renew(self.name, name, checkpoint, self.version):
                    raise
                apply()
            # Durable before the state of the session is taken for that of the rows.
            self.server.flush(self.name, self.version)
        self.server.renew(self.name, name, checkpoint, self.version)
        return True

    def statistics(self) -> Mapping[str, TableUse]:
        """Return the counters of each table of the version.

        Raises:
            ConfigError: The version has been unloaded, since another one replaced it in the meantime.
        """
        version = self.version
        caches: Mapping[str, EmbeddingCache] = {}
        if self._cache is not None:
            caches = self.server.caches(self.name, version, self._device, self._cache).caches
        return {
            name: TableUse(
                self.server.table(self.name, name, version).statistics(),
                caches[name].statistics() if name in caches else None,
            )
            for name in self.tables
        }

    def unload(self) -> None:
        """Remove the rows of the version from the parameter server, which others use, too.

        Raises:
            StorageError: A tier cannot be written; the version is gone from the server.
        """
        self.server.unload(self.name, self.version, also_active=True)

    def discard(self) -> None:
        """Leave the parameter server as if the run had not been opened, after an error."""
        if self._has_loaded and not self._is_own:
            self.server.unload(self.name, self.version, also_active=True, keeps_earlier=True)
        self.close()

    def close(self) -> None:
        """Close the parameter server, if it is for this run alone."""
        if self._is_own:
            self.server.close()


def _sized(table: TableSpec | DynamicTableSpec, files: TableChain) -> TableSpec | DynamicTableSpec:
    """Return a table with as many rows as it has in a checkpoint, which may be more than before."""
    return table if isinstance(table, DynamicTableSpec) else replace(table, rows=files.num_rows(table.name))


def serve_tables(loaded: ModelWithoutTables, described: ServedTables, device: torch.device) -> ServedRun:
    """Load the tables of a checkpoint into a parameter server, and let the model look them up there.

    Raises:
        ConfigError: A name that a parameter server does not take.
        FormatError: A damaged file.
        StorageError: A tier cannot be written, or not enough memory.
    """
    served = ServedRun(described, loaded.tables, device)
    try:
        with served.loaded(loaded.checkpoint) as lookups:
            loaded.connect(*lookups)
    except BaseException:
        served.close()
        raise
    return served
