# SPDX-License-Identifier: Apache-2.0
"""Messages of updated rows in HugeCTR's layout, and sending them to a broker of Kafka."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.errors import FormatError, StorageError, UnreachableError
from terarec.memory.batch_parts import by_partition
from terarec.serve.update_streams import kafka_library

# A mark and the bytes of a vector; then pairs of a key and a vector. HugeCTR's trainer writes keys of 8 bytes whatever
# the model's are.
_HEAD = struct.Struct("<4sI")
_MARK = b"HCTR"
_KEY_BYTES = 8
# Those of HugeCTR's trainer: what it sends at once, and the groups of keys that keep their order.
_MESSAGE_BYTES = 256 * 1024
_NUM_GROUPS = 8
_TIMEOUT_SECONDS = 30.0


class UpdatedRows(NamedTuple):
    """Rows of a table.

    Attributes:
        keys: int64[n].
        vectors: float32[n, D].
    """

    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]


def broker_list(brokers: str) -> str:
    """Return brokers as the client names them; HugeCTR's documentation has semicolons between them."""
    return brokers.replace(";", ",")


def topic_of(model: str, table: str) -> str:
    """Return the topic that has the rows of a table."""
    return f"hps_et.{model}.{table}"


def decode_message(content: bytes, width: int) -> UpdatedRows:
    """Return the rows of a message; none for the message with which a trainer tests its connection.

    Args:
        content: Value of the message.
        width: Length D of the table's vectors.
    """
    if len(content) < _HEAD.size or content[:4] != _MARK:
        raise FormatError("message", f"begins with {content[:8]!r}, expected {_MARK!r} and the bytes of a vector")
    vector_bytes = _HEAD.unpack_from(content)[1]
    pairs = len(content) - _HEAD.size
    if not pairs:
        return UpdatedRows(np.empty(0, np.int64), np.empty((0, width), np.float32))
    if vector_bytes != 4 * width:
        raise FormatError("message", f"has vectors of {vector_bytes} bytes, expected {4 * width} of a table this wide")
    if pairs % (_KEY_BYTES + vector_bytes):
        raise FormatError("message", f"has {pairs} bytes of rows, expected a multiple of {_KEY_BYTES + vector_bytes}")
    rows = np.frombuffer(content, _pairs_of(width), offset=_HEAD.size)
    return UpdatedRows(rows["key"].astype(np.int64), rows["vector"].astype(np.float32))


def encode_messages(rows: UpdatedRows) -> Iterator[tuple[int, bytes]]:
    """Yield messages with rows, each with the group of its keys; messages of a group keep their order."""
    width = rows.vectors.shape[1]
    pairs = np.empty(len(rows.keys), _pairs_of(width))
    pairs["key"], pairs["vector"] = rows.keys, rows.vectors
    head = _HEAD.pack(_MARK, 4 * width)
    most = max(1, (_MESSAGE_BYTES - _HEAD.size) // pairs.itemsize)
    for group, places in by_partition(torch.from_numpy(rows.keys), _NUM_GROUPS):
        part = pairs[places.numpy() if isinstance(places, torch.Tensor) else places]
        for begin in range(0, len(part), most):
            yield group, head + part[begin : begin + most].tobytes()


def send_rows(brokers: str, model: str, tables: Iterable[tuple[str, UpdatedRows]]) -> None:
    """Send rows to the topics of tables, which the broker creates where it allows that; all are there on return.

    Raises:
        MissingDependencyError: The client is not installed.
        StorageError: The broker rejects a message; some may be there.
        UnreachableError: The broker does not answer in time; as above.
    """
    library = kafka_library()
    producer = library.Producer(
        {
            "bootstrap.servers": broker_list(brokers),
            "enable.idempotence": True,  # a message that is sent again keeps the order
            "message.timeout.ms": int(1000 * _TIMEOUT_SECONDS),
            "message.max.bytes": 2 * _MESSAGE_BYTES,
            "log_level": 0,
        }
    )
    errors: list[object] = []

    def on_delivery(error: object, _: object) -> None:
        if error is not None:
            errors.append(error)

    place = f"kafka {brokers}"
    try:
        for table, rows in tables:
            topic = topic_of(model, table)
            num_partitions = _partitions(library, producer, topic, place)
            for group, content in encode_messages(rows):
                while True:
                    try:
                        producer.produce(topic, content, partition=group % num_partitions, on_delivery=on_delivery)
                        break
                    except BufferError:  # the client's queue is full
                        producer.poll(0.1)
        waiting = producer.flush(_TIMEOUT_SECONDS)
    except library.KafkaException as error:
        raise UnreachableError(place, error.args[0].str()) from error
    if errors:
        raise StorageError(place, f"{len(errors)} messages were rejected, the first: {errors[0]}")
    if waiting:
        raise UnreachableError(place, f"{waiting} messages were not taken in {_TIMEOUT_SECONDS:g} s")


def _partitions(library: Any, producer: Any, topic: str, place: str) -> int:
    """Return the number of partitions of a topic; asking creates the topic where the broker allows that."""
    end = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        metadata = producer.list_topics(topic, _TIMEOUT_SECONDS).topics[topic]
        if metadata.error is None and metadata.partitions:
            return len(metadata.partitions)
        is_new = metadata.error is None or metadata.error.code() in (
            library.KafkaError.UNKNOWN_TOPIC_OR_PART,
            library.KafkaError.LEADER_NOT_AVAILABLE,
        )
        if not is_new or time.monotonic() > end:
            raise StorageError(place, f"topic {topic!r}: {metadata.error}, expected one that is there or may be made")
        time.sleep(0.1)  # the broker is creating it


def _pairs_of(width: int) -> np.dtype[np.void]:
    return np.dtype([("key", "<i8"), ("vector", "<f4", (width,))])
