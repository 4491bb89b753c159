"""What an admin request may be and what it asks for, checked before anything is done for it.

A check either passes or raises ``RequestRefused``. Nothing here knows the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import ProtocolError, RequestRefused
from antiphon.protocol import json
from antiphon.protocol.cache import KEY_BYTES
from antiphon.transport.http.access import is_asked_from_here
from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.server import Responder

WAIT_MAX_S: Final = 30.0
"""Longest long poll: shorter than what proxies and clients commonly take for a dead connection."""

NAME_CHARS_MAX: Final = 1_000
"""Longest name of a tenant or model."""

TTL_MAX_S: Final = 31_536_000.0
"""Longest time of a pin, a year: longer than a server lives."""

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
class ListQuery:
    """What to list: of a tenant, of a model, of both, or, with neither, all; a page of it.

    Args:
        after: the cursor of the page before; 0 begins.
        limit: entries, at least 1.
    """

    tenant: str | None
    model: str | None
    after: int
    limit: int


def list_query(request: HttpRequest, limit_max: int) -> ListQuery:
    """The query ``tenant=T&model=M&after=N&limit=N``, all of it optional; without a limit it is ``limit_max``.

    Raises:
        RequestRefused: 400, with the parameter that is wrong.
    """
    values = _query(request, ("tenant", "model", "after", "limit"))
    limit = _whole(values, "limit") if "limit" in values else limit_max
    if not 1 <= limit <= limit_max:
        raise _wrong("limit", f"limit must be a whole number from 1 to {limit_max}")
    for name in ("tenant", "model"):
        if len(values.get(name, "")) > NAME_CHARS_MAX:
            raise _wrong(name, f"{name} must be text of at most {NAME_CHARS_MAX} characters")
    return ListQuery(values.get("tenant"), values.get("model"), _whole(values, "after"), limit)


# ---- bodies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClearQuery:
    """What to forget: of a tenant, of a model, of both, or, with neither, all; ``with_pinned``: what is pinned too."""

    tenant: str | None
    model: str | None
    with_pinned: bool


def clear_query(request: HttpRequest) -> ClearQuery:
    """The JSON body of ``POST /clear``: ``{"tenant": NAME, "model": NAME, "pinned": false}``, each optional. An empty
    body is refused, since it would clear all.

    Raises:
        RequestRefused: 415 or 400, with the field that is wrong; 403 for a web page.
    """
    hint = 'to clear all, send {}; else {"tenant": NAME, "model": NAME}'
    body = _body(request, ("tenant", "model", "pinned"), hint)
    with_pinned = body.get("pinned", False)
    if not isinstance(with_pinned, bool):
        raise _wrong("pinned", "pinned must be true or false")
    return ClearQuery(_name(body, "tenant"), _name(body, "model"), with_pinned)


@dataclass(frozen=True, slots=True)
class PinQuery:
    """Which chunks to keep, and for how long; None: until they are unpinned."""

    keys: tuple[ChunkKey, ...]
    ttl_s: float | None


def pin_query(request: HttpRequest) -> PinQuery:
    """The JSON body of ``POST /pin``: ``{"keys": HEX, "ttl_s": S}``; the keys are joined, 64 hex digits each.

    Raises:
        RequestRefused: as ``clear_query``.
    """
    body = _body(request, ("keys", "ttl_s"), 'send {"keys": HEX}, the key of the last chunk of what to keep')
    ttl_s = body.get("ttl_s")
    if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float)):
        ttl_s = -1.0
    if ttl_s is not None and not 0 < ttl_s <= TTL_MAX_S:
        raise _wrong("ttl_s", f"ttl_s must be a number of seconds above 0, at most {TTL_MAX_S:g}, or null")
    keys = _keys(body, "keys")
    if not keys:
        raise _wrong("keys", "keys must name at least one chunk")
    return PinQuery(keys, None if ttl_s is None else float(ttl_s))


def unpin_query(request: HttpRequest) -> ChunkKey | None:
    """The JSON body of ``POST /unpin``: ``{"key": HEX}``; None for ``{}``, which means all.

    Raises:
        RequestRefused: as ``clear_query``.
    """
    body = _body(request, ("key",), 'to end all pins, send {}; else {"key": HEX}, the last chunk of the pin')
    if body.get("key") is None:
        return None
    keys = _keys(body, "key")
    if len(keys) != 1:
        raise _wrong("key", f"key must be one chunk key, {2 * KEY_BYTES} hex digits")
    return keys[0]


@dataclass(frozen=True, slots=True)
class QuotaQuery:
    """A tenant's quota; None takes it away."""

    tenant: str
    quota_bytes: int | None


def quota_query(request: HttpRequest) -> QuotaQuery:
    """The JSON body of ``PUT /quota``: ``{"tenant": NAME, "quota_bytes": N}``, or null for none.

    Raises:
        RequestRefused: as ``clear_query``.
    """
    body = _body(request, ("tenant", "quota_bytes"), 'send {"tenant": NAME, "quota_bytes": N}, or null for none')
    tenant = _name(body, "tenant")
    if not tenant:
        raise _wrong("tenant", "tenant must be named")
    if "quota_bytes" not in body:
        raise _wrong("quota_bytes", "quota_bytes must be given: a number of bytes, or null for none")
    quota_bytes = body["quota_bytes"]
    if quota_bytes is None:
        return QuotaQuery(tenant, None)
    if isinstance(quota_bytes, bool) or not isinstance(quota_bytes, int) or not 0 <= quota_bytes <= _SEQUENCE_MAX:
        raise _wrong("quota_bytes", "quota_bytes must be a whole number, 0 or more, or null")
    return QuotaQuery(tenant, quota_bytes)


def _body(request: HttpRequest, known: tuple[str, ...], hint: str) -> dict[str, object]:
    """The JSON object of a request that changes something."""
    no_query(request)
    if request.header(b"origin") is not None:
        # A page that a browser on this machine shows may send a POST here, and does not get to read the answer.
        raise RequestRefused(
            "web pages may change nothing here", status=403, kind="permission_error", code="origin_not_allowed"
        )
    media_type = (request.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise RequestRefused("the body must be sent as application/json", status=415, code="content_type")
    try:
        body = json.decode(request.body)
    except ProtocolError as error:
        raise _wrong(None, f"{error.message}; {hint}") from None
    if not isinstance(body, dict):
        raise _wrong(None, f"the body must be a JSON object: {hint}")
    for name in body:
        if name not in known:
            raise _wrong(str(name)[:100], f"there is no field {str(name)[:100]!r}; known are {', '.join(known)}")
    return body


def _name(body: dict[str, object], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= NAME_CHARS_MAX):
        raise _wrong(name, f"{name} must be text of at most {NAME_CHARS_MAX} characters, or null")
    return value


def _keys(body: dict[str, object], name: str) -> tuple[ChunkKey, ...]:
    text = body.get(name)
    try:
        joined = bytes.fromhex(text) if isinstance(text, str) else None
    except ValueError:
        joined = None
    if joined is None or len(joined) % KEY_BYTES:
        raise _wrong(name, f"{name} must be chunk keys in hex, {2 * KEY_BYTES} digits each")
    return tuple(ChunkKey(joined[start : start + KEY_BYTES]) for start in range(0, len(joined), KEY_BYTES))


def _wrong(param: str | None, message: str) -> RequestRefused:
    return RequestRefused(message, status=400, code="invalid_request", param=param)
