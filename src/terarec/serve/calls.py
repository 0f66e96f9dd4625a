# SPDX-License-Identifier: Apache-2.0
"""`Call`: what is known of a call that a transport answers, for those who watch a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from terarec.serve.protocol import InferRequest
from terarec.serve.sinks import Sink
from terarec.serve.statistics import StageTimes


@dataclass(slots=True, kw_only=True)
class Call:
    """A call, and its answer once there is one.

    Attributes:
        protocol: What carries it.
        method: Method of HTTP, or name of the remote procedure; "" for bytes that are no request.
        path: Path without the query, percent-encoded as the client sent it.
        route: The same with the names of its variables, such as ``/v2/models/{name}``; "" for no known path.
        client: Address of the client; "" if it is not known.
        traceparent, tracestate: The trace that the client names, as W3C's headers of these names write it; "" for none.
        sinks: Where it goes when it has ended.
        begun_ns: Time of its first bytes, of `time.monotonic_ns`.
        received_bytes: Length of its body or message.
        asked_ns: Time at which a model was asked to score it.
        model: Name of the model that it asks to score; "" for other calls.
        version: Version that scored; before that the requested one, "" for any.
        request_id: Id of the request that the client chose; "" for none.
        num_records: Number of records to score.
        step: Training steps of the weights that scored; None without scores.
        times: Durations of the stages, without `compute_output`; None without scores.
        lookup_ns: Part of `times.compute_infer` in which rows were looked up; 0 where that is not timed.
        status: Status of HTTP, or name of the status code of gRPC; None where the client did not wait for an answer.
        reason: Kind of the error, such as "unknown_model"; "" for none.
        sent_bytes: Length of the answer's body or message.
        ended_ns: Time at which the answer was sent.
    """

    protocol: Literal["http", "grpc"] = "http"
    method: str
    path: str
    route: str = ""
    client: str = ""
    traceparent: str = ""
    tracestate: str = ""
    sinks: Sequence[CallSink] = ()
    begun_ns: int = field(default_factory=time.monotonic_ns)
    received_bytes: int = 0
    asked_ns: int = 0
    model: str = ""
    version: str = ""
    request_id: str = ""
    num_records: int = 0
    step: int | None = None
    times: StageTimes | None = None
    lookup_ns: int = 0
    status: int | str | None = None
    reason: str = ""
    sent_bytes: int = 0
    ended_ns: int = 0

    def request(self, request: InferRequest, model: str, version: str | None) -> None:
        """Note what is to be scored."""
        self.asked_ns = time.monotonic_ns()
        self.model, self.version = model, version or ""
        self.request_id, self.num_records = request.id or "", request.num_records

    def scored(self, version: str, step: int, times: StageTimes, lookup_ns: int) -> None:
        """Note who scored it."""
        self.version, self.step, self.times, self.lookup_ns = version, step, times, lookup_ns

    def end(self, status: int | str | None, reason: str = "", sent_bytes: int = 0) -> None:
        """Note the answer, and hand the call to its sinks."""
        self.status, self.reason, self.sent_bytes = status, reason, sent_bytes
        self.ended_ns = time.monotonic_ns()
        for sink in self.sinks:
            sink.finish(self)


class CallSink(Sink, Protocol):
    """Where calls go."""

    def finish(self, call: Call) -> None:
        """Take a call that has ended. It does not wait."""
