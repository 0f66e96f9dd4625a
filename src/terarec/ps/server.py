# SPDX-License-Identifier: Apache-2.0
"""`ParameterServer`: the tables of several models and versions, in tiers, loaded in the background."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError, TerarecError
from terarec.memory.guarded import Guarded
from terarec.memory.redis_server import RedisServer
from terarec.ps.cache import EmbeddingCache, ModelCaches
from terarec.ps.levels import open_level
from terarec.ps.loading import Loading, TableSource, fill_tiers, open_table_source, source_identity
from terarec.ps.table import DefaultRows, TableGroup, TableStatistics, TableTiers, constant_rows, last_places
from terarec.spec import (
    CacheSpec,
    ParameterServerSpec,
    RedisSpec,
    ServedModelSpec,
    ServedTableSpec,
)
from terarec.spec.parameter_server import TierSpec

_REPLACED_AT_ONCE = 2  # tables that are filled anew; more would take connections and memory that lookups need


class TableChange(NamedTuple):
    """A change of a table: keys lose their rows, then rows are set.

    Attributes:
        removed: int64[m], keys that lose their rows.
        keys: int64[n], distinct.
        rows: float32[n, D], their rows.
    """

    removed: Tensor
    keys: Tensor
    rows: Tensor


class _Version:
    """The tables of a version of a model."""

    def __init__(
        self, spec: ServedModelSpec, groups: Sequence[TableGroup], sources: Mapping[str, TableSource | None]
    ) -> None:
        self.spec = spec
        self.groups = groups
        self.tables = {name: group.table(i) for group in groups for i, name in enumerate(group.names)}
        self.sources = sources
        # Of the sources as they are now: another training may put others in their places.
        self.identities = _identities(spec)
        self.is_updated = False  # whether this process may have changed rows since
        # Held while caches are added, which reads whole sources, and by those who need all of them.
        self.caching = threading.Lock()
        self.caches: dict[tuple[torch.device, CacheSpec], ModelCaches] = {}
        self.is_retired = False  # set before `close` waits for that lock: no caches are added after it

    def retire(self) -> None:
        """Let all lookups raise from here on."""
        self.is_retired = True
        for group in self.groups:
            group.retire()

    def close(self) -> None:
        self.retire()  # which also ends the filling of new caches
        with self.caching:
            for cache in self.caches.values():
                cache.close()
        for group in self.groups:
            group.close()


def _identities(model: ServedModelSpec) -> Mapping[str, str | None]:
    """Return the identity of each table's source. Tables of one checkpoint share theirs."""
    paths = {table.name: table.source for table in model.tables}
    known = {path: source_identity(Path(path)) for path in set(paths.values()) if path is not None}
    return {table: None if path is None else known[path] for table, path in paths.items()}


