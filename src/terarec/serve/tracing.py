# SPDX-License-Identifier: Apache-2.0
"""`Traces`: calls as spans of OpenTelemetry, sent to a collector over HTTP.

Needs the extra ``otel``: opentelemetry-sdk and its exporter.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from typing_extensions import override

import terarec
from terarec.errors import MissingDependencyError, UnreachableError
from terarec.serve.calls import Call
from terarec.serve.sinks import QueuedSink
from terarec.spec.serving_options import WatchingSpec

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[otel]'") from error

_MOST_WAITING = 4096  # calls
_EVERY_SECONDS = 0.5
_BATCH_CALLS = 256  # sent at once, of five spans each
_TIMEOUT_SECONDS = 2.0

_SERVER_ERRORS = frozenset({"INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"})
"""Codes of gRPC that the conventions of OpenTelemetry call errors of a server."""


class Traces(QueuedSink[Call]):
    """Sends spans: one for a call, and in it one for each stage of a request that was scored.

    A call belongs to the trace that its client names (``traceparent``). The client also says whether it is recorded;
    of calls without a trace a share is.

    Args:
        spec: Endpoint and share; its `otlp_endpoint` is not None.
    """

    def __init__(self, spec: WatchingSpec) -> None:
        self._share = spec.trace_share
        self._endpoint = _traces_url(spec.otlp_endpoint or "")
        # A collector that is away is one line of this server's log; the library would write one for each try.
        logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint, timeout=_TIMEOUT_SECONDS)
        self._ended = _EndedSpans()
        service = {"service.name": "terarec", "service.version": terarec.__version__}
        provider = TracerProvider(resource=Resource.create(service), sampler=ALWAYS_ON, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("terarec.serve", terarec.__version__)
        self._propagator = TraceContextTextMapPropagator()
        super().__init__("traces", _MOST_WAITING, _EVERY_SECONDS)

    def finish(self, call: Call) -> None:
        """Send a call that has ended, if it is to be recorded. It does not wait."""
        # The last of the flags of W3C's trace context, of which the lowest bit says that it is recorded.
        is_named = len(call.traceparent) == 55
        if call.traceparent[-1] in "13579bdf" if is_named else random.random() < self._share:
            self._put(call)

    @override
    def close(self) -> None:
        super().close()
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    @override
    def _write(self, items: Sequence[Call]) -> None:
        for begin in range(0, len(items), _BATCH_CALLS):
            calls = items[begin : begin + _BATCH_CALLS]
            for call in calls:
                self._add_spans(call)
            if self._exporter.export(self._ended.take()) is not SpanExportResult.SUCCESS:
                problem = "takes no spans, expected a collector of OTLP over HTTP"
                self._fail(UnreachableError(self._endpoint, problem), len(items) - begin)
                return
            self._count(len(calls))

    def _add_spans(self, call: Call) -> None:
        # Durations are measured by a clock without a date.
        offset = time.time_ns() - time.monotonic_ns()
        parent = self._propagator.extract({"traceparent": call.traceparent, "tracestate": call.tracestate}, Context())
        is_http = call.protocol == "http"
        name = f"{call.method} {call.route}".strip() if is_http else call.route
        attributes = _http_attributes(call) if is_http else _rpc_attributes(call)
        span = self._tracer.start_span(
            name or "malformed request",
            parent if get_current_span(parent).get_span_context().is_valid else Context(),
            SpanKind.SERVER,
            {**attributes, **_model_attributes(call)},
            start_time=offset + call.begun_ns,
        )
        if call.reason:
            span.set_attribute("error.type", call.reason)
        is_error = call.status >= 500 if isinstance(call.status, int) else call.status in _SERVER_ERRORS
        if is_error:
            span.set_status(Status(StatusCode.ERROR))
        self._add_stages(call, span, offset)
        span.end(offset + call.ended_ns)

    def _add_stages(self, call: Call, span: Span, offset: int) -> None:
        if call.times is None:
            return
        begin = offset + call.asked_ns
        dense_ns = max(call.times.compute_infer - call.lookup_ns, 0)
        stages = {
            "queue": call.times.queue,
            "workflow": call.times.compute_input,
            # In a batch's time they alternate in some models; here the look-ups come first.
            "lookup": call.lookup_ns,
            "dense": dense_ns,
        }
        for name, nanoseconds in stages.items():
            self._tracer.start_span(name, set_span_in_context(span), start_time=begin).end(begin + nanoseconds)
            begin += nanoseconds


class _EndedSpans(SpanProcessor):
    """Keeps spans that have ended until they are taken. For one thread."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    @override
    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> Sequence[ReadableSpan]:
        """Return the spans that have ended since the last call."""
        taken, self._spans = self._spans, []
        return taken


def _traces_url(endpoint: str) -> str:
    """Return where spans go: the path of OTLP below an address without one."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def _http_attributes(call: Call) -> Mapping[str, str | int]:
    return {
        "http.request.method": call.method,
        "url.path": call.path,
        "http.route": call.route,
        "client.address": call.client,
        "http.request.body.size": call.received_bytes,
        "http.response.body.size": call.sent_bytes,
        **({"http.response.status_code": call.status} if isinstance(call.status, int) else {}),
    }


def _rpc_attributes(call: Call) -> Mapping[str, str | int]:
    return {
        "rpc.system": "grpc",
        "rpc.method": call.method,
        "rpc.service": call.path.strip("/").partition("/")[0],
        "client.address": call.client,
        "rpc.grpc.status": str(call.status),
    }


def _model_attributes(call: Call) -> Mapping[str, str | int]:
    if not call.model:
        return {}
    attributes: dict[str, str | int] = {
        "terarec.model": call.model,
        "terarec.version": call.version,
        "terarec.records": call.num_records,
        "terarec.request_id": call.request_id,
    }
    return attributes if call.step is None else {**attributes, "terarec.step": call.step}
