# SPDX-License-Identifier: Apache-2.0
"""The figures of one measurement: throughput, percentiles of the latency, and the server's own account of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from terarec.apps.bench_serve.load import Measured
from terarec.errors import FormatError

PERCENTILES = (50.0, 95.0, 99.0, 99.9)


class ServerTimes(NamedTuple):
    """Counters of a server, of all requests since it began.

    Attributes:
        requests: Requests that succeeded.
        records: Records that were scored.
        batches: Batches that were scored.
        queue_ns, compute_input_ns, compute_infer_ns, compute_output_ns: Nanoseconds that requests spent in each stage.
    """

    requests: int
    records: int
    batches: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int

    @classmethod
    def of(cls, statistics: Iterable[Mapping[str, Any]], model: str) -> ServerTimes:
        """Add up the statistics of a model and, where it is an ensemble, of its stages.

        Args:
            statistics: Objects of Triton's ``model_stats``.
            model: Name of the model whose requests are counted.

        Raises:
            FormatError: They lack a field.
        """
        requests = records = batches = 0
        times = [0, 0, 0, 0]
        try:
            for entry in statistics:
                stages = entry["inference_stats"]
                if entry["name"] == model:
                    requests += _number(stages["success"], "count")
                    records += _number(entry, "inference_count")
                    batches += _number(entry, "execution_count")
                for place, stage in enumerate(("queue", "compute_input", "compute_infer", "compute_output")):
                    times[place] += _number(stages[stage], "ns")
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError("statistics", f"expected those of Triton ({type(error).__name__}: {error})") from None
        return cls(requests, records, batches, *times)

    def since(self, before: ServerTimes) -> ServerTimes:
        """Return what was counted since `before`."""
        return ServerTimes(*(now - then for now, then in zip(self, before, strict=True)))


def _number(fields: Mapping[str, Any], name: str) -> int:
    # Fields that are 0 may be absent, and 64-bit integers may be texts, where the JSON was made from protobuf.
    return int(fields.get(name, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFigures:
    """One measurement.

    Attributes:
        protocol: "http", "json" or "grpc".
        records: Records of a request.
        clients: Clients of a closed loop; None in an open one.
        rate: Requests a second of an open loop; None in a closed one.
        requests: Requests that were answered.
        errors: Requests that failed.
        requests_per_second, records_per_second: Throughput: what was answered until the load ended, by its duration.
        mean_ms, p50_ms, p95_ms, p99_ms, p99_9_ms, max_ms: Latency, in milliseconds.
        server_requests: Requests that the server has counted meanwhile; None where it has no statistics. More than
            `requests` and `errors` if there are other clients.
        queue_ms, compute_input_ms, compute_infer_ms, compute_output_ms: Mean time of a request in the server's stages,
            in milliseconds: waiting for a batch, its workflow, its scores, the answer.
        network_ms: The rest of the mean latency: transport, its encoding and decoding, and the client.
        batch_records: Mean number of records that the server scored at once.
        late_p99_ms: 99th percentile of how late requests of an open loop were sent; None in a closed one.
        client_busy_share: Share of the processes' time in which they used a processor. Near 1 the client is the limit.
    """

    protocol: str
    records: int
    clients: int | None
    rate: float | None
    requests: int
    errors: int
    requests_per_second: float
    records_per_second: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p99_9_ms: float
    max_ms: float
    server_requests: int | None
    queue_ms: float | None
    compute_input_ms: float | None
    compute_infer_ms: float | None
    compute_output_ms: float | None
    network_ms: float | None
    batch_records: float | None
    late_p99_ms: float | None
    client_busy_share: float

    @classmethod
    def of(
        cls,
        measured: Measured,
        server: ServerTimes | None,
        *,
        protocol: str,
        records: int,
        clients: int | None,
        rate: float | None,
        seconds: float,
        processes: int,
    ) -> LoadFigures:
        """Compute the figures.

        Args:
            measured: What the load has measured.
            server: What the server has counted meanwhile.
            protocol: Protocol of the load.
            records: Records of a request.
            clients: Clients of a closed loop.
            rate: Rate of an open loop.
            seconds: Duration of the load.
            processes: Processes that sent it.
        """
        latencies = np.frombuffer(measured.latencies, np.int64) / 1e6
        # Answers after the end belong to the latencies, not to the rate: an overloaded server is not faster for them.
        answered = int(np.count_nonzero(np.frombuffer(measured.ends, np.int64) <= seconds * 1e9))
        shown = latencies if len(latencies) else np.array([np.nan])
        percentiles = np.percentile(shown, PERCENTILES)
        mean = float(shown.mean())
        lateness = np.frombuffer(measured.lateness, np.int64) / 1e6
        stages: list[float | None] = [None] * 4
        if server is not None and server.requests > 0:
            stages = [spent / server.requests / 1e6 for spent in server[3:]]
        known = [stage for stage in stages if stage is not None]
        return cls(
            protocol=protocol,
            records=records,
            clients=clients,
            rate=rate,
            requests=len(latencies),
            errors=measured.errors.total(),
            requests_per_second=answered / seconds,
            records_per_second=answered * records / seconds,
            mean_ms=mean,
            p50_ms=float(percentiles[0]),
            p95_ms=float(percentiles[1]),
            p99_ms=float(percentiles[2]),
            p99_9_ms=float(percentiles[3]),
            max_ms=float(shown.max()),
            server_requests=None if server is None else server.requests,
            queue_ms=stages[0],
            compute_input_ms=stages[1],
            compute_infer_ms=stages[2],
            compute_output_ms=stages[3],
            network_ms=mean - sum(known) if known else None,
            batch_records=None if server is None or not server.batches else server.records / server.batches,
            late_p99_ms=float(np.percentile(lateness, 99)) if len(lateness) else None,
            client_busy_share=measured.cpu_seconds / measured.seconds / processes if measured.seconds else 0.0,
        )
