# SPDX-License-Identifier: Apache-2.0
"""Measures a server under loads of several protocols, sizes and levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from terarec.apps.bench_serve.bodies import file_records, grpc_bodies, http_bodies, synthetic_records
from terarec.apps.bench_serve.contact import Contact, GrpcContact, HttpContact, ServerClock
from terarec.apps.bench_serve.figures import LoadFigures, ServerTimes
from terarec.apps.bench_serve.http_sender import HttpAddress
from terarec.apps.bench_serve.load import Pace
from terarec.apps.bench_serve.processes import Target, measure
from terarec.errors import ConfigError
from terarec.serve.protocol import InferRequest
from terarec.spec.bench_serving import LoadSpec

_MOST_BYTES = 256 * 2**20
"""Bytes of the requests that are prepared at once; beyond them there are fewer different ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A measurement that was made, or begins.

    Attributes:
        place: Its number, from 0.
        total: Number of all measurements.
        figures: What was measured; None at the begin.
        errors: Reason -> number of requests that failed.
    """

    place: int
    total: int
    figures: LoadFigures | None = None
    errors: dict[str, int] = field(default_factory=dict)


class ServingBench:
    """Loads on one model of a server.

    Args:
        spec: What is measured.
        url: URL of HTTP; None for a server of gRPC alone.
        grpc_address: ``HOST:PORT`` of gRPC; None for a server of HTTP alone.
        records: Raw records, in columns of the names of the model's inputs; None for synthetic ones.

    Raises:
        ConfigError: A protocol without its address, or records that lack a column.
        InferenceError: The server cannot be reached, or does not serve the model.
        MissingDependencyError: The library of gRPC is not installed.
    """

    def __init__(
        self, spec: LoadSpec, url: str | None = None, grpc_address: str | None = None, records: pa.Table | None = None
    ) -> None:
        for protocol in spec.protocols:
            if (grpc_address if protocol == "grpc" else url) is None:
                raise ConfigError("protocols", f"got {protocol!r} without the address of a server that speaks it")
        self._spec = spec
        self._http = None if url is None else HttpAddress(url)
        self._url = url
        self._grpc_address = grpc_address
        contact: Contact
        if url is not None:
            contact = HttpContact(url, spec)
        else:
            assert grpc_address is not None
            contact = GrpcContact(grpc_address, spec)
        metadata = contact.metadata()
        self._tensors = synthetic_records(metadata, spec) if records is None else file_records(metadata, records)
        self._clock = ServerClock(contact, spec.model)

    def run(self) -> Iterator[Cell]:
        """Measure one after the other; each is given before and after."""
        spec = self._spec
        levels: Sequence[tuple[int | None, float | None]] = [(None, rate) for rate in spec.rates] or [
            (clients, None) for clients in spec.concurrency
        ]
        total = len(spec.protocols) * len(spec.sizes) * len(levels)
        place = 0
        for protocol in spec.protocols:
            for records in spec.sizes:
                bodies = self._bodies(protocol, records)
                for clients, rate in levels:
                    yield Cell(place=place, total=total)
                    figures, errors = self._measure(protocol, records, bodies, clients, rate)
                    yield Cell(place=place, total=total, figures=figures, errors=errors)
                    place += 1

    def _bodies(self, protocol: str, records: int) -> list[bytes]:
        bodies: list[bytes] = []
        for number in range(self._spec.bodies):
            requests = [InferRequest(inputs=tuple(self._tensors(number, records)))]
            if protocol == "grpc":
                bodies += grpc_bodies(requests, self._spec)
            else:
                assert self._http is not None
                bodies += http_bodies(requests, self._http, self._spec, is_json=protocol == "json")
            if sum(map(len, bodies)) > _MOST_BYTES:
                break
        return bodies

    def _measure(
        self, protocol: str, records: int, bodies: Sequence[bytes], clients: int | None, rate: float | None
    ) -> tuple[LoadFigures, dict[str, int]]:
        spec = self._spec
        is_grpc = protocol == "grpc"
        address = self._grpc_address if is_grpc else self._url
        assert address is not None
        target = Target(
            address=address, is_grpc=is_grpc, headers=dict(spec.headers), timeout_seconds=spec.timeout_seconds
        )
        connections = spec.max_connections if clients is None else clients
        before: list[ServerTimes | None] = []
        measured = measure(
            target,
            bodies,
            Pace(clients=connections, rate=rate, seconds=spec.seconds, seed=spec.seed),
            warmup_seconds=spec.warmup_seconds,
            processes=spec.processes,
            cores=spec.cores,
            ready=lambda: before.append(self._clock.read()),
        )
        after = self._clock.read()
        server = None if after is None or before[0] is None else after.since(before[0])
        figures = LoadFigures.of(
            measured,
            server,
            protocol=protocol,
            records=records,
            clients=clients,
            rate=rate,
            seconds=spec.seconds,
            processes=min(spec.processes, connections),
        )
        return figures, dict(measured.errors)
