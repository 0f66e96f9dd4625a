# SPDX-License-Identifier: Apache-2.0
"""Logs of records that all readers see in one order: a stream of Redis or Valkey, a topic of Kafka."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from terarec.closer import Closer
from terarec.errors import ConfigError, DataNotFoundError, FormatError, MissingDependencyError, StorageError
from terarec.io.files import read_json
from terarec.io.opening import read_bytes
from terarec.memory.redis_server import RedisServer, Request, request
from terarec.spec import KafkaTopicSpec, RedisStreamSpec
from terarec.spec.serving import UpdateStreamSpec

_FIELD = b"record"
_READ_AT_ONCE = 32


class StreamRecord(NamedTuple):
    """A record of a stream.

    Attributes:
        position: Place in the stream, from which reading continues.
        content: Bytes of the record.
    """

    position: str
    content: bytes  # empty for a record that is none of ours, such as one of Redis with other fields


class UpdateStream(Protocol):
    """A log of records. Each record is durable, as far as the server makes it so, when `append` returns.

    Attributes:
        record_bytes: Maximum bytes of a record's content, without some hundred bytes of header.
    """

    record_bytes: int

    def append(self, contents: Sequence[bytes]) -> list[str]:
        """Append records; return their positions.

        Raises:
            StorageError: The server cannot be reached in time, or rejects a record; some may have been appended.
        """
        ...

    def read(self, after: str | None) -> list[StreamRecord]:
        """Return the next records after a position, from the first that is still there on; none at the end.

        Args:
            after: The position; None to read from the start.

        Raises:
            StorageError: The server cannot be reached in time.
        """
        ...

    def newest_first(self) -> Iterator[bytes]:
        """Yield the contents of the records from the last one to the first.

        Raises:
            StorageError: The server cannot be reached in time.
        """
        ...

    def trim(self, before: str) -> None:
        """Remove the records before a position, which readers no longer need, where the server supports it.

        Raises:
            StorageError: The server cannot be reached in time.
        """
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def open_stream(spec: UpdateStreamSpec) -> UpdateStream:
    """Return a stream; connections are made when they are first needed.

    Raises:
        ConfigError: A file of settings that cannot be used.
        DataNotFoundError: There is no such file.
        MissingDependencyError: The client is not installed.
    """
    return RedisStream(spec) if isinstance(spec, RedisStreamSpec) else KafkaTopic(spec)


class RedisStream:
    """A stream of Redis or Valkey; see `UpdateStream`."""

    def __init__(self, spec: RedisStreamSpec) -> None:
        self.record_bytes = spec.record_bytes
        self._name = spec.stream
        self._server = RedisServer(spec.server)

    def append(self, contents: Sequence[bytes]) -> list[str]:
        """Append records as `UpdateStream.append`."""
        # "*" lets the server number the records, so that positions rise whichever process appends.
        replies = self._server.run([request(self._name, b"XADD", b"*", _FIELD, content) for content in contents])
        return [reply.decode() for reply in replies]

    def read(self, after: str | None) -> list[StreamRecord]:
        """Read records as `UpdateStream.read`."""
        begin = b"-" if after is None else b"(" + after.encode()  # "(" leaves the position itself out
        count = str(_READ_AT_ONCE).encode()
        return self._records(request(self._name, b"XRANGE", begin, b"+", b"COUNT", count))

    def newest_first(self) -> Iterator[bytes]:
        """Yield records as `UpdateStream.newest_first`."""
        end, count = b"+", 1  # the last one is nearly always enough
        while records := self._records(request(self._name, b"XREVRANGE", end, b"-", b"COUNT", str(count).encode())):
            yield from (record.content for record in records)
            end, count = b"(" + records[-1].position.encode(), _READ_AT_ONCE

    def trim(self, before: str) -> None:
        """Remove records as `UpdateStream.trim`."""
        # Exactly: "~" would keep records up to a multiple of the server's node size.
        self._server.run([request(self._name, b"XTRIM", b"MINID", before.encode())])

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _records(self, command: Request) -> list[StreamRecord]:
        replies = self._server.run([command])[0]
        return [
            StreamRecord(position.decode(), fields[1] if len(fields) == 2 and fields[0] == _FIELD else b"")
            for position, fields in replies
        ]


_SILENT = logging.getLogger(f"{__name__}.client")  # of the client of Kafka, whose failures are raised here
_SILENT.setLevel(logging.CRITICAL + 1)
_LAST_RECORD = -2001  # RD_KAFKA_OFFSET_TAIL(1), for which the Python client has no name


# What this module relies on, and what names the brokers a second time.
_OWN_SETTINGS = (
    "auto.offset.reset",
    "bootstrap.servers",
    "enable.auto.commit",
    "enable.idempotence",
    "enable.partition.eof",
    "group.id",
    "message.max.bytes",
    "message.timeout.ms",
    "metadata.broker.list",
)


class _UnknownTopicError(StorageError):
    """There is no such topic."""


class KafkaTopic:
    """Partition 0 of a topic of Kafka; see `UpdateStream`. The topic's retention removes records.

    Args:
        spec: Brokers and topic.

    Raises:
        ConfigError: A file of settings that cannot be used.
        DataNotFoundError: There is no such file.
        MissingDependencyError: The client is not installed.
    """

    def __init__(self, spec: KafkaTopicSpec) -> None:
        self.record_bytes = spec.record_bytes
        self._spec = spec
        self._library = kafka_library()
        self._client_settings = {} if spec.client_file is None else _read_client_settings(Path(spec.client_file))
        if spec.client_file is not None:
            # The client alone knows its settings. A wrong one is reported now rather than by a thread that tries again.
            try:
                self._library.Producer(self._settings(), logger=_SILENT)
            except self._library.KafkaException as error:
                problem = self._failed(error).problem
                # The client quotes values in its messages, and a password may be in the line of another setting.
                for value in sorted(self._client_settings.values(), key=len, reverse=True):
                    problem = problem.replace(value, "***") if len(value) > 3 else problem
                raise ConfigError(spec.client_file, problem) from None
        # Its end waits for the client's threads, so a finalizer must not hold the last reference.
        self._clients: dict[str, Any] = {}
        self._closer = Closer(self, self._clients.clear)
        self._next: int | None = None  # offset at which the consumer continues, None where it has to be assigned

    def append(self, contents: Sequence[bytes]) -> list[str]:
        """Append records as `UpdateStream.append`."""
        done: list[tuple[Any, Any]] = []
        try:
            producer = self._connected_producer()
            for content in contents:
                producer.produce(
                    self._spec.topic, content, partition=0, on_delivery=lambda error, sent: done.append((error, sent))
                )
            producer.flush(self._spec.timeout_seconds + 1.0)  # by then each record is there or has timed out
            errors = [error for error, _ in done if error is not None]
            if errors or len(done) < len(contents):
                raise self._failed(errors[0] if errors else "no answer in time")
        except (self._library.KafkaException, BufferError) as error:
            self._forget_producer()
            raise self._failed(error) from error
        except StorageError:
            # A producer that failed may reject everything from then on, as where its broker has forgotten it.
            self._forget_producer()
            raise
        return [str(message.offset()) for _, message in done]

    def read(self, after: str | None) -> list[StreamRecord]:
        """Read records as `UpdateStream.read`."""
        return self._read(None if after is None else int(after) + 1)

    def newest_first(self) -> Iterator[bytes]:
        """Yield records as `UpdateStream.newest_first`."""
        try:
            records = self._read(_LAST_RECORD)
        except _UnknownTopicError:
            return  # the first record creates it, where the broker allows that
        newest: list[StreamRecord] = []
        # A broker's end of a topic may be too low while a batch is being added: read on until nothing follows.
        while records:
            newest += records
            records = self._read(int(records[-1].position) + 1)
        while newest:
            yield from (record.content for record in reversed(newest))
            newest = self._read_before(int(newest[0].position))

    def _read_before(self, end: int) -> list[StreamRecord]:
        """Return some of the records whose offsets are next below `end`, in their order."""
        part: list[StreamRecord] = []
        begin = max(0, end - _READ_AT_ONCE)
        while begin < end and (records := self._read(begin)):
            part += [record for record in records if int(record.position) < end]
            begin = int(records[-1].position) + 1
        return part

    def trim(self, before: str) -> None:
        """Do nothing: the topic's retention removes records, which other readers may want."""

    def close(self) -> None:
        """Close the connections."""
        self._forget_producer()
        self._forget_consumer()

    def _read(self, begin: int | None) -> list[StreamRecord]:
        """Return the next records from an offset on, or from the first one."""
        records: list[StreamRecord] = []
        try:
            consumer = self._connected_consumer()
            is_new = begin is None or begin != self._next
            if is_new:
                self._assign(consumer, self._library.OFFSET_BEGINNING if begin is None else begin)
            self._next = None
            ends, is_at_end = time.monotonic() + self._spec.timeout_seconds, False
            while len(records) < _READ_AT_ONCE and not is_at_end:
                # Records that are here already are returned without waiting for more.
                message = consumer.poll(0.0 if records else max(0.0, ends - time.monotonic()))
                if message is None:
                    if records:
                        break
                    if begin is not None and begin > 0 and self._end(consumer) < begin:
                        # The topic was created again: what it has is read from the start. The client does so itself
                        # where the broker says that the offset is out of range, which not every broker does.
                        return self._read(None)
                    raise self._failed("no answer in time")
                error = message.error()
                if error is None:
                    records.append(StreamRecord(str(message.offset()), message.value() or b""))
                elif error.code() == self._library.KafkaError._PARTITION_EOF:
                    if is_new or records:
                        is_at_end = True
                    elif begin is not None:  # this is where the topic ended some time ago; ask again
                        self._assign(consumer, begin)
                        is_new = True
                else:
                    raise self._failed(error)
        except (self._library.KafkaException, StorageError) as error:
            self._forget_consumer()
            raise error if isinstance(error, StorageError) else self._failed(error) from error
        # The end is reported once for each assignment, so a reader that has seen it assigns again.
        self._next = int(records[-1].position) + 1 if records and not is_at_end else None
        return records

    def _assign(self, consumer: Any, offset: int) -> None:
        consumer.assign([self._library.TopicPartition(self._spec.topic, 0, offset)])

    def _end(self, consumer: Any) -> int:
        partition = self._library.TopicPartition(self._spec.topic, 0)
        _, end = consumer.get_watermark_offsets(partition, timeout=self._spec.timeout_seconds)
        return int(end)

    def _connected_producer(self) -> Any:
        if "producer" not in self._clients:
            settings = {
                "enable.idempotence": True,  # a request that is sent again adds no record twice and keeps the order
                "message.timeout.ms": int(1000 * self._spec.timeout_seconds),
                # Room for a record with its head and the protocol's frame; the client's default is 1 MB.
                "message.max.bytes": 2 * self.record_bytes + 65_536,
            }
            self._clients["producer"] = self._library.Producer(self._settings() | settings, logger=_SILENT)
        return self._clients["producer"]

    def _connected_consumer(self) -> Any:
        if "consumer" not in self._clients:
            settings = {
                "group.id": "terarec",  # which the client requires; no offsets are kept there
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,  # until the end of the topic is reported: the time of a read that finds none
            }
            consumer = self._clients["consumer"] = self._library.Consumer(self._settings() | settings, logger=_SILENT)
            # A topic that is not there would only be awaited by the reads that follow.
            topic = consumer.list_topics(self._spec.topic, self._spec.timeout_seconds).topics[self._spec.topic]
            if topic.error is not None:
                raise self._failed(topic.error)
        return self._clients["consumer"]

    def _settings(self) -> dict[str, Any]:
        milliseconds = max(1000, int(1000 * self._spec.timeout_seconds))
        return {
            **self._client_settings,
            "bootstrap.servers": self._spec.brokers,
            "socket.timeout.ms": milliseconds,
            "reconnect.backoff.max.ms": 1000,  # a broker that is back is seen within a second, by default within ten
        }

    def _forget_producer(self) -> None:
        producer = self._clients.pop("producer", None)
        if producer is not None:
            # Drop queued records: a publication starts again, and old records would be mixed with the new ones.
            producer.purge()

    def _forget_consumer(self) -> None:
        consumer, self._next = self._clients.pop("consumer", None), None
        if consumer is not None:
            consumer.close()

    def _failed(self, error: object) -> StorageError:
        inner = error.args[0] if isinstance(error, self._library.KafkaException) else error
        place, kinds = f"kafka {self._spec.brokers}", self._library.KafkaError
        if not isinstance(inner, kinds):
            return StorageError(place, f"topic {self._spec.topic!r}: {inner}")
        if inner.code() in (kinds.UNKNOWN_TOPIC_OR_PART, kinds._UNKNOWN_TOPIC, kinds._UNKNOWN_PARTITION):
            return _UnknownTopicError(place, f"has no topic {self._spec.topic!r}, expected one with a partition 0")
        return StorageError(place, f"topic {self._spec.topic!r}: {inner.str()}")


