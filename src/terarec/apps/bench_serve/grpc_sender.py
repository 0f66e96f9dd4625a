# SPDX-License-Identifier: Apache-2.0
"""Sends ready messages by gRPC.

Needs the extra ``serve``: grpcio.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from terarec.apps.bench_serve.load import RequestError
from terarec.errors import MissingDependencyError

try:
    import grpc
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error

INFER = "/inference.GRPCInferenceService/ModelInfer"
_MOST_CHANNELS = 8
"""Connections of a process: each carries many requests at a time."""

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A connection for each channel; channels of equal settings would share one.
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcSender:
    """Channels to a server. For one event loop.

    Args:
        address: ``HOST:PORT``.
        headers: Metadata of each request.
        timeout_seconds: Time for an answer.
    """

    def __init__(self, address: str, headers: Mapping[str, str], timeout_seconds: float) -> None:
        self._address = address
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._timeout_seconds = timeout_seconds
        self._channels: list[grpc.aio.Channel] = []
        self._turns: itertools.cycle[grpc.aio.UnaryUnaryMultiCallable] = itertools.cycle(())

    async def open(self, connections: int) -> None:
        """Connect; see `Sender`."""
        # Clients of separate programs have a connection each; beyond a few, more cost the sender and tell nothing.
        count = min(connections, _MOST_CHANNELS)
        self._channels = [grpc.aio.insecure_channel(self._address, options=OPTIONS) for _ in range(count)]
        self._turns = itertools.cycle([channel.unary_unary(INFER) for channel in self._channels])

    async def send(self, body: bytes) -> None:
        """Send a ModelInferRequest; see `Sender`."""
        try:
            await next(self._turns)(body, timeout=self._timeout_seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise RequestError(error.code().name, error.details()) from None

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()
