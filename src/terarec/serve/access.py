# SPDX-License-Identifier: Apache-2.0
"""Who may call what, whatever the transport: tokens, the address of administrators, certificates."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
import ssl
from pathlib import Path
from typing import Literal, TypeAlias

from terarec.errors import ConfigError
from terarec.io.opening import read_bytes
from terarec.serve.protocol import ForbiddenError, UnauthenticatedError
from terarec.spec import AccessSpec

Access: TypeAlias = Literal["open", "index", "use", "admin"]
"""Who may make a call.

"open" is for probes, which have no token. "index" asks what the server has, "use" scores records, and "admin" changes
what the server does."""

_MOST_TOKEN_BYTES = 2**20


class Tokens:
    """Tokens that are compared in constant time.

    Raises:
        ConfigError: It has none.
        DataNotFoundError: There is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        lines = read_bytes(path, most=_MOST_TOKEN_BYTES).split()
        if not lines:
            raise ConfigError(path, "got no token, expected at least one, a line each")
        self._digests = [hashlib.sha256(line).digest() for line in lines]

    def __contains__(self, token: str) -> bool:
        # Digests have one length, so that the time says nothing about that of the tokens either.
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


class AccessControl:
    """Checks the token of each call.

    Attributes:
        is_loopback: Whether the server is bound to addresses of this machine alone.

    Raises:
        ConfigError: A file without tokens.
        DataNotFoundError: There is no such file.
    """

    def __init__(self, spec: AccessSpec, *, is_loopback: bool) -> None:
        self.is_loopback = is_loopback
        self._has_admin_address = spec.admin_port is not None
        self._tokens = None if spec.token_file is None else Tokens(spec.token_file)
        self._admin_tokens = None if spec.admin_token_file is None else Tokens(spec.admin_token_file)

    def check(self, access: Access, token: str | None, *, is_admin_address: bool = False) -> None:
        """Check the token of a call, None for none.

        Raises:
            ForbiddenError: Administrators have another address, or no way to call a server that others reach.
            UnauthenticatedError: It needs another token.
        """
        if access == "admin":
            self._check_admin(token, is_admin_address=is_admin_address)
        elif access == "use" or (access == "index" and not self.is_loopback):
            self._check_token(token)

    def _check_token(self, token: str | None) -> None:
        if self._tokens is None:
            return
        if token is not None and (token in self._tokens or (self._admin_tokens and token in self._admin_tokens)):
            return
        raise _unauthenticated(token, "a token of this server")

    def _check_admin(self, token: str | None, *, is_admin_address: bool) -> None:
        if self._has_admin_address and not is_admin_address:
            raise ForbiddenError("admin", "got a call at the address of clients, expected it at that of administrators")
        if self._admin_tokens is not None:
            if token is None or token not in self._admin_tokens:
                raise _unauthenticated(token, "a token of administrators")
        elif self._has_admin_address or self.is_loopback:
            self._check_token(token)
        else:
            raise ForbiddenError(
                "admin",
                "got a call to a server that others reach, expected one with --admin-token-file or --admin-port",
            )


def _unauthenticated(token: str | None, expected: str) -> UnauthenticatedError:
    got = "no token" if token is None else "an unknown token"
    return UnauthenticatedError("Authorization", f"got {got}, expected {expected}")


def bearer_token(authorization: str) -> str | None:
    """Return the token of an Authorization header; None for another one."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def is_loopback(bound: socket.socket) -> bool:
    """Return whether a listening socket takes connections of this machine alone."""
    if bound.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    address = ipaddress.ip_address(bound.getsockname()[0].partition("%")[0])
    return address.is_loopback


def tls_context(spec: AccessSpec) -> ssl.SSLContext | None:
    """Return the certificates of a server; None for a server without TLS.

    Raises:
        ConfigError: A file that is no certificate, key or authority, or a key of another certificate.
        DataNotFoundError: There is no such file.
    """
    if spec.certificate is None:
        return None
    for path in filter(None, (spec.certificate, spec.key, spec.client_ca)):
        read_bytes(path, most=_MOST_TOKEN_BYTES)  # which names the file in its errors
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # A key that needs a passphrase is an error, not a question on the terminal.
        context.load_cert_chain(spec.certificate, spec.key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(spec.certificate, f"got no certificate with its key, expected PEM ({error})") from None
    if spec.client_ca is not None:
        try:
            context.load_verify_locations(spec.client_ca)
        except OSError as error:
            raise ConfigError(spec.client_ca, f"got no certificates, expected PEM ({error})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
