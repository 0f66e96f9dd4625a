# SPDX-License-Identifier: Apache-2.0
"""Traces: spans as a collector decodes them, of both transports, and a collector that is away."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tritonclient import grpc as triton

from terarec.errors import ConfigError, MissingDependencyError
from terarec.serve import InferenceSession, ServedModel, ServedModels, serve
from terarec.serve.api import InferenceApi
from terarec.serve.metrics import Metrics
from terarec.serve.tracing import Traces
from terarec.spec import ServingSpec, WatchingSpec
from tests.addresses import own_address
from tests.errors import at
from tests.params import in_every_run
from tests.serve.conftest import TrainedRun
from tests.serve.grpc.conftest import serving, tensors
from tests.serve.http.serving import served
from tests.waiting import PATIENCE, wait_for

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RECORDED, IGNORED = (f"00-{TRACE}-{PARENT}-{flags}" for flags in ("01", "00"))


@dataclass
class Collector:
    """A collector of OTLP over HTTP, and the requests that it got."""

    status: int = 200
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    url: str = ""

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            found.requests.append(ExportTraceServiceRequest.FromString(body))
            found.paths.add(self.path)
            self.send_response(found.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@pytest.fixture
def models(session: InferenceSession, trained: TrainedRun) -> Iterator[ServedModels]:
    """A model whose look-ups are timed."""
    options = ServingSpec(watching=WatchingSpec(otlp_endpoint="http://127.0.0.1:1")).model_options()
    assert options.times_lookups
    with ServedModels() as found:
        found.install(ServedModel(InferenceSession.open(trained.path), options, name="dlrm", version="3"))
        yield found


@contextlib.contextmanager
def traced(url: str, share: float = 1.0) -> Iterator[Traces]:
    with Traces(WatchingSpec(otlp_endpoint=url, trace_share=share)) as traces:
        yield traces


def attributes(span: Span) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def body_of(trained: TrainedRun, count: int) -> dict[str, Any]:
    inputs = [
        {"name": name, "datatype": "FP32" if name[0] == "I" else "BYTES", "shape": [count], "data": values}
        for name, values in trained.records(0, count).items()
    ]
    return {"id": "u7", "inputs": inputs}


def test_a_request_is_a_span_with_its_stages_in_the_trace_of_its_client(
    models: ServedModels, trained: TrainedRun, collector: Collector
) -> None:
    begun = time.time_ns()
    with (
        traced(collector.url) as traces,
        served(models, None, [traces]) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE, headers={"tracestate": "shop=1"}) as client,
    ):
        path = "/v2/models/dlrm/versions/3/infer"
        assert client.post(path, json=body_of(trained, 2), headers={"traceparent": RECORDED}).status_code == 200
        assert client.post(path, json=body_of(trained, 2), headers={"traceparent": IGNORED}).status_code == 200
        assert client.get("/v2/models/nothing", headers={"traceparent": RECORDED}).status_code == 404
    ended = time.time_ns()
    assert collector.paths == {"/v1/traces"}
    resource = {
        item.key: item.value.string_value for item in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "terarec"
    spans = {span.name: span for span in collector.spans}
    request, missing = spans["POST /v2/models/{name}/versions/{version}/infer"], spans["GET /v2/models/{name}"]
    assert len(collector.spans) == 6
    for span in (request, missing):
        assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "shop=1")
        assert span.kind == Span.SPAN_KIND_SERVER
    stages = [spans[name] for name in ("queue", "workflow", "lookup", "dense")]
    assert {span.parent_span_id for span in stages} == {request.span_id}
    assert {span.trace_id.hex() for span in stages} == {TRACE}
    # One after the other, each of some time, inside the request.
    times = [time for span in stages for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times)
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in stages)
    assert begun <= request.start_time_unix_nano <= times[0] < times[-1] <= request.end_time_unix_nano <= ended
    found = attributes(request)
    assert found["http.response.status_code"] == 200
    assert (found["terarec.model"], found["terarec.version"], found["terarec.records"]) == ("dlrm", "3", 2)
    assert (found["terarec.request_id"], found["client.address"]) == ("u7", "127.0.0.1")
    assert attributes(missing)["error.type"] == "not_found"
    assert missing.status.code == Status.STATUS_CODE_UNSET  # an error of the client, by the conventions


@pytest.mark.parametrize("library", ["grpcio", "native"])
def test_calls_of_grpc_are_spans(models: ServedModels, trained: TrainedRun, collector: Collector, library: str) -> None:
    with (
        traced(collector.url) as traces,
        serving(InferenceApi(models, calls=[traces]), grpc_library=library) as address,
        contextlib.closing(triton.InferenceServerClient(address)) as client,
    ):
        client.infer("dlrm", tensors(trained.records(0, 3)), headers={"traceparent": RECORDED})
    request = next(span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
    assert request.name == "inference.GRPCInferenceService/ModelInfer"
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    found = attributes(request)
    assert (found["rpc.system"], found["rpc.grpc.status"], found["terarec.records"]) == ("grpc", "OK", 3)
    assert len(collector.spans) == 5


def test_of_calls_without_a_trace_a_share_is_sent(models: ServedModels, collector: Collector) -> None:
    with (
        traced(collector.url, 0.25) as traces,
        served(models, None, [traces]) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        for _ in range(200):
            assert client.get("/v2/health/live", headers={"traceparent": "malformed"}).status_code == 200
    assert 20 < len(collector.spans) < 80  # 5 standard deviations are 31
    assert all(not span.parent_span_id for span in collector.spans)
    assert len({span.trace_id for span in collector.spans}) == len(collector.spans)


@pytest.mark.parametrize("is_away", in_every_run([False], [True, False]))
def test_a_collector_that_takes_nothing_delays_no_request(
    models: ServedModels,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_away: bool,
) -> None:
    monkeypatch.setattr("terarec.serve.tracing._TIMEOUT_SECONDS", 0.1)
    collector.status = 400
    url = "http://{}:{}".format(*own_address()) if is_away else collector.url
    with (
        caplog.at_level(logging.WARNING),
        traced(url) as traces,
        served(models, None, [traces]) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        for count in (1, 2):
            assert client.get("/v2").status_code == 200
            wait_for(lambda count=count: traces.counts().lost["write_error"] == count)
        text = Metrics(models, None, [traces]).text().decode()
    assert 'terarec_sink_lost_total{reason="write_error",sink="traces"} 2.0' in text
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        f"traces: {url}/v1/traces: takes no spans, expected a collector of OTLP over HTTP"
    ]


def test_an_endpoint_is_a_url(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("", "127.0.0.1:4318", "file:///traces", "http://user:word@host"):
        with pytest.raises(ConfigError, check=at("WatchingSpec.otlp_endpoint")):
            WatchingSpec(otlp_endpoint=endpoint)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "terarec.serve.tracing", raising=False)
    spec = ServingSpec(port=0, watching=WatchingSpec(otlp_endpoint="http://127.0.0.1:4318"))
    with pytest.raises(MissingDependencyError, check=at("opentelemetry.sdk.trace", "terarec[otel]")):
        serve(trained.path, spec)
