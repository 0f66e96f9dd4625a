# SPDX-License-Identifier: Apache-2.0
"""What a server has of its machine: listening sockets, and shared memory."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

from terarec.serve.access import is_loopback
from terarec.serve.shared_memory import SharedMemory
from terarec.spec import AccessSpec, ServingSpec
from terarec.spec.checks import FieldError


def address_of(host: str, port: int) -> str:
    """Return an address as URLs and gRPC write it: one of IPv6 is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, owner: str, prefix: str = "") -> socket.socket:
    """Return a listening socket, made before a model is loaded: a taken port shows at once, an early client waits.

    Args:
        host: Address.
        port: TCP port; 0 lets the system choose a free one.
        owner: Spec that has both, for errors.
        prefix: What the names of its fields begin with.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        problem = f"got {host!r}, expected an address of this machine ({error})"
        raise FieldError(owner, f"{prefix}host", problem) from None
    try:
        # A server that was just stopped leaves its port to connections in TIME_WAIT for a minute.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        problem = (
            f"{host} port {port} cannot be bound ({error.strerror}), "
            "expected a free port, or 0 to let the system choose one"
        )
        raise FieldError(owner, f"{prefix}port", problem) from None
    return bound


@contextlib.contextmanager
def bind_admin(spec: AccessSpec) -> Iterator[Sequence[socket.socket]]:
    """Bind the address of administrators, if they have one."""
    if spec.admin_port is None:
        yield ()
        return
    with bind(spec.admin_host, spec.admin_port, "AccessSpec", "admin_") as bound:
        yield (bound,)


@contextlib.contextmanager
def shared_memory(spec: ServingSpec, bound: socket.socket, *, is_possible: bool) -> Iterator[SharedMemory | None]:
    """Return the regions of shared memory, where they are allowed."""
    is_allowed = spec.access.shared_memory
    if not is_possible or not (is_loopback(bound) if is_allowed is None else is_allowed):
        yield None
        return
    with contextlib.closing(SharedMemory(spec.max_request_bytes)) as memory:
        yield memory
