"""Whether a request comes from this machine and means it: the rule of every admin route that has no key."""

from __future__ import annotations

from urllib.parse import urlsplit

from antiphon.config.hosts import is_loopback
from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.responder import Responder

_FORWARDED_FOR = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip"))


def is_asked_from_here(request: HttpRequest, responder: Responder, own_host: str) -> bool:
    """Whether the peer is on this machine, speaks for itself, and names this machine.

    A proxy of this machine that asks for somebody else is not; nor is a web page whose own name was made to point here,
    since it still sends that name.

    Args:
        own_host: the host that the server listens on.
    """
    if not responder.peer_is_loopback or any(name in _FORWARDED_FOR for name, _ in request.headers):
        return False
    name = _host_name((request.header(b"host") or b"").decode("latin-1"))
    return name == own_host or is_loopback(name)


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # an address with a bracket that does not close
        return ""