class ParameterServer:
    """Tables of several models and versions in tiers: of this process, of Redis, of a disk. Any thread may use it.

    Args:
        spec: Tiers, and models that are loaded before this returns.

    Raises:
        DataNotFoundError: A model's file does not exist.
        FormatError: A damaged file.
        StorageError: A tier cannot be written.

    Example:
        >>> server = ParameterServer(ParameterServerSpec(tiers=(HostMemorySpec(),), models=(model,)))
        >>> server.lookup("dcn", "user", torch.tensor([3, 14, 15]))  # float32[3, D]
    """

    def __init__(self, spec: ParameterServerSpec) -> None:
        self.spec = spec
        self._redis: dict[TierSpec, RedisServer] = {
            tier: RedisServer(tier) for tier in spec.tiers if isinstance(tier, RedisSpec)
        }
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, int], _Version] = {}
        self._active: dict[str, int] = {}
        self._loading: dict[tuple[str, int], Loading | None] = {}
        try:
            # All are loaded at the same time, and waited for one after the other.
            for loading in [self.load(model) for model in spec.models]:
                loading.wait()
        except BaseException:
            self.close()
            raise

    def load(self, model: ServedModelSpec, defaults: Mapping[str, DefaultRows] | None = None) -> Loading:
        """Load a version of a model in the background; it becomes the active one when it is complete.

        The sources are checked before this returns. Until the version is complete, lookups find the active one.

        Args:
            model: Tables and sources.
            defaults: Table -> vectors of its keys without a row; ``ServedTableSpec.default`` for other tables.

        Raises:
            ConfigError: The version is there, is being loaded, or a source has no such table.
            DataNotFoundError: A source does not exist.
            FormatError: A source is damaged or of another width.
            StorageError: A tier cannot be opened.
        """
        name = model.name, model.version
        with self._lock:
            if name in self._versions or name in self._loading:
                raise ConfigError("version", f"model {model.name!r} has version {model.version}, expected a new one")
            self._loading[name] = None  # taken before the lock goes: another call with this version is rejected
        try:
            sources = {table.name: open_table_source(table) for table in model.tables}
            for table, source in sources.items():
                if source is not None and source.has_initial_values and table not in (defaults or {}):
                    raise ConfigError(
                        f"table {table!r}",
                        f"{source.path} leaves out rows of initial weights, expected to load its run",
                    )
            version = self._opened(model, sources, defaults or {})
            total = sum(source.num_rows for source in sources.values() if source is not None)
            loading = Loading(model, total, lambda add: self._fill(version, add))
        except BaseException:
            with self._lock:
                del self._loading[name]
            raise
        with self._lock:
            if name in self._loading:  # else its thread has ended already
                self._loading[name] = loading
        return loading

    def lookup(self, model: str, table: str, keys: Tensor, version: int | None = None) -> Tensor:
        """Return the rows float32[n, D] of ``keys int64[n]``; keys without a row get the table's default vector.

        Args:
            model: Name of the model.
            table: Name of the table.
            keys: Any integers.
            version: Version of the model; None for the active one.

        Raises:
            ConfigError: No such model, version or table, or keys of another shape or type.
        """
        return self.table(model, table, version).lookup(keys)

    def table(self, model: str, table: str, version: int | None = None) -> TableTiers:
        """Return a table of a version of a model.

        Raises:
            ConfigError: No such model, version or table.
        """
        served = self._version(model, version)
        _ = served.spec.table(table)
        return served.tables[table]

    def cache(
        self,
        model: str,
        table: str,
        version: int | None = None,
        device: torch.device | None = None,
        spec: CacheSpec | None = None,
    ) -> EmbeddingCache:
        """Return the cache of a table on a device, which the first call makes and fills with the table's first rows.

        Args:
            model: Name of the model.
            table: Name of the table.
            version: Version of the model; None for the active one.
            device: Device of the rows; the CPU by default.
            spec: Form and policies; None for those of the model. Each spec has a cache of its own.

        Raises:
            ConfigError: No such model, version or table, also where the version is unloaded in the meantime; or a model
                without a cache.
            FormatError: The source of the rows is damaged.
            StorageError: Not enough memory for the rows.
        """
        _ = self.model(model, version).table(table)
        return self.caches(model, version, device, spec).caches[table]

    def caches(
        self,
        model: str,
        version: int | None = None,
        device: torch.device | None = None,
        spec: CacheSpec | None = None,
    ) -> ModelCaches:
        """Return the caches of all tables of a model on a device; arguments and errors are those of `cache`."""
        served, device = self._version(model, version), device or torch.device("cpu")
        spec = spec or served.spec.cache
        if spec is None:
            raise ConfigError("cache", f"model {model!r} has none, expected ServedModelSpec(cache=CacheSpec(...))")
        place = device, spec
        # The usual case, without the lock, for which lookups would wait while others are made.
        if place in served.caches:
            return served.caches[place]
        with served.caching:
            unloaded = ConfigError("version", f"{served.spec.version} of model {model!r} was unloaded")
            if served.is_retired:
                raise unloaded
            if place not in served.caches:
                try:
                    served.caches[place] = _new_caches(served, spec, device)
                except StorageError:
                    if served.is_retired:
                        raise unloaded from None
                    raise
            return served.caches[place]

    def model(self, name: str, version: int | None = None) -> ServedModelSpec:
        """Return a version of a model; None for the active one.

        Raises:
            ConfigError: No such model or version.
        """
        return self._version(name, version).spec

    def version_of(self, model: ServedModelSpec) -> int | None:
        """Return the loaded version that has exactly the rows of the sources of `model`; None if there is none.

        One of another number than that of `model`, if this is not 0, does not count.

        Raises:
            DataNotFoundError: A source does not exist.
        """
        wanted = _identities(model)
        with self._lock:
            for (name, number), version in self._versions.items():
                is_named = name == model.name and model.version in (0, number)
                is_updated = version.is_updated or any(group.stack.has_moved for group in version.groups)
                if is_named and version.identities == wanted and not is_updated:
                    return number
        return None

    @property
    def versions(self) -> Mapping[str, tuple[int, ...]]:
        """The loaded versions of each model."""
        with self._lock:
            numbers: dict[str, tuple[int, ...]] = {}
            for name, version in sorted(self._versions):
                numbers[name] = (*numbers.get(name, ()), version)
            return numbers

    def active(self, model: str) -> int:
        """Return the version that lookups find.

        Raises:
            ConfigError: No such model.
        """
        return self._version(model, None).spec.version

    def activate(self, model: str, version: int) -> None:
        """Let lookups find another loaded version.

        Raises:
            ConfigError: No such model or version.
        """
        _ = self._version(model, version)
        with self._lock:
            self._active[model] = version

    def unload(self, model: str, version: int, *, also_active: bool = False, keeps_earlier: bool = False) -> None:
        """Remove a version from all tiers that can be written; what other processes look up in Redis stays.

        Args:
            model: Name of the model.
            version: Version of the model.
            also_active: Whether the active one may go, too; the highest of the others, if there is one, is active then.
            keeps_earlier: Whether rows that were in the tiers before it was loaded stay, as after loading that failed.

        Raises:
            ConfigError: No such version, or the active one.
            StorageError: A tier cannot be written; the version is gone from this server.
        """
        served = self._version(model, version)
        with self._lock:
            if self._active.get(model) == version:
                if not also_active:
                    raise ConfigError("version", f"got {version}, the active one of {model!r}, expected another")
                del self._active[model]
                others = [number for name, number in self._versions if name == model and number != version]
                if others:
                    self._active[model] = max(others)
            # First, so that no lookup finds a table that is half empty, or a key without its row.
            del self._versions[model, version]
            served.retire()
        try:
            for table in served.tables.values():
                stack = table.group.stack
                (stack.give_up if keeps_earlier else stack.clear)(table.number)
        finally:
            served.close()

    def update(
        self, model: str, table: str, removed: Tensor, keys: Tensor, rows: Tensor, version: int | None = None
    ) -> None:
        """Remove and set rows of a table in all tiers that can be written, and in its caches.

        A tier that fails is stale, and lookups pass it over until it is renewed; the others take the rows.

        Args:
            model: Name of the model.
            table: Name of the table.
            removed: int64[m], keys that lose their rows, before others are set.
            keys: int64[n], distinct.
            rows: float32[n, D], their rows.
            version: Version of the model; None for the active one.

        Raises:
            ConfigError: No such model, version or table, or another shape or type.
            StorageError: No tier with all rows can be written; others may have the rows by then.
        """
        _ = self.table(model, table, version)
        self.apply(model, {table: [TableChange(removed, keys, rows)]}, version=version)

    def apply(
        self,
        model: str,
        changes: Mapping[str, Iterable[TableChange]],
        state: str | None = None,
        version: int | None = None,
        through: Collection[str] = (),
    ) -> None:
        """Change rows of several tables as `update` does; errors are those of `update`.

        Args:
            model: Name of the model.
            changes: Table -> its changes, in their order.
            state: Name of the state that they lead to, which tiers store beside the rows; None where it has none.
            version: Version of the model; None for the active one.
            through: Names of states on the way there: a tier that another process brought to one of them takes the
                changes as well.
        """
        served = self._version(model, version)
        served.is_updated = True
        for table, parts in changes.items():
            tiers = served.tables[table]
            tiers.renew()
            with tiers.changing(state, through):
                for part in parts:
                    tiers.erase(part.removed)
                    tiers.insert(part.keys, part.rows)
                    # Caches last: a lookup that misses a row from here on reads the new one. One that read the old row
                    # inserts it before the cache gets the new one, or not at all, since the cache has counted a change.
                    with served.caching:
                        caches = [each.caches[table] for each in served.caches.values()]
                    for cache in caches:
                        cache.forget(part.removed)
                        cache.update(part.keys, part.rows)

    def renew(
        self, model: str, state: str | None = None, source: Path | None = None, version: int | None = None
    ) -> int:
        """Bring stale tiers of a model up to date, where they can be written again; return how many are.

        Args:
            model: Name of the model.
            state: Name of the state that the rows are of; None where it has none.
            source: Checkpoint of that state; None to take rows from other tiers alone.
            version: Version of the model; None for the active one.

        Raises:
            ConfigError: No such model or version.
            FormatError: The checkpoint is damaged.
        """
        served, turns = self._version(model, version), threading.Semaphore(_REPLACED_AT_ONCE)
        stale = [
            table
            for table in served.spec.tables
            if any(use.is_stale for use in served.tables[table.name].statistics().tiers)
        ]
        if not stale:
            return 0

        def renew(table: ServedTableSpec) -> int:
            rows = None if source is None else open_table_source(replace(table, source=str(source)))
            return served.tables[table.name].renew(state, rows, turns)

        # All begin at once: from then on lookups find rows in a tier that has them alone, also in tables whose turn to
        # be filled comes later.
        with ThreadPoolExecutor(len(stale), thread_name_prefix="terarec-renew") as pool:
            return sum(pool.map(renew, stale))

    def follow(self, model: str, state: str, version: int | None = None) -> bool:
        """Read what other processes wrote into read-only tables; return whether their rows are of a state.

        Args:
            model: Name of the model.
            state: Name of the state.
            version: Version of the model; None for the active one.

        Raises:
            ConfigError: No such model or version.
            StorageError: A tier is damaged.
        """
        served = self._version(model, version)
        served.is_updated = True
        # Of all, whatever the first say.
        return sum(group.stack.follow(state) for group in served.groups) == len(served.groups)

    def flush(self, model: str, version: int | None = None) -> None:
        """Make updated rows durable, where there is a disk.

        Raises:
            ConfigError: No such model or version.
            StorageError: A tier cannot be written.
        """
        for tiers in self._version(model, version).tables.values():
            tiers.flush()

    def statistics(self) -> Mapping[str, Mapping[str, TableStatistics]]:
        """Return the statistics of each table of the active versions: model -> table -> numbers."""
        with self._lock:
            active = {name: self._versions[name, version] for name, version in self._active.items()}
        return {
            name: {table: tiers.statistics() for table, tiers in version.tables.items()}
            for name, version in active.items()
        }

    def refresh(self) -> bool:
        """Read the last commits of other writers into read-only tables; return whether there were any.

        Stale tiers are renewed from others, where that is possible.

        Raises:
            StorageError: A tier is damaged.
        """
        with self._lock:
            versions = list(self._versions.values())
        has_moved = False
        for version in versions:
            moved = [group.stack.refresh() for group in version.groups]
            if any(moved):
                has_moved = version.is_updated = True
        return has_moved

    def close(self) -> None:
        """Stop loading and close all tiers; rows on servers and disks stay."""
        with self._lock:
            loading = [each for each in self._loading.values() if each is not None]
        for each in loading:  # without the lock, which their threads need in order to end
            each.cancel()
        with self._lock:
            versions, self._versions, self._active = list(self._versions.values()), {}, {}
        for version in versions:
            version.close()
        for server in self._redis.values():
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _version(self, model: str, version: int | None) -> _Version:
        with self._lock:
            number = self._active.get(model) if version is None else version
            served = None if number is None else self._versions.get((model, number))
            if served is not None:
                return served
            models = sorted({name for name, _ in self._versions})
            versions = [one for name, one in sorted(self._versions) if name == model]
        if not versions:
            raise ConfigError("model", f"got {model!r}, expected one of {', '.join(models) or 'none: none is loaded'}")
        known = ", ".join(map(str, versions))
        raise ConfigError("version", f"got {version} of model {model!r}, expected one of {known}")

    def _opened(
        self, model: ServedModelSpec, sources: Mapping[str, TableSource | None], defaults: Mapping[str, DefaultRows]
    ) -> _Version:
        with ExitStack() as opened:
            groups = []
            for width in dict.fromkeys(table.width for table in model.tables):
                tables = [table for table in model.tables if table.width == width]
                levels: list[Guarded] = []
                for spec in self.spec.tiers:
                    levels.append(open_level(spec, model, tables, self._redis.get(spec)))
                    opened.callback(levels[-1].level.close)
                values = [defaults.get(table.name) or constant_rows(width, table.default) for table in tables]
                groups.append(TableGroup([table.name for table in tables], width, levels, values))
            opened.pop_all()
            return _Version(model, groups, sources)

    def _fill(self, version: _Version, add: Callable[[int], None]) -> None:
        name = version.spec.name, version.spec.version
        levels = [level for group in version.groups for level in group.stack.levels]
        try:
            for level in levels:
                if level.join is not None:
                    level.join()
            for table, source in version.sources.items():
                if source is not None:
                    fill_tiers(version.tables[table], source, add)
            for level in levels:
                level.wait(partial(add, 0))  # which raises once loading is cancelled
            for group in version.groups:
                group.stack.watch()
            with self._lock:
                self._versions[name] = version
                # Active with its last row: until here lookups find the former version.
                self._active[name[0]] = name[1]
        except BaseException:
            self._discard(version)
            raise
        finally:
            with self._lock:
                self._loading.pop(name, None)

    def _discard(self, version: _Version) -> None:
        """Remove the rows of a rejected version from tiers that outlive this process."""
        for name, table in version.tables.items():
            # A table without a source has rows that others wrote, which are not this version's to remove.
            if version.sources[name] is not None:
                _try(partial(table.group.stack.give_up, table.number))
        version.close()


def _new_caches(version: _Version, spec: CacheSpec, device: torch.device) -> ModelCaches:
    """Return caches with the rows that the tiers have for the first keys of each table's source."""
    rows = {}
    for name, tiers in version.tables.items():
        source = version.sources[name]
        # Without a source, the rows of the slowest tier, which has all of them.
        num_rows = source.num_rows if source is not None else tiers.count()
        rows[name] = spec.rows or max(1, math.ceil(spec.share * num_rows))
    caches = ModelCaches(version.tables, rows, spec, device)
    try:
        for name, cache in caches.caches.items():
            source = version.sources[name]
            for chunk in () if source is None else source.read():
                last = last_places(chunk.keys)
                keys = chunk.keys if last is None else chunk.keys[last.sort().values]
                # Not those of the source: updates, and a key's later rows, may have replaced them. An update that
                # begins now waits until these caches are there.
                lookup = version.tables[name].find(keys)
                if not cache.fill(keys[lookup.mask], lookup.rows[lookup.mask]):
                    break
    except BaseException:
        caches.close()
        raise
    return caches


def _try(action: Callable[[], None]) -> None:
    try:
        action()
    except TerarecError:  # the error that is under way says more
        return
