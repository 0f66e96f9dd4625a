# SPDX-License-Identifier: Apache-2.0
"""HTTP servers in a thread of the tests' process."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from terarec.serve import ServedModels
from terarec.serve.api import InferenceApi
from terarec.serve.calls import CallSink
from terarec.serve.http.assembly import HttpTransport
from terarec.serve.input_drift import DriftWatch
from terarec.serve.recommending import RecommendationService
from terarec.serve.shared_memory import SharedMemory
from terarec.spec import ServingSpec
from tests.waiting import PATIENCE


class Served(NamedTuple):
    """A server that accepts requests."""

    port: int
    api: InferenceApi
    transport: HttpTransport
    admin_port: int
    scheme: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


@contextlib.contextmanager
def served(
    models: ServedModels,
    spec: ServingSpec | None = None,
    calls: Sequence[CallSink] = (),
    drift: DriftWatch | None = None,
    recommendations: RecommendationService | None = None,
) -> Iterator[Served]:
    """Serve models on a free port of this machine."""
    spec = ServingSpec() if spec is None else spec
    has_memory = spec.access.shared_memory is not False
    is_ready = threading.Event()
    with (
        socket.create_server((spec.host, 0)) as bound,
        socket.create_server(("127.0.0.1", 0)) as admin,
        contextlib.closing(SharedMemory(spec.max_request_bytes)) as memory,
    ):
        api = InferenceApi(
            models,
            memory=memory if has_memory else None,
            calls=calls,
            max_request_bytes=spec.max_request_bytes,
        )
        admins = [admin] if spec.access.admin_port is not None else []
        transport = HttpTransport(api, spec, [bound], admins, drift=drift, recommendations=recommendations)
        thread = threading.Thread(target=transport.run, args=(is_ready.set,))
        thread.start()
        try:
            assert is_ready.wait(timeout=PATIENCE)
            scheme = "https" if spec.access.certificate else "http"
            yield Served(bound.getsockname()[1], api, transport, admin.getsockname()[1], scheme)
        finally:
            transport.stop()
            thread.join(timeout=PATIENCE)
        assert not thread.is_alive()
