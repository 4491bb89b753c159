"""The routes by which operators change the pools at run time: list, add, drain and remove engines of both roles.

    GET    /endpoints         every engine: role, url, state, cause, requests in flight
    POST   /endpoints         {"role": "decode", "url": "http://HOST:PORT"}: add it, or open it again if it drains
    POST   /endpoints/drain   the same body: no new requests; those in flight end by themselves
    DELETE /endpoints         the same body, or ?role=…&url=…: drain, and forget it when its last request has ended;
                              with "force": true its requests are cut at once, and tried again where that is safe

Each is answered at once, changes nothing if it is repeated, and is lost when the router restarts: what is to last
belongs in the spec. The last engine of a pool that takes requests is drained or removed only with "allow_empty": true.
``GET /list_workers`` and ``POST /remove_worker?url=…`` are vllm-router's names for the list and the removal.

Who may ask is decided before (``admin``), but for one thing: a web page of another site may not change anything.
"""

from __future__ import annotations

import logging
from urllib.parse import parse_qsl, urlsplit

from antiphon.config.router_spec import engine_url
from antiphon.core.errors import ProtocolError, RequestRefused
from antiphon.protocol import json
from antiphon.protocol.openai import JSON
from antiphon.router.admin import endpoint_row
from antiphon.router.engines import Engines
from antiphon.router.warming import Warming
from antiphon.routing.endpoint import TIER_OUT, Endpoint, Role
from antiphon.routing.fleet import Fleet
from antiphon.routing.options import ENDPOINTS_MAX
from antiphon.routing.pool import Pool
from antiphon.routing.states import EndpointState
from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.server import Responder

log = logging.getLogger("antiphon.router")

METHODS: dict[str, frozenset[str]] = {
    "/endpoints": frozenset(("GET", "HEAD", "POST", "DELETE")),
    "/endpoints/drain": frozenset(("POST",)),
    "/list_workers": frozenset(("GET", "HEAD")),
    "/remove_worker": frozenset(("POST",)),
}
"""The routes, and what each takes."""

BODY_MAX_BYTES = 65_536
_FLAGS = frozenset(("force", "allow_empty"))
_EMPTY: dict[Role, str] = {
    "prefill": "decode engines compute the prompts",
    "decode": "requests are refused with 503",
}
"""What happens while no engine of a role takes requests."""


class Endpoints:
    """The routes of one router."""

    def __init__(self, fleet: Fleet, engines: Engines, warming: Warming) -> None:
        self._fleet = fleet
        self._engines = engines
        self._warming = warming

    def serve(self, request: HttpRequest, responder: Responder) -> None:
        """Answer a request on one of ``METHODS``.

        Raises:
            RequestRefused: nothing was changed.
        """
        if request.method in ("GET", "HEAD"):
            answer = self._urls() if request.path == "/list_workers" else self._list()
            _send(responder, 200, answer)
            return
        _check_origin(request)
        if request.path == "/remove_worker":
            _send(responder, *self._remove_worker(_query(request)))
            return
        values = _values(request)
        action = values.pop("action", "add")
        if request.method == "DELETE":
            act, allowed = self._remove, _FLAGS | {"role", "url"}
        elif request.path == "/endpoints/drain" or action == "drain":
            act, allowed = self._drain, frozenset(("role", "url", "allow_empty"))
        elif action == "add":
            act, allowed = self._add, frozenset(("role", "url"))
        else:
            raise RequestRefused("action must be add or drain", code="invalid_action", param="action")
        _check_known(values, allowed)
        _send(responder, *act(values))

    # -- what is done -----------------------------------------------------------------------------------------------

    def _list(self) -> dict[str, object]:
        pools: dict[str, object] = {
            pool.role: {"usable": pool.num_usable, "total": len(pool.endpoints)}
            for pool in (self._fleet.prefill, self._fleet.decode)
        }
        return {"endpoints": [endpoint_row(endpoint) for endpoint in self._fleet.all()], **pools}

    def _urls(self) -> dict[str, object]:
        return {"urls": [endpoint.url for endpoint in self._fleet.all()]}

    def _add(self, values: dict[str, object]) -> tuple[int, dict[str, object]]:
        pool, url = self._pool_and_url(values)
        found = pool.find(url)
        if found is not None:
            if not found.is_held:  # one that is being warmed is opened by that
                pool.add(url)
                self._engines.add(found)
            return 200, {"endpoint": endpoint_row(found), "is_new": False}
        if len(pool.endpoints) >= ENDPOINTS_MAX:
            raise RequestRefused(
                f"there are {ENDPOINTS_MAX} {pool.role} engines, and no more are taken: remove one first",
                status=409,
                code="too_many_endpoints",
            )
        is_warmed = self._warming.is_on
        endpoint = pool.add(url, is_open=not is_warmed)
        self._engines.add(endpoint)
        log.info("%s engine %s is added%s", pool.role, endpoint.address, ", and warmed first" if is_warmed else "")
        if is_warmed:
            self._warming.add(endpoint)
        return 201, {"endpoint": endpoint_row(endpoint), "is_new": True}

    def _drain(self, values: dict[str, object]) -> tuple[int, dict[str, object]]:
        pool, endpoint = self._known(values)
        _check_last(pool, endpoint, values)
        pool.drain(endpoint)
        return 200, {"endpoint": endpoint_row(endpoint), **_emptiness(pool)}

    def _remove(self, values: dict[str, object]) -> tuple[int, dict[str, object]]:
        pool, endpoint = self._known(values)
        _check_last(pool, endpoint, values)
        num_cut = 0
        is_forced = _flag(values, "force")
        pool.remove(endpoint)
        if is_forced:
            num_cut = endpoint.num_active
            self._engines.cut(endpoint)
        is_gone = endpoint.state is EndpointState.REMOVED
        log.info(
            "%s engine %s is removed%s", pool.role, endpoint.address, "" if is_gone else " when its requests have ended"
        )
        answer = {"endpoint": endpoint_row(endpoint), "is_removed": is_gone, "num_cut": num_cut}
        return 200 if is_gone else 202, answer | _emptiness(pool)

    def _remove_worker(self, values: dict[str, object]) -> tuple[int, dict[str, object]]:
        """vllm-router names no role: the URL is removed from every pool that has it."""
        _check_known(values, frozenset(("role", "url", *_FLAGS)))
        if "role" in values:
            return self._remove(values)
        url = _url(values)
        pools = [pool for pool in (self._fleet.prefill, self._fleet.decode) if pool.find(url) is not None]
        if not pools:
            raise _not_found(f"no engine has the URL {url}")
        for pool in pools:
            endpoint = pool.find(url)
            assert endpoint is not None
            _check_last(pool, endpoint, values)
        done = [self._remove(values | {"role": pool.role}) for pool in pools]
        return max(status for status, _ in done), {"removed": [answer for _, answer in done]}

    # -- what is meant ----------------------------------------------------------------------------------------------

    def _pool_and_url(self, values: dict[str, object]) -> tuple[Pool, str]:
        role = values.get("role")
        if role == "prefill" or role == "decode":
            return self._fleet.pool(role), _url(values)
        raise RequestRefused("role must be prefill or decode", code="invalid_role", param="role")

    def _known(self, values: dict[str, object]) -> tuple[Pool, Endpoint]:
        pool, url = self._pool_and_url(values)
        endpoint = pool.find(url)
        if endpoint is None:
            raise _not_found(f"no {pool.role} engine has the URL {url}")
        return pool, endpoint


