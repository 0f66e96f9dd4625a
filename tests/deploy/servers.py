# SPDX-License-Identifier: Apache-2.0
"""Servers that are started by a command line of deploy/, in processes of their own."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from terarec.serve import InferenceClient
from tests.processes import Python
from tests.waiting import PATIENCE

PROGRAM = "from terarec.cli import main; main()"
TOKEN, ADMIN_TOKEN = "a-token-of-clients", "a-token-of-administrators"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Server(NamedTuple):
    """A server that accepts requests.

    Attributes:
        process: Its process.
        url: URL of HTTP.
        grpc: Address of gRPC; None for none.
    """

    process: Python
    url: str
    grpc: str | None

    def client(self, **headers: str) -> InferenceClient:
        """Return a client of the model "shop" that sends a token, and further headers."""
        return InferenceClient(self.url, "shop", timeout_seconds=PATIENCE, headers={**BEARER, **headers})


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[Server]:
    """Run ``terarec`` with a command line; give the server once it accepts requests."""
    with contextlib.closing(Python(PROGRAM, *command, "--json")) as process:
        at = json.loads(process.read_line())
        assert "url" in at, at
        grpc = None if at["grpc_port"] is None else f"127.0.0.1:{at['grpc_port']}"
        yield Server(process, f"http://127.0.0.1:{at['port']}", grpc)


def places(models: Path, run: Path, secrets: Path, tables: Path | None = None) -> dict[str, object]:
    """Return what the paths of deploy/ are in these tests."""
    return {
        "/srv/terarec/models": models,
        "/mnt/models": run,
        "=/models": f"={models}",
        "%d": secrets,
        "/etc/terarec/tokens": secrets,
        "/run/secrets": secrets,
        "/etc/terarec/tables.json": tables,
    }
