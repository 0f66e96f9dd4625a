"""The tables of a served run in a parameter server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from terarec.embedding import RowLookup
from terarec.models.artifact import ModelWithoutTables
from terarec.models.contract import device_of
from terarec.ps import ParameterServer, default_rows
from terarec.spec import CacheSpec, ParameterServerSpec, ServedModelSpec, ServedTableSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTables:
    """Where a session finds the rows of its tables.

    Attributes:
        server: A parameter server that others may use, too, or the spec of one for this session alone.
        name: Name of the model there; its version is the step of the checkpoint. A version that is there is used.
        cache: Cache of each table in front of the tiers; None for none.
    """

    server: ParameterServer | ParameterServerSpec
    name: str = "model"
    cache: CacheSpec | None = None


def serve_tables(loaded: ModelWithoutTables, tables: ServedTables) -> Callable[[], None] | None:
    """Load the tables of a checkpoint into a parameter server, and let the model look them up there.

    Returns:
        What closes the server, if this call has started it.

    Raises:
        ConfigError: A name that a parameter server does not take, or another model under this name and version.
        FormatError: A damaged file.
        StorageError: A tier cannot be written, or not enough memory.
    """
    if isinstance(tables.server, ParameterServer):
        _connect(loaded, tables.server, tables)
        return None
    server = ParameterServer(tables.server)
    try:
        _connect(loaded, server, tables)
    except BaseException:
        server.close()
        raise
    return server.close


def _connect(loaded: ModelWithoutTables, server: ParameterServer, tables: ServedTables) -> None:
    checkpoint, device = loaded.checkpoint, device_of(loaded.model)
    files, version = checkpoint.table_files(), checkpoint.step
    spec = ServedModelSpec(
        name=tables.name,
        version=version,
        tables=tuple(
            ServedTableSpec(name=table.name, width=table.width, source=str(checkpoint.path))
            for table in loaded.tables.values()
        ),
    )
    if version not in server.versions.get(tables.name, ()):
        defaults = {name: default_rows(table, files.shape(name).seed) for name, table in loaded.tables.items()}
        server.load(spec, defaults).wait()
    lookups: dict[str, RowLookup] = {}
    for name in loaded.tables:
        if tables.cache is None:
            lookups[name] = server.table(tables.name, name, version).lookup
        else:
            lookups[name] = server.cache(tables.name, name, version, device, tables.cache).lookup
    loaded.connect(lookups)
