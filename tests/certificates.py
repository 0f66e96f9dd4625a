# SPDX-License-Identifier: Apache-2.0
"""Certificates of an authority that exists for one test."""

import subprocess
from pathlib import Path

from tests.programs import OPENSSL

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


class Certificates:
    """An authority, and a certificate of it for the server's names and for a client.

    Attributes:
        authority: File of the authority's certificate.
    """

    def __init__(self, folder: Path) -> None:
        OPENSSL.require()
        self._folder = folder
        self.authority = self.file("ca.crt")
        self._run("req", "-x509", "-nodes", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority", *_KEY)
        for name in ("server", "client"):
            self._run("req", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}", *_KEY)
            (folder / "names").write_text("subjectAltName=DNS:redis.localhost,DNS:localhost")
            signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
            self._run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signed)

    def file(self, name: str) -> str:
        """Return the path of a file: "server.crt", "server.key", "client.crt", "client.key"."""
        return str(self._folder / name)

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True, timeout=60)
