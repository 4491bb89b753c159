"""Addresses of servers as people type them."""

from __future__ import annotations

from urllib.parse import urlsplit

from antiphon.core.errors import ConfigError


def http_host_port(flag: str, url: str) -> tuple[str, int]:
    """Host and port of ``http://HOST:PORT``, with or without ``http://`` and a port (80).

    Args:
        flag: that the address was given with.

    Raises:
        ConfigError: it is no such address.
    """
    wrong = ConfigError(f"{flag} {url}: not an address of the form http://HOST:PORT")
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme != "http" or not host or parts.path.strip("/") or parts.query:
        raise wrong
    return host, port or 80
