"""The tables of a served run in a parameter server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from terarec.checkpoint import Checkpoint
from terarec.embedding import BagSource, RowLookup
from terarec.models.artifact import ModelWithoutTables
from terarec.ps import ParameterServer, default_rows
from terarec.spec import (
    CacheSpec,
    DynamicTableSpec,
    ParameterServerSpec,
    ServedModelSpec,
    ServedTableSpec,
    TableSpec,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTables:
    """Location of the rows of a session's tables.

    Attributes:
        server: A parameter server that others may use, too, or the spec of one for this session alone.
        name: Name of the model there; its version is the step of the checkpoint. A version that is there is used.
        cache: Cache of each table in front of the tiers; None for none.
    """

    server: ParameterServer | ParameterServerSpec
    name: str = "model"
    cache: CacheSpec | None = None


class ServedLookups(NamedTuple):
    """Lookups of the tables of a run.

    Attributes:
        rows: Table -> its rows.
        bags: Looks up the bags of tables of one width at once; None for one table after the other.
    """

    rows: Mapping[str, RowLookup]
    bags: BagSource | None = None


class ServedRun:
    """The tables of a run in a parameter server.

    Attributes:
        server: The parameter server.
        name: Name of the model there.
        version: Version of the model.

    Args:
        described: Location of the rows.
        tables: The tables.
        device: Device of the caches.
    """

    def __init__(
        self, described: ServedTables, tables: Mapping[str, TableSpec | DynamicTableSpec], device: torch.device
    ) -> None:
        given = described.server
        self.server = given if isinstance(given, ParameterServer) else ParameterServer(given)
        self._is_own = self.server is not given
        self.name = described.name
        self.version = 0
        self.tables = tables
        self._cache = described.cache
        self._device = device

    def load(self, checkpoint: Checkpoint) -> ServedLookups:
        """Load the rows of a checkpoint, unless its version is there, and return the lookups of the tables.

        Raises:
            ConfigError: A name that a parameter server does not take.
            FormatError: A damaged file.
            StorageError: A tier cannot be written, or not enough memory.
        """
        version = checkpoint.step
        # Sessions may share a server: the first one loads a version, the others find it there.
        if version not in self.server.versions.get(self.name, ()):
            files, source = checkpoint.table_files(), str(checkpoint.path)
            tables = [
                ServedTableSpec(name=name, width=table.width, source=source) for name, table in self.tables.items()
            ]
            # A checkpoint may leave out rows that training did not change; their initial values follow from its seed.
            defaults = {name: default_rows(table, files.shape(name).seed) for name, table in self.tables.items()}
            spec = ServedModelSpec(name=self.name, version=version, tables=tuple(tables))
            self.server.load(spec, defaults).wait()
        self.version = version
        if self._cache is None:
            return ServedLookups({name: self.server.table(self.name, name, version).lookup for name in self.tables})
        held = self.server.caches(self.name, version, self._device, self._cache)
        return ServedLookups({name: cache.lookup for name, cache in held.caches.items()}, held.bags)

    def close(self) -> None:
        """Close the parameter server, if it is for this run alone."""
        if self._is_own:
            self.server.close()


def serve_tables(loaded: ModelWithoutTables, described: ServedTables, device: torch.device) -> ServedRun:
    """Load the tables of a checkpoint into a parameter server, and let the model look them up there.

    Raises:
        ConfigError: A name that a parameter server does not take.
        FormatError: A damaged file.
        StorageError: A tier cannot be written, or not enough memory.
    """
    served = ServedRun(described, loaded.tables, device)
    try:
        loaded.connect(*served.load(loaded.checkpoint))
    except BaseException:
        served.close()
        raise
    return served
