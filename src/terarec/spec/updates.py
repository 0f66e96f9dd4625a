"""Where a trainer's changes are published for replicas that do not see its files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from terarec.spec import checks
from terarec.spec.parameter_server import RedisSpec

_NAME = re.compile(r"[A-Za-z0-9._\-]{1,200}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisStreamSpec:
    """A stream of Redis or Valkey. It is cut at each base, so that the server holds one base and its deltas.

    Attributes:
        server: The server or cluster.
        stream: Name of the stream.
        record_bytes: Most bytes of a record's content.
    """

    server: RedisSpec = field(default_factory=RedisSpec)
    stream: str = "terarec"
    record_bytes: int = 524288

    def __post_init__(self) -> None:
        checks.instance(self, "server", RedisSpec, "RedisSpec(...)")
        if not isinstance(self.stream, str) or not _NAME.fullmatch(self.stream):
            checks.fail(self, "stream", "1 to 200 letters, digits, '.', '_' and '-'")
        checks.positive_int(self, "record_bytes")
