# SPDX-License-Identifier: Apache-2.0
"""Servers of trained models, their numbers, the streams that update them, Triton, and the search of items."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args

from terarec.spec import checks
from terarec.spec.parameter_server import RedisSpec, ServedTablesSpec
from terarec.spec.run import RunSpec
from terarec.spec.serving_options import AccessSpec, BatchingSpec, ServedModelOptions, WatchingSpec

EXECUTOR_NAMES = ("eager", "compile", "aotinductor", "onnxruntime", "openvino")
"""Executors of the dense part of a served model on a CPU; see docs/inference.md."""
ExecutorMode = Literal["auto", "measure", "eager", "compile", "aotinductor", "onnxruntime", "openvino"]
EXECUTOR_MODES: tuple[ExecutorMode, ...] = get_args(ExecutorMode)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpec:
    """Address and limits of a model server.

    Attributes:
        name: The model's name in the URL.
        host: Address to bind; loopback by default.
        port: TCP port; 0 lets the system choose a free one.
        max_batch: Maximum number of records accepted in one request.
        max_request_bytes: Limit of the bytes of a request body.
        max_in_flight: Limit of the requests in flight: those that have arrived, and wait or are scored.
        receive_timeout_seconds: Timeout for a client to send a request.
        keep_alive_seconds: Timeout for the next request of an open connection.
        drain_seconds: Time between SIGTERM, after which the server is not ready, and the end of new connections.
        access: Encryption, tokens and admitted hosts.
        tables: Tiers of the tables' rows; None for the memory of the device.
        grpc_port: TCP port of gRPC; None for no gRPC, 0 lets the system choose a free one.
        grpc_library: Library of gRPC: "native" for pygrpc-native, which answers small requests two to three times as
            fast, but neither encrypts nor reads deflate; "grpcio"; "auto" for "native" on loopback without encryption.
        grpc_max_streams: Limit of the streams of gRPC that are open.
        executor: Executor of the dense part on a CPU: "auto" for the choice that the run stores, "measure" to
            choose the fastest where none is stored, or a name.
        absent_is_missing: Whether a column that a request does not have is taken as missing values.
        batching: Joining of requests into batches.
        workers: Number of processes that serve the address; they share the tables in memory.
        threads: Threads that compute a batch, in each process and by every executor; None for one a core.
        watching: What is written down about calls.
    """

    name: checks.Name = "model"
    host: str = "127.0.0.1"
    port: Annotated[int, checks.whole(0, 65535)] = 8000
    max_batch: checks.BatchSize = 65536
    max_request_bytes: checks.PositiveInt = 32 * 2**20
    max_in_flight: checks.Width = 1024
    receive_timeout_seconds: checks.Positive = 30.0
    keep_alive_seconds: checks.Positive = 75.0
    drain_seconds: checks.NonNegative = 0.0
    access: AccessSpec = field(default_factory=AccessSpec)
    tables: ServedTablesSpec | None = None
    grpc_port: Annotated[int, checks.whole(0, 65535)] | None = None
    grpc_library: Literal["auto", "grpcio", "native"] = "auto"
    grpc_max_streams: checks.Threads = 64
    executor: ExecutorMode = "auto"
    absent_is_missing: bool = False
    batching: BatchingSpec = field(default_factory=BatchingSpec)
    workers: checks.Threads = 1
    threads: checks.Threads | None = None
    watching: WatchingSpec = field(default_factory=WatchingSpec)

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.instance(self, "access", AccessSpec, "AccessSpec(...)")
        checks.instance(self, "tables", ServedTablesSpec | None, "ServedTablesSpec(tiers=...) or None")
        checks.instance(self, "batching", BatchingSpec, "BatchingSpec(...)")
        checks.instance(self, "watching", WatchingSpec, "WatchingSpec(...)")
        if self.port > 65535:
            checks.fail(self, "port", "a TCP port from 0 to 65535")
        if self.grpc_port == 0 and self.workers > 1:
            checks.fail(self, "grpc_port", "a port from 1 with several workers, which share it")
        if self.grpc_library == "native" and self.access.certificate is not None:
            checks.reject(self, "grpc_library", "got 'native' with a certificate, expected 'grpcio', which encrypts")

    def model_options(self) -> ServedModelOptions:
        """Return the options of the model that is served."""
        return ServedModelOptions(
            max_batch=self.max_batch,
            absent_is_missing=self.absent_is_missing,
            batching=self.batching,
            times_lookups=self.watching.otlp_endpoint is not None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers(checks.Checked):
    """Number formats in which a trained model computes.

    Attributes:
        row_type: Number format of the tables' rows. "int8" for rows of 8-bit codes, D + 8 bytes each; "fp32" for rows
            as they are.
        precision: Number format of the layers' matrix products; None for that of the training. "int8" is for CPUs.

    Raises:
        ConfigError: Another name.
    """

    row_type: Literal["fp32", "int8"] = "fp32"
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = None

    def products(self, run: RunSpec) -> Literal["fp32", "bf16", "fp16"]:
        """Return the precision of the products of a run's model; float32 for all but layers of int8."""
        if self.precision is None:
            return run.training.precision
        return "fp32" if self.precision == "int8" else self.precision


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonSpec:
    """Model repository of NVIDIA Triton for a run.

    Attributes:
        name: Name of the model; those of the stages of an ensemble begin with it.
        form: "model" for one model of the python back end, "ensemble" for three stages, of which the dense layers may
            be in another back end.
        backend: Back end of Triton for the dense layers of an ensemble.
        max_batch: Maximum number of records of a request, and of requests that Triton joins.
        preferred_batches: Sizes at which a batch need not wait for more requests.
        queue_delay_microseconds: Time that a request waits for others.
        instances: Copies of each stage that run side by side.
        python_path: Folders in which Triton's Python finds terarec and what it needs, where they are not installed; it
            does not read PYTHONPATH.
        text: Type of text columns: "bytes" for BYTES, "utf8" for UINT8. The latter are [batch, L], in UTF-8 with zeros
            behind the end, [batch, n, L] for lists; back ends that do not read BYTES under NumPy 2 take them, too.
        tables: JSON file of the tiers and caches of the tables' rows; None for host memory.

    Raises:
        ConfigError: A value out of range.
    """

    name: checks.Name = "terarec"
    form: Literal["model", "ensemble"] = "model"
    backend: Literal["python", "onnxruntime", "pytorch"] = "python"
    max_batch: checks.BatchSize = 1024
    preferred_batches: tuple[int, ...] = (256, 1024)
    queue_delay_microseconds: checks.NonNegativeInt = 500
    instances: checks.Threads = 1
    python_path: tuple[str, ...] = ()
    text: Literal["bytes", "utf8"] = "bytes"
    tables: str | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.form == "model" and self.backend != "python":
            checks.fail(self, "backend", "'python' for form='model'; another one is for the layers of an ensemble")
        if any(not 1 <= size <= self.max_batch for size in self.preferred_batches):
            checks.fail(self, "preferred_batches", f"sizes from 1 to {self.max_batch}, the largest batch")


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
        client_file: JSON or properties file of the client's settings for Kafka, such as encryption and passwords; None
            for no further settings.
    """

    kind: ClassVar[str] = "kafka"
    brokers: str = "127.0.0.1:9092"
    topic: str = "terarec"
    record_bytes: int = 524288
    timeout_seconds: checks.Positive = 10.0
    client_file: str | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not isinstance(self.brokers, str) or not _BROKERS.fullmatch(self.brokers):
            checks.fail(self, "brokers", "HOST:PORT, or several with commas between")
        _check_stream(self, "topic")
        checks.instance(self, "client_file", str | None, "the path of a file or None")


UpdateStreamSpec = RedisStreamSpec | KafkaTopicSpec


def _check_stream(spec: UpdateStreamSpec, name: str) -> None:
    value = getattr(spec, name)
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        checks.fail(spec, name, "1 to 200 letters, digits, '.', '_' and '-'")
    checks.positive_int(spec, "record_bytes")


SearchMethod = Literal["auto", "exact", "lists"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemIndexSpec(checks.Checked):
    """Search of the items whose vectors have the largest dot products with a query.

    Attributes:
        method: "exact" for all products; "lists" for inverted lists, which find most of the best items in a fraction
            of the time; "auto" for the exact one up to `exact_items`.
        exact_items: Largest number of items that "auto" searches exactly.
        lists: Number of lists that the items are divided into; None for four times the root of their number.
        probes: Number of lists that a search reads, those nearest to a query; None for a sixteenth of them.
    """

    method: SearchMethod = "auto"
    exact_items: checks.NonNegativeInt = 50_000
    lists: checks.PositiveInt | None = None
    probes: checks.PositiveInt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendationSpec:
    """Recommendations of a server.

    Attributes:
        items: File of the raw columns of all items: .parquet, .csv or .jsonl. It is read again when it changes.
        key: Column that identifies items, of integers or texts.
        retrieval: Name of the served model that retrieves candidates: two towers, or a model of sequences.
        ranker: Name of the served model that puts the candidates in order; None for the order of the candidates.
        score: Name of the score to rank by; None for the first one of the ranking model.
        index: Search method and its settings.
        index_dir: Directory that keeps the index; None to compute it at each start.
        candidates: Number of items that are retrieved for the ranking model, unless a request states one.
        most_items: Limit of the items for a user.
        most_candidates: Limit of the candidates for a user.
        poll_seconds: Seconds between two looks for another version of the retrieval model, or other items.
    """

    items: str
    key: checks.ColumnName
    retrieval: checks.Name = "model"
    ranker: str | None = None
    score: str | None = None
    index: ItemIndexSpec = field(default_factory=ItemIndexSpec)
    index_dir: str | None = None
    candidates: int = 200
    most_items: checks.BatchSize = 1000
    most_candidates: checks.BatchSize = 10_000
    poll_seconds: checks.Positive = 1.0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.ranker is not None:
            checks.name(self, "ranker")
        elif self.score is not None:
            checks.reject(self, "score", f"got {self.score!r} without a ranker, expected both or none")
        checks.instance(self, "index", ItemIndexSpec, "ItemIndexSpec(...)")
        checks.positive_int(self, "candidates", maximum=self.most_candidates)
