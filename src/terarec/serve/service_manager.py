# SPDX-License-Identifier: Apache-2.0
"""What the manager that started a server is told, as systemd's ``sd_notify`` does."""

from __future__ import annotations

import logging
import socket

from terarec.kernels.environment import notify_socket

_LOGGER = logging.getLogger(__name__)

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(state: str) -> None:
    """Tell the manager of the service, if one waits for it, that all is loaded, or that the server ends."""
    address = notify_socket()
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # "@" stands for the zero byte that begins the name of a socket without a file.
            sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        _LOGGER.warning("the service manager at %s does not get %s: %s", address, state, error)
