"""`RedisTier`: rows in Redis or Valkey, in the layout of HugeCTR's parameter server (docs/inference.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.ps.redis_server import RedisServer, Request, request
from terarec.ps.tier import Found, TierStatistics, as_bytes, as_rows, by_partition, check_insert, check_key_tensor

_KEY_BYTES = 8
_TIME_BYTES = 8
_SET_BYTES = 8 << 20  # of a command that sets rows, which the server holds in memory as a whole


class RedisTier:
    """Rows of a table on a server or a cluster. Implements `terarec.ps.Tier`.

    A hash for each partition has the rows: key int64 -> float32[D], both as bytes. Where rows are evicted by their last
    use, a second hash has the times: key -> int64, seconds since 1970.

    Args:
        server: The connections.
        tag: Name of the table on the server, such as ``hps_et.MODEL.TABLE``.
        width: Length D of a vector.
    """

    name = "redis"
    is_writable = True

    def __init__(self, server: RedisServer, tag: str, width: int) -> None:
        self.width = width
        self._server = server
        self._spec = server.spec
        self._tag = tag
        self._tracks_use = self._spec.overflow.max_rows is not None and self._spec.overflow.evict != "random"
        self._lock = threading.Lock()
        self._counted = TierStatistics()

    def count(self) -> int:
        """Return the number of rows; see `Tier.count`."""
        names = [self._hash(number) for number in range(self._spec.num_partitions)]
        return sum(self._server.run([request(name, b"HLEN") for name in names]))

    @property
    def server(self) -> RedisServer:
        """The connections."""
        return self._server

    def lookup(self, keys: Tensor) -> Found:
        """Look up keys; see `Tier.lookup`. Rows of another size than the table's are counted and not found."""
        return look_up_tables([(self, keys)])[0]

    def requests(self, keys: Tensor) -> tuple[list[Tensor | slice], list[Request]]:
        """Return the commands that read rows, and the places of the keys of each."""
        batches = list(self._batches(keys))
        return [places for _, places in batches], [
            Request(name, packed_get(name, keys[places].numpy())) for name, places in batches
        ]

    def found(self, keys: Tensor, parts: Sequence[Tensor | slice], replies: Sequence[Any]) -> Found:
        """Return the rows in replies to `requests`."""
        row_bytes = 4 * self.width
        held = np.empty((keys.numel(), row_bytes), np.uint8)
        # Rows in replies may have any length: another program may have written them.
        mask, damaged = torch.zeros(keys.numel(), dtype=torch.bool), 0
        for places, reply in zip(parts, replies, strict=True):
            rows = [row for row in reply if row is not None and len(row) == row_bytes]
            if len(rows) == len(reply):  # the usual reply, for which no row is looked at one by one
                mask[places] = True
                held[_positions(places)] = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, row_bytes)
                continue
            is_good = np.fromiter((row is not None and len(row) == row_bytes for row in reply), np.bool_, len(reply))
            mask[places] = torch.from_numpy(is_good)
            held[_positions(places)[is_good]] = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, row_bytes)
            damaged += len(reply) - len(rows) - reply.count(None)
        self._note_use(keys[mask])
        self._add(keys=keys.numel(), hits=int(mask.count_nonzero()), damaged=damaged)
        return Found(as_rows(held, self.width), mask)

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Set rows; see `Tier.insert`; a partition with more rows than its bound evicts some."""
        keys, rows = check_insert(keys, rows, self.width)
        held = as_bytes(rows, 4 * self.width)
        most = max(1, _SET_BYTES // held.shape[1])
        for name, places in self._batches(keys, most):
            part = _positions(places)
            requests = [Request(name, packed_set(name, keys[places].numpy(), held[part]))]
            if self._tracks_use:
                # In one exchange with the rows: an eviction chooses by times, and would pass over rows without one.
                requests.append(self._times(keys[places].numpy(), name))
            self._server.run(requests)
            self._add(inserted=len(part))
            self._resolve_overflow(name)

    def erase(self, keys: Tensor) -> None:
        """Remove rows; see `Tier.erase`."""
        keys = check_key_tensor(keys)
        for name, places in self._batches(keys):
            fields = keys[places].numpy()
            # A time without a row would be chosen by an eviction in place of a row.
            names = [name, _times_of(name)] if self._tracks_use else [name]
            self._server.run([Request(held, _packed_keys("HDEL", held, fields)) for held in names])

    def clear(self) -> None:
        """Remove all rows; see `Tier.clear`."""
        names = [self._hash(number) for number in range(self._spec.num_partitions)]
        # Times may be there although this spec tracks none: another one may have written them.
        names += [_times_of(name) for name in names]
        self._server.run([request(name, b"UNLINK") for name in names])

    def flush(self) -> None:
        """Do nothing: the server decides when its rows are durable."""

    def refresh(self) -> bool:
        """Return False: every lookup sees the rows of other writers."""
        return False

    def statistics(self) -> TierStatistics:
        """Return the counters of the tier."""
        return self._counted

    def close(self) -> None:
        """Do nothing: the connections belong to the server."""

    def _batches(self, keys: Tensor, most: int | None = None) -> Iterator[tuple[str, Tensor | slice]]:
        """Yield the hashes of keys, each with the places of at most `most` keys."""
        most = self._spec.batch_rows if most is None else min(most, self._spec.batch_rows)
        for number, places in by_partition(keys, self._spec.num_partitions):
            name = self._hash(number)
            if isinstance(places, slice):
                for begin in range(0, keys.numel(), most):
                    yield name, slice(begin, min(begin + most, keys.numel()))
            else:
                for part in torch.split(places, most):
                    yield name, part

    def _hash(self, partition: int) -> str:
        # What is in braces decides the node of a cluster, so that rows and times of a partition are together.
        return f"hps_et{{{self._tag}/p{partition}}}v"

    def _times(self, keys: NDArray[np.int64], name: str) -> Request:
        times = np.full(len(keys), int(time.time()), np.int64).view(np.uint8).reshape(len(keys), _TIME_BYTES)
        held = _times_of(name)
        return Request(held, packed_set(held, keys, times))

    def _note_use(self, keys: Tensor) -> None:
        if self._tracks_use and keys.numel():
            self._server.run([self._times(keys[places].numpy(), name) for name, places in self._batches(keys)])

    def _resolve_overflow(self, name: str) -> None:
        """Evict rows of a partition that has more than its bound."""
        overflow = self._spec.overflow
        if overflow.max_rows is None:
            return
        held = int(self._server.run([request(name, b"HLEN")])[0])
        if held <= overflow.max_rows:
            return
        most = held - int(overflow.max_rows * overflow.keep)
        if self._tracks_use:
            times = _times_of(name)
            # A hash has no order, so the oldest rows are found by reading all times.
            pairs = self._server.run([request(times, b"HGETALL")])[0]
            fields, found = _pairs(pairs)
            order = np.argsort(found, kind="stable")[:most]
            gone = fields[order]
        else:
            # A positive count gives distinct fields.
            fields_found = self._server.run([request(name, b"HRANDFIELD", b"%d" % most)])[0]
            gone = np.frombuffer(b"".join(fields_found), np.int64)
        names = [name, _times_of(name)] if self._tracks_use else [name]
        self._server.run([Request(held_name, _packed_keys("HDEL", held_name, gone)) for held_name in names])
        self._add(evicted=len(gone))

    def _add(self, *, keys: int = 0, hits: int = 0, inserted: int = 0, evicted: int = 0, damaged: int = 0) -> None:
        with self._lock:
            old = self._counted
            self._counted = TierStatistics(
                keys=old.keys + keys,
                hits=old.hits + hits,
                inserted=old.inserted + inserted,
                evicted=old.evicted + evicted,
                damaged=old.damaged + damaged,
            )


def look_up_tables(lookups: Sequence[tuple[RedisTier, Tensor]]) -> list[Found]:
    """Look up ``keys int64[n]`` of tables on one server, in one exchange with each of its nodes.

    Raises:
        StorageError: The server cannot be reached.
    """
    checked = [(tier, check_key_tensor(keys)) for tier, keys in lookups]
    wanted = [tier.requests(keys) for tier, keys in checked]
    replies = iter(checked[0][0].server.run([request for _, requests in wanted for request in requests]))
    return [
        tier.found(keys, places, list(islice(replies, len(requests))))
        for (tier, keys), (places, requests) in zip(checked, wanted, strict=True)
    ]


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


def _pairs(reply: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return fields and values int64[n] of a reply to HGETALL, which RESP3 gives as a dictionary."""
    fields: Sequence[bytes]
    values: Sequence[bytes]
    if isinstance(reply, dict):
        fields, values = list(reply), list(reply.values())
    else:
        fields, values = reply[::2], reply[1::2]
    return np.frombuffer(b"".join(fields), np.int64), np.frombuffer(b"".join(values), np.int64)
