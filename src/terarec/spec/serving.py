"""Servers of trained models, the streams that they are updated by, and the search of items."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from terarec.spec import checks
from terarec.spec.parameter_server import RedisSpec, ServedTablesSpec

EXECUTOR_NAMES = ("eager", "compile", "aotinductor", "onnxruntime", "openvino")
"""Executors of the dense part of a served model on a CPU; see docs/inference.md."""
EXECUTOR_MODES = ("auto", "measure", *EXECUTOR_NAMES)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpec:
    """Address and limits of a model server.

    Attributes:
        name: The model's name in the URL.
        host: Address to bind; loopback by default.
        port: TCP port; 0 lets the system choose a free one.
        max_batch: Maximum number of records accepted in one request.
        max_request_bytes: Limit of the bytes of a request body.
        max_in_flight: Limit of the requests in flight: received, waiting or scored.
        receive_timeout_seconds: Timeout for a client to send a request.
        tables: Where the rows of the tables are; None for the memory of the device.
        executor: Executor of the dense part on a CPU: "auto" for the choice that the run stores, "measure" to
            choose the fastest where none is stored, or a name.
    """

    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 65536
    max_request_bytes: int = 32 * 2**20
    max_in_flight: int = 64
    receive_timeout_seconds: float = 30.0
    tables: ServedTablesSpec | None = None
    executor: str = "auto"

    def __post_init__(self) -> None:
        checks.name(self)
        checks.one_of(self, "executor", EXECUTOR_MODES)
        checks.positive_int(self, "port", minimum=0)
        checks.positive_int(self, "max_batch")
        checks.positive_int(self, "max_request_bytes")
        checks.positive_int(self, "max_in_flight")
        checks.finite_float(self, "receive_timeout_seconds", low=0, open_low=True)
        checks.instance(self, "tables", ServedTablesSpec | None, "ServedTablesSpec(tiers=...) or None")
        if self.port > 65535:
            checks.fail(self, "port", "a TCP port from 0 to 65535")


_NAME = re.compile(r"[A-Za-z0-9._\-]{1,200}")
_BROKERS = re.compile(r"[^\s,:/]+:\d{1,5}(,[^\s,:/]+:\d{1,5})*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisStreamSpec:
    """A stream of Redis or Valkey. It is cut at each base, so that the server holds one base and its deltas.

    Attributes:
        server: The server or cluster.
        stream: Name of the stream.
        record_bytes: Maximum bytes of a record's content.
    """

    kind: ClassVar[str] = "redis_stream"
    server: RedisSpec = field(default_factory=RedisSpec)
    stream: str = "terarec"
    record_bytes: int = 524288

    def __post_init__(self) -> None:
        checks.instance(self, "server", RedisSpec, "RedisSpec(...)")
        _check_stream(self, "stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaTopicSpec:
    """Partition 0 of a topic of Kafka. Its retention has to keep a base and the deltas that follow it.

    Attributes:
        brokers: Address ``host:port`` of a broker, or of several with commas between.
        topic: Name of the topic, which the broker or an administrator creates.
        record_bytes: Maximum bytes of a record's content; brokers accept 1 MiB unless they are configured otherwise.
        timeout_seconds: Maximum seconds to wait for a broker.
    """

    kind: ClassVar[str] = "kafka"
    brokers: str = "127.0.0.1:9092"
    topic: str = "terarec"
    record_bytes: int = 524288
    timeout_seconds: float = 10.0
    client_file: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.brokers, str) or not _BROKERS.fullmatch(self.brokers):
            checks.fail(self, "brokers", "HOST:PORT, or several with commas between")
        _check_stream(self, "topic")
        checks.finite_float(self, "timeout_seconds", low=0.0, open_low=True)
        checks.instance(self, "client_file", str | None, "the path of a file or None")


UpdateStreamSpec = RedisStreamSpec | KafkaTopicSpec


def _check_stream(spec: UpdateStreamSpec, name: str) -> None:
    value = getattr(spec, name)
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        checks.fail(spec, name, "1 to 200 letters, digits, '.', '_' and '-'")
    checks.positive_int(spec, "record_bytes")


SearchMethod = Literal["auto", "exact", "lists"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemIndexSpec:
    """Search of the items whose vectors have the largest dot products with a query.

    Attributes:
        method: "exact" for all products; "lists" for inverted lists, which find most of the best items in a fraction
            of the time; "auto" for the exact one up to `exact_items`.
        exact_items: Largest number of items that "auto" searches exactly.
        lists: Number of lists that the items are divided into; None for four times the root of their number.
        probes: Number of lists that a search reads, those nearest to a query; None for a sixteenth of them.
    """

    method: SearchMethod = "auto"
    exact_items: int = 50_000
    lists: int | None = None
    probes: int | None = None

    def __post_init__(self) -> None:
        checks.one_of(self, "method", ("auto", "exact", "lists"))
        checks.positive_int(self, "exact_items", minimum=0)
        for name in ("lists", "probes"):
            if getattr(self, name) is not None:
                checks.positive_int(self, name)
