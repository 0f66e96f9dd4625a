"""Logs of records that all readers see in one order: a stream of Redis or Valkey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from terarec.errors import StorageError
from terarec.ps.redis_server import RedisServer, Request, request
from terarec.spec import RedisStreamSpec

_FIELD = b"record"
_READ_AT_ONCE = 32


class StreamRecord(NamedTuple):
    """A record of a stream.

    Attributes:
        position: Its place, by which reading goes on.
        content: Its bytes.
    """

    position: str
    content: bytes


class UpdateStream(Protocol):
    """A log of records. Each record is durable, as far as the server makes it so, when `append` returns.

    Attributes:
        record_bytes: Most bytes of a record's content, beside some hundred for what names it.
    """

    record_bytes: int

    def append(self, contents: Sequence[bytes]) -> list[str]:
        """Append records; return their positions.

        Raises:
            StorageError: The server cannot be reached in time, or refuses a record; some may have been appended.
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

    def last(self) -> bytes | None:
        """Return the last record; None where there is none.

        Raises:
            StorageError: The server cannot be reached in time.
        """
        ...

    def trim(self, before: str) -> None:
        """Remove the records before a position, where readers can do without them and the server is told so.

        Raises:
            StorageError: The server cannot be reached in time.
        """
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class RedisStream:
    """A stream of Redis or Valkey; see `UpdateStream`."""

    def __init__(self, spec: RedisStreamSpec) -> None:
        self.record_bytes = spec.record_bytes
        self._name = spec.stream
        self._server = RedisServer(spec.server)

    def append(self, contents: Sequence[bytes]) -> list[str]:
        """See `UpdateStream.append`."""
        replies = self._server.run([request(self._name, b"XADD", b"*", _FIELD, content) for content in contents])
        return [reply.decode() for reply in replies]

    def read(self, after: str | None) -> list[StreamRecord]:
        """See `UpdateStream.read`."""
        begin = b"-" if after is None else b"(" + after.encode()
        count = str(_READ_AT_ONCE).encode()
        return self._records(request(self._name, b"XRANGE", begin, b"+", b"COUNT", count))

    def last(self) -> bytes | None:
        """See `UpdateStream.last`."""
        found = self._records(request(self._name, b"XREVRANGE", b"+", b"-", b"COUNT", b"1"))
        return found[0].content if found else None

    def trim(self, before: str) -> None:
        """See `UpdateStream.trim`."""
        self._server.run([request(self._name, b"XTRIM", b"MINID", before.encode())])

    def close(self) -> None:
        """See `UpdateStream.close`."""
        self._server.close()

    def _records(self, asked: Request) -> list[StreamRecord]:
        found = []
        for position, fields in self._server.run([asked])[0]:
            if len(fields) != 2 or fields[0] != _FIELD:
                problem = f"record {position.decode()} has other fields, expected those of updates"
                raise StorageError(f"stream {self._name!r}", problem)
            found.append(StreamRecord(position.decode(), fields[1]))
        return found
