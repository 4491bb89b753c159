"""Sockets that listen over TCP, for servers that accept on their own event loop."""

from __future__ import annotations

import socket
from typing import Final

from antiphon.core.errors import StartError

BACKLOG: Final = 1024
"""As many as there may be connections: a unix socket whose backlog is full refuses at once. The kernel may cap it."""


def listen_tcp(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        StartError: the address cannot be bound.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            remedy="choose another --port, or stop what listens there",
        ) from error
    return sock
