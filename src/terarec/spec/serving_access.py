# SPDX-License-Identifier: Apache-2.0
"""Who may call a model server, and how their connections are encrypted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from terarec.spec import checks

_HOST = re.compile(r"\*|[A-Za-z0-9._:\[\]\-]{1,253}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessSpec:
    """Encryption, tokens and admitted hosts of a model server.

    Attributes:
        certificate: PEM file of the server's certificates, for TLS; None for none.
        key: PEM file of their key; None where `certificate` has it, too.
        client_ca: PEM file of the authorities whose certificates clients must have; None for clients without any.
        token_file: File of the tokens that calls need, one a line; None for calls without any.
        admin_token_file: File of the tokens of administrators, who load and unload models and change settings; None for
            those of this machine alone, where the server is bound to loopback.
        admin_host: Address to bind for administrators.
        admin_port: TCP port for administrators, whose calls are accepted nowhere else; None for the server's own.
        allowed_hosts: Names that clients use for the server besides its addresses and, on loopback, "localhost"; "*"
            for any.
        shared_memory: Whether clients may pass tensors in shared memory; None for a server on loopback alone.

    Raises:
        ConfigError: A value of another type, or a key or authority without a certificate.
    """

    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    token_file: str | None = None
    admin_token_file: str | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    shared_memory: bool | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "client_ca", "token_file", "admin_token_file"):
            checks.instance(self, name, str | None, "the path of a file or None")
            if getattr(self, name) == "":
                checks.fail(self, name, "the path of a file or None")
        for name in ("key", "client_ca"):
            if getattr(self, name) is not None and self.certificate is None:
                checks.reject(self, name, "got a file without a certificate, expected the certificate, too")
        checks.instance(self, "admin_host", str, "an address of this machine")
        if self.admin_port is not None:
            checks.positive_int(self, "admin_port", minimum=0, maximum=65535)
        is_listed = isinstance(self.allowed_hosts, tuple) and all(
            isinstance(host, str) and _HOST.fullmatch(host) for host in self.allowed_hosts
        )
        if not is_listed:
            checks.fail(self, "allowed_hosts", "names of hosts such as 'models.example.org', or '*'")
        checks.instance(self, "shared_memory", bool | None, "true, false or None")
