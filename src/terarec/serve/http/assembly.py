# SPDX-License-Identifier: Apache-2.0
"""The HTTP transport of an `InferenceApi`, from its specs, and the paths beside those of the protocol."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from terarec.errors import ConfigError
from terarec.serve.access import AccessControl, is_loopback, tls_context
from terarec.serve.api import InferenceApi
from terarec.serve.http.api_routes import ApiRoutes
from terarec.serve.http.compression import check_encoding
from terarec.serve.http.messages import Request, Response, check_content_type, json_response
from terarec.serve.http.openapi import add_docs
from terarec.serve.http.routes import Route, Routes
from terarec.serve.http.security import Guard
from terarec.serve.http.server import HttpServer
from terarec.serve.input_drift import DriftWatch, ModelDrift, drift_of_served
from terarec.serve.json_codec import decode_object
from terarec.serve.metrics import CONTENT_TYPE, Metrics
from terarec.serve.models import ServedModels
from terarec.serve.recommending import RecommendationService, RecommendRequest, decode_recommend_request
from terarec.serve.request_memory import HeldMemory
from terarec.serve.sinks import Sink
from terarec.serve.statistics_board import WorkerStatistics
from terarec.spec import ServingSpec, checks, from_data
from terarec.spec.checks import quoted
from terarec.spec.serving_repository import MOST_VERSIONS, PointerSpec, PromotionSpec


class HttpTransport:
    """The HTTP transport of a server.

    Args:
        api: The calls.
        spec: Limits, tokens and certificates.
        sockets: Listening sockets.
        admin_sockets: Listening sockets of administrators.
        sinks: Where something about requests goes, for the metrics; None for those of `api`.
        recommendations: Answers requests for recommendations; None for no such path.
        shut_down: Function that lets the whole server finish, for administrators; None for no such call.
        drift: What compares records with the training data; None for nothing.
        workers: The other workers of the server, for the metrics; None for no others.

    Raises:
        ConfigError: A file without tokens or certificates.
        DataNotFoundError: There is no such file.
    """

    def __init__(
        self,
        api: InferenceApi,
        spec: ServingSpec,
        sockets: Sequence[socket.socket],
        admin_sockets: Sequence[socket.socket] = (),
        *,
        sinks: Sequence[Sink] | None = None,
        recommendations: RecommendationService | None = None,
        shut_down: Callable[[], None] | None = None,
        drift: DriftWatch | None = None,
        workers: WorkerStatistics | None = None,
    ) -> None:
        self._api = api
        self._sockets, self._admin_sockets = sockets, admin_sockets
        self._tls = tls_context(spec.access)
        control = AccessControl(spec.access, is_loopback=all(map(is_loopback, sockets)))
        self._paths = ApiRoutes(api, spec.max_request_bytes)
        routes = self._paths.routes()
        add_administration(routes, api, shut_down)
        if recommendations is not None:
            add_recommendations(routes, recommendations, self._paths)
        add_docs(routes)
        add_dashboard(routes)
        self._server = HttpServer(routes, spec, Guard(control, spec.access.allowed_hosts), api.errors, api.calls)
        add_drift(routes, drift, api.models, workers)
        self._workers = workers
        if workers is not None and drift is not None:
            workers.drift = drift.counts
        sinks = api.calls if sinks is None else sinks
        self._metrics = Metrics(api.models, api.errors, sinks, drift, recommendations, workers)
        add_metrics(routes, self._metrics)

    def run(self, started: Callable[[], None], stopping: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is called.

        Args:
            started: Callback, called once requests are accepted.
            stopping: Callback, called when the drain begins.
        """

        def drain() -> None:
            self._api.is_draining = True
            stopping()

        try:
            self._server.run(
                self._sockets, admin_sockets=self._admin_sockets, tls=self._tls, started=started, draining=drain
            )
        finally:
            if self._workers is not None:
                self._workers.drift = None
            self._metrics.close()
            self._paths.close()

    def stop(self) -> None:
        """Finish requests in flight and return from `run`. Callable from any thread, and from a signal's handler."""
        self._server.stop()


