"""Sockets that listen over TCP, for servers that accept on their own event loop, and the words for one that cannot."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from antiphon.core.errors import StartError

BACKLOG: Final = 1024
"""As many as there may be connections: a unix socket whose backlog is full refuses at once. The kernel may cap it."""
_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.ENODEV})
"""The address is of another machine; the second is what zmq says."""


def listen_tcp(host: str, port: int, *, port_flag: str = "--port", host_flag: str = "--host") -> socket.socket:
    """A socket that listens.

    Args:
        port_flag: of the command line, that ``port`` was given with.
        host_flag: the same of ``host``.

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
        raise cannot_listen(host, port, error, port_flag=port_flag, host_flag=host_flag) from error
    return sock


def cannot_listen(
    host: str, port: int, error: OSError, *, port_flag: str = "--port", host_flag: str = "--host", what: str = ""
) -> StartError:
    """What to say where ``host`` and ``port`` cannot be listened on: why, and which of the two flags to change.

    Args:
        error: of the system; what zmq and asyncio make of it is left out.
        what: is listened for, as in ``for KV events ``; empty where the address says it.
    """
    is_name = isinstance(error, socket.gaierror)
    # What asyncio raises has the number, and words of its own that say the address once more.
    reason = os.strerror(error.errno) if error.errno and not is_name else error.strerror or str(error)
    if is_name or error.errno in _NOT_HERE:
        remedy = f"give {host_flag} an address of this machine"
    elif error.errno == errno.EADDRINUSE:
        remedy = f"choose another {port_flag}, or stop what listens there"
    else:
        remedy = f"choose another {port_flag} or {host_flag}"
    return StartError(f"cannot listen {what}on {host}:{port}: {reason}", remedy=remedy)
