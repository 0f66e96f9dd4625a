"""What a server is."""

from __future__ import annotations

from dataclasses import dataclass

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpec:
    """Where a model is served.

    Attributes:
        name: the model's name in the URL.
        host: address to bind; loopback unless told otherwise.
        port: TCP port; 0 lets the system choose a free one.
        max_batch: most records accepted in one request.
        max_request_bytes: Longest body of a request.
        max_in_flight: Most requests that are received, wait or are scored at once.
        receive_timeout_seconds: How long a client may take to send a request.
    """

    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 65536
    max_request_bytes: int = 32 * 2**20
    max_in_flight: int = 64
    receive_timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        checks.name(self)
        checks.positive_int(self, "port", minimum=0)
        checks.positive_int(self, "max_batch")
        checks.positive_int(self, "max_request_bytes")
        checks.positive_int(self, "max_in_flight")
        checks.finite_float(self, "receive_timeout_seconds", low=0, open_low=True)
        if self.port > 65535:
            checks.fail(self, "port", "a TCP port from 0 to 65535")
