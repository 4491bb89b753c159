"""What an admin request may be and what it asks for, checked before anything is done for it.

A check either passes or raises ``RequestRefused``. Nothing here knows the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

from antiphon.core.errors import ProtocolError, RequestRefused
from antiphon.protocol import json
from antiphon.transport.http.access import is_asked_from_here
from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.server import Responder

WAIT_MAX_S: Final = 30.0
"""Longest long poll: shorter than what proxies and clients commonly take for a dead connection."""

NAME_CHARS_MAX: Final = 1_000
"""Longest tenant or model name of ``POST /clear``."""

_SEQUENCE_MAX = 2**63 - 1


def check_access(request: HttpRequest, responder: Responder, own_host: str) -> None:
    """Refuse who is not on this machine, also where a proxy or a web page of this machine asks for them.

    Args:
        own_host: the host that the server listens on.

    Raises:
        RequestRefused: 403.
    """
    if not is_asked_from_here(request, responder, own_host):
        raise RequestRefused(
            "this route answers on the cache server's own machine only, asked by its own name or a loopback address",
            status=403,
            kind="permission_error",
            code="admin_only_on_loopback",
        )


@dataclass(frozen=True, slots=True)
class PollQuery:
    """A question for a numbered log.

    Args:
        since: the first number asked for.
        wait_s: how long to wait for one, 0 to ``WAIT_MAX_S``.
        incarnation: the life of the server that ``since`` belongs to; None where the asker does not say.
    """

    since: int
    wait_s: float
    incarnation: str | None


def poll_query(request: HttpRequest) -> PollQuery:
    """The query ``since=N&wait_s=S&incarnation=I``, all of it optional.

    Raises:
        RequestRefused: 400, with the parameter that is wrong.
    """
    values = _query(request, ("since", "wait_s", "incarnation"))
    since, wait_s = max(1, _whole(values, "since")), 0.0
    if "wait_s" in values:
        try:
            wait_s = float(values["wait_s"])
        except ValueError:
            wait_s = -1.0
        if not 0 <= wait_s <= WAIT_MAX_S:  # false for what is not a number, too
            raise _wrong("wait_s", f"wait_s must be a number of seconds from 0 to {WAIT_MAX_S:g}")
    return PollQuery(since, wait_s, values.get("incarnation"))


def listing_query(request: HttpRequest) -> int:
    """The query ``after=N``, 0 where it is not given.

    Raises:
        RequestRefused: 400, with the parameter that is wrong.
    """
    return _whole(_query(request, ("after",)), "after")


def _whole(values: dict[str, str], name: str) -> int:
    text = values.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= _SEQUENCE_MAX):
        raise _wrong(name, f"{name} must be a whole number from 0 to {_SEQUENCE_MAX}")
    return int(text)


def no_query(request: HttpRequest) -> None:
    """Refuse a query where none is understood.

    Raises:
        RequestRefused: 400, with the first parameter.
    """
    _query(request, ())


def _query(request: HttpRequest, known: tuple[str, ...]) -> dict[str, str]:
    try:
        pairs = parse_qsl(request.query, keep_blank_values=True, max_num_fields=16)
    except ValueError:
        raise _wrong(None, "the query has too many parameters") from None
    values: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            shown = f"known are {', '.join(known)}" if known else "this route takes none"
            raise _wrong(name[:100], f"there is no parameter {name[:100]!r}; {shown}")
        if name in values:
            raise _wrong(name, f"the parameter {name} is given twice")
        values[name] = value
    return values


@dataclass(frozen=True, slots=True)
class ClearQuery:
    """What to forget: of a tenant, of a model, of both, or, with neither, all."""

    tenant: str | None
    model: str | None


def clear_query(request: HttpRequest) -> ClearQuery:
    """The JSON body of ``POST /clear``: ``{"tenant": NAME, "model": NAME}``, each optional. An empty body is refused,
    since it would clear all.

    Raises:
        RequestRefused: 415 or 400, with the field that is wrong; 403 for a web page.
    """
    no_query(request)
    if request.header(b"origin") is not None:
        # A page that a browser on this machine shows may send a POST here, and does not get to read the answer.
        raise RequestRefused(
            "web pages may not clear the cache", status=403, kind="permission_error", code="origin_not_allowed"
        )
    media_type = (request.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise RequestRefused("the body must be sent as application/json", status=415, code="content_type")
    try:
        body = json.decode(request.body)
    except ProtocolError as error:
        raise _wrong(
            None, f'{error.message}; to clear all, send {{}}; else {{"tenant": NAME, "model": NAME}}'
        ) from None
    if not isinstance(body, dict):
        raise _wrong(None, "the body must be a JSON object; {} clears all")
    names: dict[str, str | None] = {"tenant": None, "model": None}
    for name, value in body.items():
        if name not in names:
            raise _wrong(str(name)[:100], f"there is no field {str(name)[:100]!r}; known are tenant, model")
        if value is not None and not (isinstance(value, str) and len(value) <= NAME_CHARS_MAX):
            raise _wrong(name, f"{name} must be text of at most {NAME_CHARS_MAX} characters, or null")
        names[name] = value
    return ClearQuery(names["tenant"], names["model"])


def _wrong(param: str | None, message: str) -> RequestRefused:
    return RequestRefused(message, status=400, code="invalid_request", param=param)