def add_recommendations(routes: Routes, service: RecommendationService, paths: ApiRoutes) -> None:
    """Add the path.

    Args:
        routes: Table of paths.
        service: Answers requests.
        paths: Read their bodies next to those of other requests.
    """

    def check(request: Request) -> None:
        check_content_type(request)
        check_encoding(request.headers.get("content-encoding", ""))

    def decode(body: bytes | bytearray, held: HeldMemory) -> RecommendRequest:
        wanted = decode_recommend_request(body)
        service.take(wanted, held)
        return wanted

    async def recommend(request: Request) -> Response:
        async with paths.read(request, decode) as wanted:
            return json_response(await service.recommend(wanted))

    routes.add(Route("POST", "/v1/recommend", recommend, "use", check))


def add_metrics(routes: Routes, metrics: Metrics) -> None:
    """Add ``/metrics``."""

    async def scrape(_: Request) -> Response:
        # In a thread, since it reads files where models follow a trainer.
        return Response(await asyncio.to_thread(metrics.text), media_type=CONTENT_TYPE)

    routes.add(Route("GET", "/metrics", scrape, "index"))


def add_drift(
    routes: Routes, drift: DriftWatch | None, models: ServedModels, workers: WorkerStatistics | None = None
) -> None:
    """Add ``/drift``, the last comparisons of records with the training data; null where nothing is compared."""

    def compared(watch: DriftWatch) -> Sequence[ModelDrift]:
        return drift_of_served(watch, models, () if workers is None else workers.other_drift())

    async def read(_: Request) -> Response:
        # In a thread, since it adds up the counts of hundreds of columns.
        comparisons = None if drift is None else map(asdict, await asyncio.to_thread(compared, drift))
        return json_response({"models": None if comparisons is None else list(comparisons)})

    routes.add(Route("GET", "/drift", read, "index"))


def add_dashboard(routes: Routes) -> None:
    """Add ``/``. The page has no data: its script asks the other paths, with a token where they need one."""
    page = resources.files("terarec.serve.http").joinpath("dashboard.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing but this script runs, whatever the names of models and features hold.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    response = Response(
        page.encode(),
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"},
    )

    async def dashboard(_: Request) -> Response:
        return response

    routes.add(Route("GET", "/", dashboard, "open"))


_ROLES = ("share", "by", "shadow")
"""Fields of `PromotionSpec` for a version that is in the repository; the others are of a run that becomes one."""


def add_administration(routes: Routes, api: InferenceApi, shut_down: Callable[[], None] | None = None) -> None:
    """Add the paths of administrators.

    Args:
        routes: Table of paths.
        api: The calls.
        shut_down: Function that lets the whole server finish, and does not wait; None for no such path.
    """

    async def promote(request: Request) -> Response:
        fields = _fields(request, ("version", *_ROLES))
        if "version" not in fields:
            raise ConfigError("version", "missing, expected a version of the repository")
        role = from_data(PromotionSpec, {name: value for name, value in fields.items() if name in _ROLES}, "")
        name, version = request.variables["name"], _version(fields, "version")
        # In a thread, since it waits for others that change the pointer.
        return _answer(name, await asyncio.to_thread(api.promote, name, version, role))

    async def roll_back(request: Request) -> Response:
        fields = _fields(request, ("to",))
        name = request.variables["name"]
        to = None if fields.get("to") is None else _version(fields, "to")
        return _answer(name, await asyncio.to_thread(api.roll_back, name, to))

    routes.add(Route("POST", "/v1/repository/models/{name}/promote", promote, "admin"))
    routes.add(Route("POST", "/v1/repository/models/{name}/rollback", roll_back, "admin"))
    if shut_down is None:
        return

    async def end(request: Request) -> Response:
        _fields(request, ())
        shut_down()
        # This request is in flight, so that it is answered before the server ends.
        return json_response({"draining": True})

    routes.add(Route("POST", "/v1/shutdown", end, "admin"))


def _fields(request: Request, known: Collection[str]) -> Mapping[str, Any]:
    fields = decode_object(request.body)
    for name in fields:
        if name not in known:
            expected = ", ".join(known) or "an empty object"
            raise ConfigError("the body", f"unknown field {quoted(name, is_json=True)}, expected {expected}")
    return fields


def _version(fields: Mapping[str, Any], name: str) -> int:
    version: int = fields[name]
    checks.argument(name, version, checks.integer(1, MOST_VERSIONS))
    return version


def _answer(name: str, pointer: PointerSpec) -> Response:
    return json_response({"model": name, **pointer.roles()})
