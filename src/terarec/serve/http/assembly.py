# SPDX-License-Identifier: Apache-2.0
"""`serve_http`: the HTTP transport of an `InferenceApi`, from its specs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from terarec.serve.access import AccessControl, is_loopback, tls_context
from terarec.serve.api import InferenceApi
from terarec.serve.http.admin_routes import add_administration
from terarec.serve.http.api_routes import ApiRoutes
from terarec.serve.http.openapi import add_docs
from terarec.serve.http.recommend_routes import add_recommendations
from terarec.serve.http.security import Guard
from terarec.serve.http.server import HttpServer
from terarec.serve.http.watch_routes import add_dashboard, add_drift, add_metrics
from terarec.serve.input_drift import DriftWatch
from terarec.serve.metrics import Metrics
from terarec.serve.recommending import RecommendationService
from terarec.serve.sinks import Sink
from terarec.spec import ServingSpec


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
    ) -> None:
        self._api = api
        self._sockets, self._admin_sockets = sockets, admin_sockets
        self._tls = tls_context(spec.access)
        control = AccessControl(spec.access, is_loopback=all(map(is_loopback, sockets)))
        self._paths = ApiRoutes(api, spec.max_request_bytes)
        routes = self._paths.routes()
        add_administration(routes, api, shut_down)
        if recommendations is not None:
            add_recommendations(routes, recommendations, spec.max_request_bytes)
        add_docs(routes)
        add_dashboard(routes)
        self._server = HttpServer(routes, spec, Guard(control, spec.access.allowed_hosts), api.calls)
        add_drift(routes, drift, api.models)
        sinks = api.calls if sinks is None else sinks
        add_metrics(routes, Metrics(api.models, lambda: self._server.errors, sinks, drift, recommendations))

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
            self._paths.close()

    def stop(self) -> None:
        """Finish requests in flight and return from `run`. Callable from any thread, and from a signal's handler."""
        self._server.stop()
