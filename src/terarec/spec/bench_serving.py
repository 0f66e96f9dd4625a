# SPDX-License-Identifier: Apache-2.0
"""Load on a model server, to measure its latency and throughput."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from terarec.spec import checks

LoadProtocol = Literal["http", "json", "grpc"]
LOAD_PROTOCOLS: tuple[LoadProtocol, ...] = get_args(LoadProtocol)

MOST_CONNECTIONS = 16_384
"""Most connections of a load."""

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OWN_HEADERS = ("content-length", "transfer-encoding", "inference-header-content-length")

MOST_BODIES = 4096
"""Most different requests that are prepared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpec:
    """Load on one model of a server: every protocol, size and level is measured by itself.

    Attributes:
        model: Name of the model in the URL.
        version: Version of the model; empty for the one that the server chooses.
        protocols: "http" for binary tensors over HTTP, "json" for JSON over HTTP, "grpc".
        sizes: Numbers of records in a request.
        concurrency: Numbers of clients, each of which sends its next request when it has an answer (closed loop).
        rates: Requests a second at random moments, sent whether or not earlier ones are answered (open loop). Where
            there are some, `concurrency` is not measured.
        seconds: Duration of a measurement.
        warmup_seconds: Duration of the load before each measurement.
        processes: Processes that send, each with its share of the load.
        cores: Numbers of the cores on which they run, one after the other; empty for any core.
        timeout_seconds: Time after which a request without an answer has failed.
        max_connections: Limit of the connections of an open loop.
        bodies: Number of different requests, which are sent in turn.
        list_length: Items of each list in synthetic records.
        seed: Seed of synthetic records and of the moments of an open loop.
        headers: Headers of each request, such as a token: metadata of gRPC.
    """

    model: checks.Name = "model"
    version: str = ""
    protocols: tuple[LoadProtocol, ...] = ("http",)
    sizes: tuple[int, ...] = (1,)
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rates: tuple[float, ...] = ()
    seconds: Annotated[float, checks.number(0.0, 86400.0, open_low=True)] = 5.0
    warmup_seconds: Annotated[float, checks.number(0.0, 86400.0)] = 1.0
    processes: checks.Threads = 1
    cores: tuple[int, ...] = ()
    timeout_seconds: Annotated[float, checks.number(0.0, 86400.0, open_low=True)] = 30.0
    max_connections: Annotated[int, checks.whole(1, MOST_CONNECTIONS)] = 256
    bodies: Annotated[int, checks.whole(1, MOST_BODIES)] = 64
    list_length: checks.Width = 4
    seed: checks.NonNegativeInt = 1
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not self.protocols or any(one not in LOAD_PROTOCOLS for one in self.protocols):
            checks.fail(self, "protocols", f"some of {', '.join(LOAD_PROTOCOLS)}")
        for name, rule in (
            ("sizes", checks.integer(1, checks.MOST_BATCH)),
            ("concurrency", checks.integer(1, MOST_CONNECTIONS)),
            ("rates", checks.number(0, 1e7, open_low=True)),
            ("cores", checks.integer(0, checks.MOST_WIDTH)),
        ):
            checks.follow(self, name, checks.list_of(rule))
        if not self.sizes:
            checks.fail(self, "sizes", "at least one number of records")
        if not (self.concurrency or self.rates):
            checks.fail(self, "concurrency", "at least one number of clients, or a rate")
        for name, value in self.headers.items():
            if not _HEADER.fullmatch(name) or not (value.isascii() and value.isprintable()):
                checks.fail(self, "headers", "names of letters, digits and '-', and values of printable ASCII")
            if name.lower() in _OWN_HEADERS:
                checks.reject(self, "headers", f"got {name!r}, expected none of {', '.join(_OWN_HEADERS)}")
