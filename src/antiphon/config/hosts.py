"""Host names as the spec writes them: which are loopback, which are this machine, their ports, and URLs made of them.

No other host's name is looked up in DNS, so nothing here waits: a name other than ``localhost`` and this machine's own
is taken for another host.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from urllib.parse import urlsplit

WILDCARDS = frozenset({"0.0.0.0", "::", "*"})


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reached from its own machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is loopback, this machine's name, or one of its addresses (one that can be bound)."""
    if is_loopback(host) or host.lower() == socket.gethostname().lower():
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def is_same_host(one: str, other: str) -> bool:
    """Whether two hosts are one: they are spelled alike, or are both this machine."""
    return one == other or (is_this_machine(one) and is_this_machine(other))


def is_port_taken(host: str, port: int) -> bool:
    """Whether something listens on a port of this machine: as a server does, it is bound, and let go at once.

    With SO_REUSEADDR, so that connections in TIME_WAIT do not count; without SO_REUSEPORT, which would let two
    processes share the port. False for a port that cannot be bound for another reason, which the server reports best.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        except OverflowError:
            return False  # past 65535: a check of its own
    return False


def http_url(host: str, port: int) -> str:
    """``http://host:port``, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def host_and_port(url: str) -> tuple[str, int]:
    """The parts of what :func:`http_url` made."""
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    assert parts.port is not None, url
    return parts.hostname, parts.port
