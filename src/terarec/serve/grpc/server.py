# SPDX-License-Identifier: Apache-2.0
"""The gRPC transport: a port on which `InferenceApi` is served."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Protocol

import grpc

from terarec.io.opening import read_bytes
from terarec.serve.access import Access, AccessControl, bearer_token
from terarec.serve.api import InferenceApi
from terarec.serve.grpc.grpcio_server import GrpcioServer, GrpcLimits
from terarec.serve.grpc.native_server import NativeServer
from terarec.serve.grpc.service import GrpcService, Metadata, parsed
from terarec.serve.listening import address_of
from terarec.spec import AccessSpec, ServingSpec
from terarec.spec.checks import FieldError

_MOST_PEM_BYTES = 2**20


class _Server(Protocol):
    def start(self, service: GrpcService) -> None: ...
    def stop(self, grace_seconds: float) -> None: ...


class GrpcServer:
    """A port, bound at once; calls wait for `start`.

    Attributes:
        port: The port.

    Args:
        spec: Address, limits, certificates and tokens; its `grpc_port` is not None.
        shares_port: Whether other processes listen on the same port.

    Raises:
        ConfigError: An address that cannot be bound, or a file without certificates or tokens.
        DataNotFoundError: No such file.
    """

    def __init__(self, spec: ServingSpec, *, shares_port: bool = False) -> None:
        limits = GrpcLimits(
            max_message_bytes=spec.max_request_bytes,
            max_in_flight=spec.max_in_flight,
            max_streams=spec.grpc_max_streams,
        )
        self._max_in_flight = limits.max_in_flight
        address = address_of(spec.host, spec.grpc_port or 0)
        check = _CallCheck(AccessControl(spec.access, is_loopback=_is_loopback(spec.host)))
        credentials = _credentials(spec.access)
        self._server: _Server
        try:
            if _is_native(spec):
                native = NativeServer(limits, address, check, shares_port=shares_port)
                self._server, self.port = native, native.port
            else:
                server = GrpcioServer(limits, check, shares_port=shares_port)
                self._server, self.port = server, server.bind(address, credentials)
        except (OSError, RuntimeError) as error:
            problem = f"{spec.host} port {spec.grpc_port} cannot be bound ({error}), expected a free port, or 0"
            raise FieldError("ServingSpec", "grpc_port", problem) from None

    def start(self, api: InferenceApi) -> None:
        """Answer calls by `api`."""
        self._server.start(GrpcService(api, self._max_in_flight))

    def stop(self, grace_seconds: float) -> None:
        """Accept no further call, and end those in flight that take longer than this."""
        self._server.stop(grace_seconds)


_ACCESS: Mapping[str, Access] = {
    **dict.fromkeys(("ServerLive", "ServerReady", "ModelReady"), "open"),
    **dict.fromkeys(("ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"), "index"),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), "admin"),
}
"""Method -> who may call it, where this is not "use"."""


class _CallCheck:
    """Checks the token of each call.

    Args:
        control: Knows the tokens.
    """

    def __init__(self, control: AccessControl) -> None:
        self._control = control

    def __call__(self, method: str, metadata: Metadata, body: bytes) -> None:
        access = _ACCESS.get(method, "use")
        if method in ("TraceSetting", "LogSettings"):
            access = "admin" if parsed(method, body).settings else "index"  # one without settings asks for them
        if access == "open":
            return
        header = next((value for name, value in metadata if name == "authorization"), None)
        self._control.check(access, bearer_token(header) if isinstance(header, str) else None)


def _credentials(spec: AccessSpec) -> grpc.ServerCredentials | None:
    if spec.certificate is None:
        return None
    certificate = read_bytes(spec.certificate, most=_MOST_PEM_BYTES)
    key = certificate if spec.key is None else read_bytes(spec.key, most=_MOST_PEM_BYTES)
    authorities = None if spec.client_ca is None else read_bytes(spec.client_ca, most=_MOST_PEM_BYTES)
    return grpc.ssl_server_credentials([(key, certificate)], authorities, spec.client_ca is not None)


def _is_native(spec: ServingSpec) -> bool:
    if spec.grpc_library != "auto":
        return spec.grpc_library == "native"
    # The faster one has no limit on a message before it is in memory: it is for clients of this machine.
    return spec.access.certificate is None and _is_loopback(spec.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
