# SPDX-License-Identifier: Apache-2.0
"""Places of the rows of served tables, the models that a parameter server loads, and the caches in front of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from terarec.errors import ConfigError
from terarec.spec import checks

EvictionPolicy = Literal["random", "lru", "lfu"]
# A name is part of the keys of a Redis server, ``hps_et.MODEL.TABLE``, and of names of directories.
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,120}")
_NAME_WORDS = "1 to 120 letters, digits, '_' and '-'"


@dataclass(frozen=True, kw_only=True, slots=True)
class OverflowSpec(checks.Checked):
    """Bound of the rows in a partition of a table.

    Attributes:
        max_rows: Maximum number of rows of a partition; None for no bound.
        evict: Which rows are evicted when there are more: any, the least recently or the least frequently used. In host
            memory a lookup is one use of a row, however often it has its key.
        keep: Share of `max_rows` that an eviction leaves.
    """

    max_rows: checks.Rows | None = None
    evict: EvictionPolicy = "random"
    keep: checks.Share = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemorySpec:
    """Rows in the memory of this process: a hash index and slots for each table.

    Attributes:
        num_partitions: Parts of a table, each with an index and a bound of its own.
        overflow: Bound of a partition.
        load_share: Share of a table's rows to load, from the first on; 0 to load none.
        keeps_found: Whether rows that a slower tier had are inserted.
    """

    kind: ClassVar[str] = "host"
    num_partitions: checks.Threads = 1
    overflow: OverflowSpec = OverflowSpec()
    load_share: checks.Share = 1.0
    keeps_found: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.instance(self, "overflow", OverflowSpec, "OverflowSpec(...)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TLSSpec:
    """Encryption of the connections to a server.

    Attributes:
        ca_certificates: File or directory of the trusted certificates.
        certificate: File of the client's certificate; None for none.
        key: File of its key.
        server_name: Name that the server's certificate is checked for; None for the name of the host.
    """

    ca_certificates: str
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            checks.reject(self, "key", "got one of certificate and key, expected both or none")


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisSpec:
    """Rows in Redis or Valkey, a single server or a cluster, in the layout of HugeCTR's parameter server.

    Attributes:
        address: ``host:port`` of a server, or of some nodes of a cluster, with commas between.
        user: Name of the user.
        password: The password; None for none.
        num_partitions: Hashes of a table, which a cluster spreads over its nodes.
        num_connections: Maximum number of connections to a node.
        batch_rows: Maximum number of keys of one command.
        timeout_seconds: Maximum seconds to wait for a server; the lookup then goes on with the next tier.
        tls: Encryption; None for none.
        overflow: Bound of a partition.
        load_share: Share of a table's rows to load, from the first on; 0 to serve the rows that the tier has.
        keeps_found: Whether rows that a slower tier had are inserted.
    """

    kind: ClassVar[str] = "redis"
    address: str = "127.0.0.1:6379"
    user: str = "default"
    # Not in the spelling of the spec, which goes to logs and errors.
    password: str | None = field(default=None, repr=False)
    # Defaults of HugeCTR's parameter server, whose tables in Redis are read and written.
    num_partitions: checks.Threads = 8
    num_connections: checks.Threads = 5
    batch_rows: checks.BatchSize = 65536
    timeout_seconds: checks.Positive = 1.0
    tls: TLSSpec | None = None
    overflow: OverflowSpec = OverflowSpec()
    load_share: checks.Share = 1.0
    keeps_found: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self)
        try:
            _ = self.nodes
        except ValueError:
            checks.fail(self, "address", "HOST:PORT, or several with commas between")
        checks.instance(self, "overflow", OverflowSpec, "OverflowSpec(...)")
        if self.overflow.evict == "lfu":
            checks.reject(self, "overflow", "got evict 'lfu', expected 'random' or 'lru', for which Redis has numbers")

    @property
    def nodes(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each address."""
        addresses = []
        for address in self.address.split(","):
            host, _, port = address.strip().rpartition(":")
            if not host or not 0 < int(port) < 65536:
                raise ValueError(address)
            # An address of IPv6 is in brackets before its port.
            addresses.append((host.strip("[]"), int(port)))
        return tuple(addresses)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFileSpec:
    """Rows in row files on a disk, one for each table and version.

    Attributes:
        path: Directory of the files.
        read_only: Whether to open files that another process writes; no rows are loaded then.
        load_share: Share of a table's rows to load, from the first on; 0 to serve the rows that the tier has.
        cache_bytes: Maximum host memory of a table for rows that were read or written; 0 for none.
    """

    kind: ClassVar[str] = "row_file"
    path: str
    read_only: bool = False
    load_share: float = 1.0
    cache_bytes: checks.NonNegativeInt = 64 * 2**20

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _check_disk(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemorySpec:
    """Rows in memory that the processes of a Linux machine share: one loads and updates them, the others read them.

    Attributes:
        name: Name of the memory, which is a directory below ``/dev/shm``.
        max_bytes: Maximum bytes of the tables of one width of a model.
        removes: Whether the last process that uses the memory removes it; else its rows stay for the next ones.
        load_share: Share of a table's rows to load, from the first on, if no other process does; 0 to serve the rows
            that another process loads.
    """

    kind: ClassVar[str] = "shared"
    name: str
    max_bytes: checks.PositiveInt = 16 * 2**30
    removes: bool = True
    load_share: checks.Share = 1.0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            checks.fail(self, "name", _NAME_WORDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RocksDBSpec:
    """Rows in RocksDB, one database for each table and version. It needs the extra ``rocksdb``.

    Attributes:
        path: Directory of the databases.
        read_only: Whether no rows are written.
        load_share: Share of a table's rows to load, from the first on; 0 to serve the rows that the tier has.
    """

    kind: ClassVar[str] = "rocksdb"
    path: str
    read_only: bool = False
    load_share: float = 1.0

    def __post_init__(self) -> None:
        _check_disk(self)


TierSpec = HostMemorySpec | SharedMemorySpec | RedisSpec | RowFileSpec | RocksDBSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTableSpec:
    """A table of a served model.

    Attributes:
        name: Name of the table.
        width: Length D of a vector.
        default: Every number of the vector that keys without a row get.
        source: A folder or file of HugeCTR, or a checkpoint of terarec that has a table of this name; None to serve
            what tiers hold.
        key_bytes: Bytes of a key in a file of HugeCTR before 3.1, 4 or 8; folders have 8.
        has_slots: Whether a slot follows each key in such a file.
    """

    name: checks.Name
    width: checks.Width
    default: checks.Finite = 0.0
    source: str | None = None
    key_bytes: Literal[4, 8] = 8
    has_slots: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.source is not None and (not isinstance(self.source, str) or not self.source):
            checks.fail(self, "source", "a path, or none")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec(checks.Checked):
    """A cache of rows on the compute device, in front of the tiers of a table.

    Attributes:
        form: "dynamic" replaces rows that were not used for long; "static" loads the first rows and keeps them;
            "int8" is dynamic with rows in 8-bit codes.
        share: Rows of the cache as a share of the table's, above 0, at most 1.
        rows: Rows of the cache, in place of `share`.
        hit_rate_threshold: Where a lookup's share of found keys is at least this, the others get the default vector
            and are inserted in the background; else they are read at once. 1 reads all at once, unless none is missing.
        refresh_delay_seconds: Seconds before the first refresh.
        refresh_seconds: Seconds between two refreshes of the rows from the tiers; 0 for no refresh.
        refresh_share: Share of the rows that one step of a refresh reads.
    """

    form: Literal["dynamic", "static", "int8"] = "dynamic"
    share: checks.PositiveShare = 0.2
    rows: checks.Rows | None = None
    hit_rate_threshold: checks.Share = 1.0
    refresh_delay_seconds: checks.NonNegative = 0.0
    refresh_seconds: checks.NonNegative = 0.0
    refresh_share: checks.PositiveShare = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModelSpec:
    """A version of a model whose tables a parameter server holds.

    Attributes:
        name: Name of the model.
        tables: Its tables.
        version: Number of the version; 0 for a model without versions, whose rows in Redis HugeCTR finds, too.
        cache: Cache of each table on a device; None for none.
    """

    name: str
    tables: tuple[ServedTableSpec, ...]
    version: checks.NonNegativeInt = 0
    cache: CacheSpec | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            checks.fail(self, "name", _NAME_WORDS)
        if not self.tables:
            checks.reject(self, "tables", "got none, expected at least one table")
        checks.distinct(self, "tables", [table.name for table in self.tables])

    def table(self, name: str) -> ServedTableSpec:
        """Return the table `name`.

        Raises:
            ConfigError: There is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        known = ", ".join(table.name for table in self.tables)
        raise ConfigError("table", f"got {name!r} of model {self.name!r}, expected one of {known}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServerSpec:
    """Tiers of a parameter server, the fastest first, and the models to load at its start.

    Attributes:
        tiers: Memories of the rows. A key is looked up in one after the other until one has it.
        models: Models.
    """

    tiers: tuple[TierSpec, ...] = (HostMemorySpec(),)
    models: tuple[ServedModelSpec, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tiers, tuple) or not self.tiers:
            checks.fail(self, "tiers", "at least one tier")
        kinds = [tier.kind for tier in self.tiers]
        if kinds.count("host") > 1 or kinds.count("shared") > 1:
            checks.reject(self, "tiers", f"got {kinds}, expected host and shared memory once")
        paths = [tier.path for tier in self.tiers if isinstance(tier, RowFileSpec | RocksDBSpec)]
        # Two tiers in one directory would take the same files.
        checks.distinct(self, "tiers", paths)
        checks.distinct(self, "models", [f"{model.name} {model.version}" for model in self.models])


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTablesSpec:
    """Tiers of the rows of a served run, and the caches in front of them.

    Attributes:
        tiers: Memories of the rows, the fastest first.
        cache: Cache of each table in front of the tiers; None for none.
        follow_seconds: Seconds between two looks for a newer checkpoint of the run, to which the server moves on, from
            the last one at first; None to stay at the first. Of a model repository, those of the versions that follow.
    """

    tiers: tuple[TierSpec, ...] = (HostMemorySpec(),)
    cache: CacheSpec | None = None
    follow_seconds: checks.Positive | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        # Checks the tiers as those of a parameter server.
        _ = self.server
        checks.instance(self, "cache", CacheSpec | None, "a cache, or none")

    @property
    def server(self) -> ParameterServerSpec:
        """The parameter server."""
        return ParameterServerSpec(tiers=self.tiers)

    @property
    def exclusive_kinds(self) -> tuple[str, ...]:
        """Kinds of the tiers that only one process can open."""
        return tuple(tier.kind for tier in self.tiers if not getattr(tier, "read_only", True))


def _check_disk(spec: RowFileSpec | RocksDBSpec) -> None:
    if not isinstance(spec.path, str) or not spec.path:
        checks.fail(spec, "path", "the path of a directory")
    checks.finite_float(spec, "load_share", low=0.0, high=1.0)
