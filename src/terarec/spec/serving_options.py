# SPDX-License-Identifier: Apache-2.0
"""Options of a server: its models and their batches, who may call it, and what it writes down about calls."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from terarec.spec import checks

MOST_QUEUED = 2**20
"""Largest limit of the requests that wait."""

MOST_LEVELS = 1024
"""Largest number of priority levels."""

MOST_DELAY_MICROSECONDS = 60_000_000
"""Longest time that a request may wait for others."""

MOST_TIMEOUT_SECONDS = 86_400.0
"""Longest time after which a request that waits is dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingSpec:
    """Joining of requests into batches. The fields have the meaning that Triton gives them.

    Attributes:
        max_batch_size: Records of a batch at most. A request of more is a batch of its own; 1 joins none.
        preferred_batch_sizes: Numbers of records at which a batch need not wait for more requests.
        max_queue_delay_microseconds: Time that a request waits for others to join it while the model is idle.
        target_p99_seconds: Time within which 99 of 100 requests are to be answered: the delay, up to the maximum if
            there is one, and the size of batches are then found by measurement. 0 for no target.
        priority_levels: Number of levels; requests of a lower number are scored first. 0 for no levels.
        default_priority_level: Level of requests that state none, from 1; 0 where there are no levels.
        default_timeout_seconds: Time after which a request that still waits is dropped; 0 for never. A request may
            state a shorter one.
        max_queue_size: Limit of the requests that wait; further ones are refused.

    Raises:
        ConfigError: A value out of range.
    """

    max_batch_size: checks.BatchSize = 1024
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_microseconds: Annotated[int, checks.whole(0, MOST_DELAY_MICROSECONDS)] = 0
    target_p99_seconds: Annotated[float, checks.number(0.0, MOST_DELAY_MICROSECONDS / 1e6)] = 0.0
    priority_levels: Annotated[int, checks.whole(0, MOST_LEVELS)] = 0
    default_priority_level: Annotated[int, checks.whole(0, MOST_LEVELS)] = 0
    default_timeout_seconds: Annotated[float, checks.number(0.0, MOST_TIMEOUT_SECONDS)] = 0.0
    max_queue_size: Annotated[int, checks.whole(1, MOST_QUEUED)] = 4096

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not all(map(checks.integer(1, self.max_batch_size).accepts, self.preferred_batch_sizes)):
            checks.fail(self, "preferred_batch_sizes", f"sizes from 1 to {self.max_batch_size}, the largest batch")
        if (self.default_priority_level == 0) != (self.priority_levels == 0):
            accepted = "0 without levels" if self.priority_levels == 0 else f"a level from 1 to {self.priority_levels}"
            checks.fail(self, "default_priority_level", accepted)
        if self.default_priority_level > self.priority_levels:
            checks.fail(self, "default_priority_level", f"a level from 1 to {self.priority_levels}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModelOptions:
    """Options of a served model.

    Attributes:
        max_batch: Maximum number of records accepted in one request.
        absent_is_missing: Whether a column that a request does not have is taken as missing values.
        batching: Joining of requests into batches.
        times_lookups: Whether the look-ups of rows in a batch are timed apart from its layers, for traces.
    """

    max_batch: checks.BatchSize = 65536
    absent_is_missing: bool = False
    batching: BatchingSpec = field(default_factory=BatchingSpec)
    times_lookups: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.instance(self, "batching", BatchingSpec, "BatchingSpec(...)")


_HOST = re.compile(r"\*|[A-Za-z0-9._:\[\]\-]{1,253}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessSpec:
    """Encryption, tokens and admitted hosts of a model server.

    Attributes:
        certificate: PEM file of the server's certificates, for TLS; None for none.
        key: PEM file of their key; None where `certificate` has it, too.
        client_ca: PEM file of the authorities whose certificates clients must have; None for clients without any.
        token_file: File of the tokens that calls need, one a line; None for calls without any.
        admin_token_file: File of the tokens of administrators, who load and unload models and change settings; None for
            those of this machine alone, where the server is bound to loopback.
        admin_host: Address to bind for administrators.
        admin_port: TCP port for administrators, whose calls are accepted nowhere else; None for the server's own.
        allowed_hosts: Names that clients use for the server besides its addresses and, on loopback, "localhost"; "*"
            for any.
        shared_memory: Whether clients may pass tensors in shared memory; None for a server on loopback alone.

    Raises:
        ConfigError: A value of another type, or a key or authority without a certificate.
    """

    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    token_file: str | None = None
    admin_token_file: str | None = None
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, checks.whole(0, 65535)] | None = None
    allowed_hosts: tuple[str, ...] = ()
    shared_memory: bool | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for name in ("certificate", "key", "client_ca", "token_file", "admin_token_file"):
            checks.instance(self, name, str | None, "the path of a file or None")
            if getattr(self, name) == "":
                checks.fail(self, name, "the path of a file or None")
        for name in ("key", "client_ca"):
            if getattr(self, name) is not None and self.certificate is None:
                checks.reject(self, name, "got a file without a certificate, expected the certificate, too")
        checks.instance(self, "admin_host", str, "an address of this machine")
        is_listed = isinstance(self.allowed_hosts, tuple) and all(
            isinstance(host, str) and _HOST.fullmatch(host) for host in self.allowed_hosts
        )
        if not is_listed:
            checks.fail(self, "allowed_hosts", "names of hosts such as 'models.example.org', or '*'")


_HTTP_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchingSpec:
    """Access log, served records and traces of a model server.

    Attributes:
        access_log: File to which a line of JSON is appended for each call, "-" for the standard output; None for no
            access log.
        access_log_share: Share of the calls that are logged.
        record_directory: Directory to which Parquet files of scored records are written; None for none.
        record_share: Share of the requests whose records are written, or compared with the training data.
        record_file_bytes: Size from which a file of records is complete, and another one begins.
        record_file_seconds: Age from which it is complete.
        otlp_endpoint: URL of a collector of OpenTelemetry that gets traces by OTLP over HTTP, such as
            "http://127.0.0.1:4318"; None for none.
        trace_share: Share of the calls whose spans are sent; of those that name a trace, the client says which.

    Raises:
        ConfigError: A value of another type or out of range.
    """

    access_log: str | None = None
    access_log_share: checks.PositiveShare = 1.0
    record_directory: str | None = None
    record_share: checks.PositiveShare = 0.01
    record_file_bytes: checks.PositiveInt = 64 * 2**20
    record_file_seconds: checks.Positive = 300.0
    otlp_endpoint: str | None = None
    trace_share: checks.PositiveShare = 1.0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.instance(self, "access_log", str | None, "the path of a file, '-' or None")
        if self.access_log == "":
            checks.fail(self, "access_log", "the path of a file, '-' or None")
        checks.instance(self, "record_directory", str | None, "the path of a directory or None")
        if self.record_directory == "":
            checks.fail(self, "record_directory", "the path of a directory or None")
        checks.instance(self, "otlp_endpoint", str | None, "a URL or None")
        if self.otlp_endpoint is not None and not _HTTP_URL.fullmatch(self.otlp_endpoint):
            checks.fail(self, "otlp_endpoint", "a URL such as http://127.0.0.1:4318")
