# SPDX-License-Identifier: Apache-2.0
"""`RedisRows`: rows in Redis or Valkey, in the layout of HugeCTR's parameter server (docs/inference.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.closer import Closer
from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import by_partition, table_spans
from terarec.memory.redis_fence import RedisFence
from terarec.memory.redis_server import RedisServer, Request, request
from terarec.memory.redis_users import RedisUsers, users_of
from terarec.memory.row_store import SCAN_ROWS

_KEY_BYTES = 8
_TIME_BYTES = 8
_Part = tuple[int, int, Tensor | slice]  # a table, a partition, and the places of rows there
_SET_BYTES = 8 << 20  # of a command that sets rows, which the server holds in memory as a whole


class RedisRows:
    """Rows of tables on a server or a cluster. Implements `terarec.memory.level.Level`.

    A hash for each partition has the rows: key int64 -> float32[D], both as bytes. Where rows are evicted by their last
    use, a second hash has the times: key -> int64, seconds since 1970.

    Attributes:
        fences: Which state the rows of each table are of. From its first change on, reads compare it.
        join: Says that this process has the tables, until it leaves them or this is closed.

    Args:
        server: The connections.
        tags: Names of the tables on the server, such as ``hps_et.MODEL.TABLE``.
        row_bytes: Bytes of a row.
    """

    memory_bytes = 0

    def __init__(self, server: RedisServer, tags: Sequence[str], row_bytes: int) -> None:
        self._server = server
        self._spec = server.spec
        self._tags = tuple(tags)
        self._row_bytes = row_bytes
        self._tracks_use = self._spec.overflow.max_rows is not None and self._spec.overflow.evict != "random"
        self._lock = threading.Lock()
        self._evicted = [0] * len(self._tags)
        self._damaged = [0] * len(self._tags)
        tables = range(len(self._tags))
        users = RedisUsers(server, [users_of(self._hash(table, 0)) for table in tables])
        self.join = users.join
        self._closer = Closer(self, users.close)
        self.fences = [RedisFence(server, [f"{name[:-1]}s" for name in self._hashes(table)], users) for table in tables]

    def losses(self, table: int) -> tuple[int, int]:
        """Return how many rows of a table were evicted, and how many have another size and count as missing."""
        return self._evicted[table], self._damaged[table]

    def count(self, table: int) -> int:
        """Return the number of rows of a table; see `Level.count`."""
        return sum(self._server.run([request(name, b"HLEN") for name in self._hashes(table)]))

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows; see `Level.read`. Commands of all tables go to the server in one exchange with each node.

        Raises:
            StaleRowsError: The rows of a table are of another state than they should be.
        """
        requested = list(self._batches(batch))
        commands = [
            Request(name, packed_get(name, batch.keys[places].numpy()))
            for name, (_, _, places) in zip(self._names(requested), requested, strict=True)
        ]
        fenced = list(self._fenced(requested))
        replies = self._server.run([*commands, *(command for _, _, part in fenced for command in part)])
        marks = iter(replies[len(commands) :])
        for fence, accepted, part in fenced:
            fence.check(accepted, list(islice(marks, len(part))))
        rows, is_there = out.numpy(), torch.zeros(batch.keys.numel(), dtype=torch.bool)
        # Rows in replies may have any length: another program may have written them.
        for (table, _, places), reply in zip(requested, replies, strict=False):
            good = [row for row in reply if row is not None and len(row) == self._row_bytes]
            if len(good) == len(reply):  # the usual reply, for which no row is looked at one by one
                is_there[places] = True
                rows[_positions(places)] = np.frombuffer(b"".join(good), np.uint8).reshape(-1, self._row_bytes)
                continue
            is_good = np.fromiter(
                (row is not None and len(row) == self._row_bytes for row in reply), np.bool_, len(reply)
            )
            is_there[places] = torch.from_numpy(is_good)
            rows[_positions(places)[is_good]] = np.frombuffer(b"".join(good), np.uint8).reshape(-1, self._row_bytes)
            self._add(self._damaged, table, len(reply) - len(good) - reply.count(None))
        self._note_use(batch.part(is_there.nonzero()[:, 0]))
        return is_there

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set rows; see `Level.write`; a partition with more rows than its bound evicts some."""
        rows, keys = values.contiguous().numpy(), batch.keys
        for table, number, places in self._batches(batch, max(1, _SET_BYTES // self._row_bytes)):
            self.fences[table].extend()
            name = self._hash(table, number)
            requests = [Request(name, packed_set(name, keys[places].numpy(), rows[_positions(places)]))]
            if self._tracks_use:
                # In one exchange with the rows: an eviction chooses by times, and would pass over rows without one.
                requests.append(self._times(keys[places].numpy(), name))
            self._server.run(requests)
            self._resolve_overflow(table, name)

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; see `Level.erase`."""
        for table, number, places in self._batches(batch):
            self.fences[table].extend()
            name = self._hash(table, number)
            fields = batch.keys[places].numpy()
            # A time without a row would be chosen by an eviction in place of a row.
            names = [name, _times_of(name)] if self._tracks_use else [name]
            self._server.run([Request(each, _packed_keys("HDEL", each, fields)) for each in names])

    def clear(self, table: int) -> None:
        """Remove all rows of a table; see `Level.clear`."""
        names = self._hashes(table)
        # Times may be there although this spec tracks none: another one may have written them.
        names += [_times_of(name) for name in names]
        self._server.run([request(name, b"UNLINK") for name in names])

    def retain(self, table: int, keys: Tensor) -> None:
        """Remove what a table without a bound has but the rows of ``keys int64[n]``; errors are those of `write`."""
        ordered, hashes, fence = keys.sort().values.numpy(), self._hashes(table), self.fences[table]
        fence.extend()
        self._server.run([request(_times_of(name), b"UNLINK") for name in hashes])
        for name in hashes:
            for pairs in self._scan(name, SCAN_ROWS):
                fence.extend()  # also where nothing is removed for long
                fields = [field for field, _ in pairs if len(field) == _KEY_BYTES]
                found = np.frombuffer(b"".join(fields), np.int64)
                is_gone = np.searchsorted(ordered, found) == np.searchsorted(ordered, found, side="right")
                gone = [field for field, _ in pairs if len(field) != _KEY_BYTES]
                gone += compress(fields, is_gone.tolist())
                if gone:
                    self._server.run([request(name, b"HDEL", *gone)])

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of a table; see `Level.items`. The server may name a row twice while others write."""
        for name in self._hashes(table):
            for fields in self._scan(name, chunk_rows):
                good = [(key, row) for key, row in fields if len(key) == _KEY_BYTES and len(row) == self._row_bytes]
                if good:
                    keys = np.frombuffer(b"".join(key for key, _ in good), np.int64)
                    rows = np.frombuffer(b"".join(row for _, row in good), np.uint8).reshape(-1, self._row_bytes)
                    yield torch.from_numpy(keys.copy()), torch.from_numpy(rows.copy())

    def _scan(self, name: str, chunk_rows: int) -> Iterator[list[tuple[bytes, bytes]]]:
        cursor = b""
        while cursor != b"0":
            arguments = (cursor or b"0", b"COUNT", b"%d" % chunk_rows)
            cursor, pairs = self._server.run([request(name, b"HSCAN", *arguments)])[0]
            yield _alternate(pairs)

    def metadata(self, table: int) -> Mapping[str, str]:
        """Return nothing: the server has rows alone."""
        return {}

    def commit(self, metadata: Mapping[str, str] | None = None, table: int | None = None) -> None:
        """Do nothing: the server decides when its rows are durable."""

    def refresh(self) -> bool:
        """Return False: every lookup sees the rows of other writers."""
        return False

    def close(self) -> None:
        """Say that this process has the tables no more; the connections belong to the server."""
        self._closer()

    def _fenced(
        self, requested: Sequence[_Part]
    ) -> Iterator[tuple[RedisFence, frozenset[bytes] | None, list[Request]]]:
        """Yield the fences of the tables of a read, with what they accept now and the reads of their marks."""
        for table, parts in groupby(requested, key=lambda part: part[0]):
            fence = self.fences[table]
            yield fence, fence.accepted, fence.requests([number for _, number, _ in parts])

    def _names(self, parts: Sequence[_Part]) -> Iterator[str]:
        return (self._hash(table, number) for table, number, _ in parts)

    def _batches(self, batch: RowBatch, most: int | None = None) -> Iterator[_Part]:
        """Yield tables and partitions of the rows of a batch, each with the places of at most `most` rows."""
        most = self._spec.batch_rows if most is None else min(most, self._spec.batch_rows)
        for span in table_spans(batch, len(self._tags)):
            for number, places in by_partition(batch.keys[span.places], self._spec.num_partitions):
                if isinstance(places, slice):
                    for begin in range(span.begin, span.end, most):
                        yield span.table, number, slice(begin, min(begin + most, span.end))
                else:
                    for part in torch.split(places + span.begin, most):
                        yield span.table, number, part

    def _hashes(self, table: int) -> list[str]:
        return [self._hash(table, number) for number in range(self._spec.num_partitions)]

    def _hash(self, table: int, partition: int) -> str:
        # What is in braces decides the node of a cluster, so that rows and times of a partition are together.
        return f"hps_et{{{self._tags[table]}/p{partition}}}v"

    def _times(self, keys: NDArray[np.int64], name: str) -> Request:
        times = np.full(len(keys), int(time.time()), np.int64).view(np.uint8).reshape(len(keys), _TIME_BYTES)
        times_name = _times_of(name)
        return Request(times_name, packed_set(times_name, keys, times))

    def _note_use(self, batch: RowBatch) -> None:
        if self._tracks_use and batch.keys.numel():
            parts = list(self._batches(batch))
            self._server.run(
                [
                    self._times(batch.keys[places].numpy(), name)
                    for name, (_, _, places) in zip(self._names(parts), parts, strict=True)
                ]
            )

    def _resolve_overflow(self, table: int, name: str) -> None:
        """Evict rows of a partition that has more than its bound."""
        overflow = self._spec.overflow
        if overflow.max_rows is None:
            return
        num_rows = int(self._server.run([request(name, b"HLEN")])[0])
        if num_rows <= overflow.max_rows:
            return
        most = num_rows - int(overflow.max_rows * overflow.keep)
        if self._tracks_use:
            # A hash has no order, so the oldest rows are found by reading all times.
            pairs = _alternate(self._server.run([request(_times_of(name), b"HGETALL")])[0])
            fields = np.frombuffer(b"".join(field for field, _ in pairs), np.int64)
            times = np.frombuffer(b"".join(value for _, value in pairs), np.int64)
            gone = fields[np.argsort(times, kind="stable")[:most]]
        else:
            # A positive count gives distinct fields.
            fields_found = self._server.run([request(name, b"HRANDFIELD", b"%d" % most)])[0]
            gone = np.frombuffer(b"".join(fields_found), np.int64)
        names = [name, _times_of(name)] if self._tracks_use else [name]
        self._server.run([Request(held_name, _packed_keys("HDEL", held_name, gone)) for held_name in names])
        self._add(self._evicted, table, len(gone))

    def _add(self, counts: list[int], table: int, count: int) -> None:
        with self._lock:
            counts[table] += count


def packed_get(name: str, keys: NDArray[np.int64]) -> bytes:
    """Return the command that reads the rows of ``keys int64[n]`` of a hash."""
    return _packed_keys("HMGET", name, keys)


def packed_set(name: str, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> bytes:
    """Return the command that sets the ``rows uint8[n, row_bytes]`` of keys of a hash.

    Packing 16,384 rows this way takes 3 ms; the client's own packing, argument by argument, 60 ms (Zen 4).
    """
    # One structured array has all arguments with what the protocol puts between them; `tobytes` is then one copy.
    head = f"${_KEY_BYTES}\r\n".encode()
    middle = f"\r\n${rows.shape[1]}\r\n".encode()
    parts = [("head", f"S{len(head)}"), ("key", "<i8"), ("middle", f"S{len(middle)}")]
    packed = np.empty(len(keys), np.dtype([*parts, ("row", np.uint8, (rows.shape[1],)), ("end", "S2")]))
    packed["head"], packed["key"], packed["middle"], packed["row"], packed["end"] = head, keys, middle, rows, b"\r\n"
    return _start("HSET", name, 2 * len(keys)) + packed.tobytes()


def _packed_keys(command: str, name: str, keys: NDArray[np.int64]) -> bytes:
    head = f"${_KEY_BYTES}\r\n".encode()
    packed = np.empty(len(keys), np.dtype([("head", f"S{len(head)}"), ("key", "<i8"), ("end", "S2")]))
    packed["head"], packed["key"], packed["end"] = head, keys, b"\r\n"
    return _start(command, name, len(keys)) + packed.tobytes()


def _start(command: str, name: str, num_arguments: int) -> bytes:
    text = name.encode()
    return b"*%d\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (num_arguments + 2, len(command), command.encode(), len(text), text)


def _times_of(name: str) -> str:
    return name[:-1] + "t"


def _positions(places: Tensor | slice) -> NDArray[np.int64]:
    return np.arange(places.start, places.stop) if isinstance(places, slice) else places.numpy()


def _alternate(reply: Any) -> list[tuple[bytes, bytes]]:
    """Return the pairs of a reply that has fields and values in turns, which RESP3 gives as a dictionary."""
    if isinstance(reply, dict):
        return list(reply.items())
    return list(zip(reply[::2], reply[1::2], strict=True))
