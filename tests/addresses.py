# SPDX-License-Identifier: Apache-2.0
"""Loopback addresses for servers that tests start as programs of their own."""

import secrets
import socket
import sys


def own_address() -> tuple[str, int]:
    """Return an address and port on this machine that no other test gets.

    The port of a server that has ended goes to whoever asks next, and clients that still try to reach the server, as
    Kafka's do, then send to another test's. All of 127.0.0.0/8 is this machine on Linux, so each server has an address
    of its own; elsewhere it is 127.0.0.1. The port is at most 55,535: nodes of a Redis cluster listen on the one 10,000
    above, too.
    """
    host = "127.0.0.1"
    if sys.platform == "linux":
        host = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port <= 55_535:
            return host, port