def _url(values: dict[str, object]) -> str:
    url = values.get("url")
    try:
        if not isinstance(url, str):
            raise ValueError("url must be http://HOST:PORT")
        return engine_url(url)
    except ValueError as error:
        raise RequestRefused(str(error), code="invalid_url", param="url") from None


def _flag(values: dict[str, object], name: str) -> bool:
    value = values.get(name, False)
    if isinstance(value, bool):
        return value
    raise RequestRefused(f"{name} must be true or false", code="invalid_request", param=name)


def _values(request: HttpRequest) -> dict[str, object]:
    """What is asked: the JSON object of the body; without a body, the query.

    Raises:
        RequestRefused: neither.
    """
    if not request.body:
        return _query(request)
    if len(request.body) > BODY_MAX_BYTES:
        raise RequestRefused(f"the body is larger than {BODY_MAX_BYTES} bytes", status=413, code="request_too_large")
    try:
        values = json.decode(request.body)
    except ProtocolError as error:
        raise RequestRefused(error.message, code="invalid_json") from None
    if not isinstance(values, dict):
        raise RequestRefused("the body must be a JSON object with role and url", code="invalid_json")
    return values


def _query(request: HttpRequest) -> dict[str, object]:
    try:
        pairs = parse_qsl(request.query, keep_blank_values=True, strict_parsing=bool(request.query), max_num_fields=16)
    except ValueError:
        raise RequestRefused("the query cannot be read: write ?role=…&url=…", code="invalid_request") from None
    words: dict[str, object] = {"true": True, "false": False}
    return {name: words.get(value, value) if name in _FLAGS else value for name, value in pairs}


def _check_known(values: dict[str, object], allowed: frozenset[str]) -> None:
    unknown = sorted(values.keys() - allowed)
    if unknown:
        raise RequestRefused(
            f"{unknown[0][:100]} is not known here: it takes {', '.join(sorted(allowed))}",
            code="invalid_request",
            param=unknown[0][:100],
        )


def _check_origin(request: HttpRequest) -> None:
    """A browser on this machine asks from this machine, whatever page it shows; it says which."""
    origin = request.header(b"origin")
    if origin is None:
        return
    try:
        netloc = urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        netloc = ""
    if netloc.encode("latin-1") != request.header(b"host"):
        raise RequestRefused(
            "a web page of another site may not change the pools",
            status=403,
            kind="permission_error",
            code="cross_site_request",
        )


def _check_last(pool: Pool, endpoint: Endpoint, values: dict[str, object]) -> None:
    """The last one goes only knowingly."""
    others = [one for one in pool.endpoints if one is not endpoint and one.tier != TIER_OUT]
    if others or endpoint.tier == TIER_OUT or _flag(values, "allow_empty"):
        return
    raise RequestRefused(
        f"this is the last {pool.role} engine that takes requests; without it {_EMPTY[pool.role]}: "
        "add another one first, or say allow_empty",
        status=409,
        code="last_endpoint",
    )


def _emptiness(pool: Pool) -> dict[str, object]:
    if pool.is_open:
        return {"is_pool_empty": False}
    return {"is_pool_empty": True, "warning": f"no {pool.role} engine takes requests: {_EMPTY[pool.role]}"}


def _not_found(message: str) -> RequestRefused:
    return RequestRefused(message, status=404, kind="not_found_error", code="endpoint_not_found", param="url")


def _send(responder: Responder, status: int, value: dict[str, object]) -> None:
    responder.send(status, [(b"content-type", JSON)], json.encode(value))
