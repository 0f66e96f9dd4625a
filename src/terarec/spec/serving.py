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
    """

    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 65536

    def __post_init__(self) -> None:
        checks.name(self)
        checks.positive_int(self, "port", minimum=0)
        checks.positive_int(self, "max_batch")
        if self.port > 65535:
            checks.fail(self, "port", "a TCP port from 0 to 65535")