def _read_client_settings(path: Path) -> dict[str, str]:
    """Read settings of the client from JSON or lines ``name=value``. Errors name no value: it may be a password."""
    expected = "the settings of a Kafka client"
    try:
        content = read_bytes(path)
    except DataNotFoundError:
        raise DataNotFoundError(path, f"no such file, expected {expected}") from None
    # A properties file has no mark of its own; a line of it that begins with a brace would name no setting.
    is_json = content.lstrip().startswith(b"{")
    settings = _json_settings(path, read_json(path, expected)) if is_json else _property_lines(path, content)
    for name in settings:
        if name in _OWN_SETTINGS:
            raise ConfigError(
                f"{path}: {name}", "is set by terarec, expected settings of encryption, users and network"
            )
    return settings


def _json_settings(path: Path, data: dict[str, object]) -> dict[str, str]:
    for name, value in data.items():
        if not isinstance(value, str | int | float):
            raise FormatError(path, name, f"got {type(value).__name__}, expected a text, number or boolean")
    # The client reads texts alone, with booleans as Java's properties spell them.
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in data.items()}


def _property_lines(path: Path, content: bytes) -> dict[str, str]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise FormatError(path, f"byte {error.start} is not UTF-8, expected lines NAME=VALUE or JSON") from None
    settings = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, separator, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not separator or not name.strip():
            raise FormatError(f"{path}:{number}", "expected NAME=VALUE, a comment with '#', or an empty line")
        if name.strip() in settings:
            raise FormatError(f"{path}:{number}", f"has {name.strip()!r} again, expected it once")
        settings[name.strip()] = value.strip()
    return settings


def kafka_library() -> Any:
    """Return the module of Kafka's client."""
    try:
        import confluent_kafka
    except ImportError:
        raise MissingDependencyError(
            "confluent_kafka", "not installed, expected pip install 'terarec[kafka]'"
        ) from None
    return confluent_kafka
