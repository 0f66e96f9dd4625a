# SPDX-License-Identifier: Apache-2.0
"""`Guard`: requests that another site makes a browser send are refused, others need their tokens."""

from __future__ import annotations

import functools
import ipaddress
import socket
from urllib.parse import urlsplit

from terarec.serve.access import Access, AccessControl, bearer_token
from terarec.serve.http.messages import Request
from terarec.serve.protocol import ForbiddenError
from terarec.spec.checks import quoted


class Guard:
    """Checks the head of each request.

    Args:
        control: Checks the token.
        allowed_hosts: As in `AccessSpec`.
    """

    def __init__(self, control: AccessControl, allowed_hosts: tuple[str, ...] = ()) -> None:
        self._control = control
        self._hosts = {host.lower() for host in allowed_hosts}
        self._hosts |= {"localhost"} if control.is_loopback else {socket.gethostname().lower()}

    def check(self, request: Request, access: Access) -> None:
        """Check who sends a request.

        Raises:
            ForbiddenError: It comes from a page of another origin, by a name that is not this server's, or to an
                address at which there are no such calls.
            UnauthenticatedError: It needs a token.
        """
        if request.method not in ("GET", "HEAD"):
            self._check_host(request)
        if access != "open":
            token = bearer_token(request.headers.get("authorization", ""))
            self._control.check(access, token, is_admin_address=request.is_admin)

    def _check_host(self, request: Request) -> None:
        """Refuse what a page of another site makes a browser send: it names its origin, or a host that is not ours."""
        host = request.headers.get("host")
        if host is not None and not self._is_ours(host):
            raise ForbiddenError(
                "Host", f"got {quoted(host)}, expected an address of this server or a name of --allowed-hosts"
            )
        origin = request.headers.get("origin")
        if origin is None:
            return
        # Both leave out the default port of the scheme.
        scheme, _, name = origin.lower().partition("://")
        if scheme not in ("http", "https") or name != (host or "").lower():
            raise ForbiddenError("Origin", f"got {quoted(origin)}, expected a page of this server")

    def _is_ours(self, host: str) -> bool:
        name, is_address = _read_host(host)
        # A name that another site controls may lead here; an address is what it says.
        return name is not None and ("*" in self._hosts or name in self._hosts or is_address)


# Clients send the same one with each request.
@functools.lru_cache(maxsize=64)
def _read_host(host: str) -> tuple[str | None, bool]:
    """Return the name in a field ``Host``, None where there is none, and whether it is an address."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return None, False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name, False
    return name, True
