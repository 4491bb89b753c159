"""The routes of the router, in one table: how each is served, and what differs between the APIs behind them.

What is not here is refused: nothing is proxied by accident. Left out are vLLM's routes that concern one engine's life
(sleep, profile, weights, adapters, aborts), which would reach one engine of many, and web sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.core.errors import ProtocolError, RequestRefused
from antiphon.protocol import apis
from antiphon.protocol.apis import Api
from antiphon.protocol.body import Body, scan
from antiphon.protocol.handoff import nested_body
from antiphon.protocol.requests import judge_message, judge_response
from antiphon.router.refusals import OWN_FIELDS, own_field_refused
from antiphon.routing.path import reason_alone


@dataclass(frozen=True, slots=True)
class Route:
    """One route that engines serve, with POST.

    Args:
        api: of its requests and answers.
        is_split: it goes through prefill and decode; else one decode engine serves it alone, once.
        judge: the reason for which a request of a split route cannot; None goes by the keys at the top of the body.
        is_json: whether bodies are JSON objects; others go to the engine unread.
    """

    api: Api
    is_split: bool = False
    judge: Callable[[Body], str | None] | None = None
    is_json: bool = True


def judge_generate(body: Body) -> str | None:
    """A request to ``/inference/v1/generate``, by its sampling parameters.

    Raises:
        RequestRefused: they have too many keys, or name what is the router's own in ``extra_args``.
    """
    try:
        nested = nested_body(body, "sampling_params")
        extra = nested_body(nested, "extra_args") if nested is not None and "extra_args" in nested.values else None
    except ProtocolError as error:
        raise RequestRefused(error.message, code="invalid_json", param="sampling_params") from None
    if extra is not None:
        _check_further(extra, "sampling_params.extra_args")
    return reason_alone(nested.values) if nested is not None else None


def check_own_fields(body: Body) -> None:
    """That a client says nothing that is the router's to say.

    Raises:
        RequestRefused: it does, at the top of the body or in ``vllm_xargs``, or these have too many keys.
    """
    values = body.values
    if "kv_transfer_params" in values and body.get("kv_transfer_params") != b"null":
        raise own_field_refused("kv_transfer_params", "kv_transfer_params")
    if "vllm_xargs" in values:
        text = body.get("vllm_xargs") or b""
        if not text.startswith(b"{"):
            return  # no object: the engine is to say so
        try:
            further = scan(text)
        except ProtocolError as error:
            raise RequestRefused(error.message, code="invalid_json", param="vllm_xargs") from None
        _check_further(further, "vllm_xargs")


def _check_further(further: Body, where: str) -> None:
    for field in OWN_FIELDS:
        if field in further.values:
            raise own_field_refused(field, f"{where}.{field}")


_ALONE = Route(apis.COMPLETIONS)
_ALONE_MESSAGES = Route(apis.MESSAGES)
_ALONE_UNREAD = Route(apis.ANY, is_json=False)

ROUTES: dict[str, Route] = {
    "/v1/completions": Route(apis.COMPLETIONS, is_split=True),
    "/v1/chat/completions": Route(apis.COMPLETIONS, is_split=True),
    "/v1/responses": Route(apis.RESPONSES, is_split=True, judge=judge_response),
    "/v1/messages": Route(apis.MESSAGES, is_split=True, judge=judge_message),
    "/inference/v1/generate": Route(apis.GENERATE, is_split=True, judge=judge_generate),
    # Several conversations in one request, as a list of prompts.
    "/v1/chat/completions/batch": _ALONE,
    # Scores and vectors.
    "/v1/embeddings": _ALONE,
    "/v2/embed": _ALONE,
    "/pooling": _ALONE,
    "/classify": _ALONE,
    "/score": _ALONE,
    "/v1/score": _ALONE,
    "/rerank": _ALONE,
    "/v1/rerank": _ALONE,
    "/v2/rerank": _ALONE,
    "/generative_scoring": _ALONE,
    "/v1/systemone": _ALONE,
    # No generation.
    "/tokenize": _ALONE,
    "/detokenize": _ALONE,
    "/v1/messages/count_tokens": _ALONE_MESSAGES,
    "/v1/completions/render": _ALONE,
    "/v1/chat/completions/render": _ALONE,
    "/v1/responses/render": _ALONE,
    "/v1/messages/render": _ALONE_MESSAGES,
    "/v1/completions/derender": _ALONE,
    "/v1/chat/completions/derender": _ALONE,
    # Forms with a file in them.
    "/v1/audio/transcriptions": _ALONE_UNREAD,
    "/v1/audio/translations": _ALONE_UNREAD,
}
"""Every route that engines serve."""

HEALTH_GETS = frozenset(("/health", "/liveness", "/readiness"))
"""For everybody, keys or not."""
OPEN_GETS = HEALTH_GETS | {"/v1/models"}
ADMIN_GETS = frozenset(("/metrics", "/status", "/receipts"))

_RESPONSE = "/v1/responses/"


def is_admin(path: str) -> bool:
    """Whether a path is one of the router's own that not everybody may see."""
    return path in ADMIN_GETS or path.startswith("/receipts/")


def check_route(method: str, path: str, methods: tuple[str, ...]) -> None:
    """That a path is a route, and takes the method.

    Args:
        methods: those that it takes; see :func:`allowed`.

    Raises:
        RequestRefused: 404 or 405.
    """
    if not methods:
        if path.startswith(_RESPONSE) and path not in ROUTES:
            raise RequestRefused(
                "responses are not kept: there is none to get, cancel or delete; send the whole conversation as input",
                status=404,
                kind="not_found_error",
                code="stateful_response_refused",
            )
        raise RequestRefused(f"{path[:200]} is not a route of this router", status=404, code="route_not_found")
    if method not in methods:
        raise RequestRefused(f"{path} does not take {method}", status=405, code="method_not_allowed")


def allowed(path: str) -> tuple[str, ...]:
    """The methods that a path takes; none for one that is no route."""
    if path in ROUTES:
        return ("POST",)
    return ("GET", "HEAD") if path in OPEN_GETS or is_admin(path) else ()
