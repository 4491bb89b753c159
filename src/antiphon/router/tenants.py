"""Whose request it is, and what keeps a tenant's KV apart: the salt that the router stamps into every body.

A tenant is found by the key that its client shows. Its salt is spliced into what goes to engines, in the place of
whatever the client sent, so that engines and cache servers find the tenant's own KV and nobody else's.

Always true: a request of a tenant that has a salt reaches an engine with a salt that begins with it, or does not reach
an engine that would compute KV; salts of different tenants differ, whatever their clients send.

Rates, queues and shares are in ``routing.tenants``; what stands in the file of tenants, in ``config.tenant_files``.
"""

from __future__ import annotations

import hashlib
import json
from hmac import compare_digest
from math import ceil
from typing import Final

from antiphon.config.tenant_files import NONE, TenantSpec, TenantTable
from antiphon.core.errors import RequestRefused
from antiphon.protocol.body import Body
from antiphon.router.keys import ClientKeys, Compare
from antiphon.routing.tenants import TenantOptions, Tenants
from antiphon.transport.http.message import HttpRequest

SALT_FIELD: Final = "cache_salt"

SALTED: Final = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/v1/chat/completions/batch",
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/generative_scoring",
        "/v1/systemone",
    )
)
"""Routes whose requests have a ``cache_salt`` at the top of the body (vLLM 0.32)."""

WITHOUT_KV: Final = frozenset(
    (
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/v1/responses/render",
        "/v1/messages/render",
        "/v1/completions/derender",
        "/v1/chat/completions/derender",
    )
)
"""Routes that compute no KV: their bodies are left as they are. All others are closed to tenants that have a salt."""

SALT_REFUSALS: Final = frozenset(("cache_salt_refused", "invalid_cache_salt", "route_not_isolated"))
"""Codes of what :meth:`Tenant.stamp` raises."""

_CLIENT_SALT_MAX_LETTERS: Final = 128
_FORBIDDEN: Final = frozenset("@/\\\0")
"""What vLLM refuses in a salt. It does not see the client's, so that it is refused here."""
_DIGEST_LETTERS: Final = 32
_BURST_S: Final = 10
"""Of a token rate, without a burst of its own."""


class Stamp:
    """What is done to the bodies of one request.

    Args:
        fields: what is spliced into every body that goes to an engine, as raw JSON by key; not to be changed.
        salt: the salt under which engines then look for KV; empty where there is none.
    """

    __slots__ = ("fields", "salt")

    def __init__(self, fields: dict[str, bytes], salt: str) -> None:
        self.fields = fields
        self.salt = salt


UNSTAMPED: Final = Stamp({}, "")
"""Of requests that have no tenant, or whose tenant has no salt."""


class Tenant:
    """One tenant: its name, and how its requests are stamped.

    Args:
        name: see ``config.tenant_files``; so are the others.
        salt: letters, digits, dashes and underscores, or None.
        may_salt: whether clients may send a salt.
    """

    __slots__ = ("_plain", "may_salt", "name", "salt")

    def __init__(self, name: str, salt: str | None, *, may_salt: bool = False) -> None:
        assert salt is None or "." not in salt, "what is behind the first dot is a client's"
        self.name = name
        self.salt = salt
        self.may_salt = may_salt
        self._plain = UNSTAMPED if salt is None else _stamp(salt)

    def stamp(self, path: str, body: Body) -> Stamp:
        """What is done to the bodies of a request to the route ``path``.

        Raises:
            RequestRefused: 400 for a salt of the client's own that it may not send or that is none, 403 for a route
                on which KV cannot be kept apart.
        """
        if path not in SALTED:
            if path in WITHOUT_KV or self.salt is None:
                return UNSTAMPED
            raise RequestRefused(
                f"{path} has no cache_salt, so that KV cannot be kept apart there: it is closed to this API key",
                status=403,
                kind="permission_error",
                code="route_not_isolated",
            )
        if SALT_FIELD not in body.values:
            return self._plain
        sent = body.get(SALT_FIELD)
        if sent is None or sent == b"null":
            return self._plain
        if not self.may_salt:
            raise RequestRefused(
                "cache_salt is set by the router and cannot be sent with this API key",
                code="cache_salt_refused",
                param=SALT_FIELD,
            )
        return _stamp(combined_salt(self.salt, _client_salt(sent)))


def combined_salt(salt: str | None, own: str) -> str:
    """A tenant's salt with a client's ``own``: different for each pair, and never the salt of a tenant.

    A digest of fixed length follows the only dot, so that what stands before it is the tenant's whole salt.
    """
    prefix = NONE if salt is None else salt
    digest = hashlib.sha256(b"antiphon client salt\0%b\0" % prefix.encode() + own.encode(errors="surrogatepass"))
    return f"{prefix}.{digest.hexdigest()[:_DIGEST_LETTERS]}"


def _stamp(salt: str) -> Stamp:
    return Stamp({SALT_FIELD: b'"%b"' % salt.encode()}, salt)


def _client_salt(raw: bytes) -> str:
    try:
        text = json.loads(raw)
    except ValueError:  # such as a NaN in a list
        text = None
    if isinstance(text, str) and 0 < len(text) <= _CLIENT_SALT_MAX_LETTERS and _FORBIDDEN.isdisjoint(text):
        return text
    raise RequestRefused(
        f"cache_salt must be text of 1 to {_CLIENT_SALT_MAX_LETTERS} letters without @, /, \\ and NUL",
        code="invalid_cache_salt",
        param=SALT_FIELD,
    )


class TenantKeys:
    """The tenants by the keys of their clients.

    Args:
        table: all of them.
        compare: see ``keys.KeyRing``.
    """

    def __init__(self, table: TenantTable, compare: Compare = compare_digest) -> None:
        self.tenants = [Tenant(entry.spec.name, entry.salt, may_salt=entry.spec.may_salt) for entry in table.tenants]
        owned: list[bytes | tuple[bytes, int]] = []
        for number, entry in enumerate(table.tenants, 1):
            owned += [(key, number) for key in entry.keys]
        self.keys = ClientKeys(owned, compare)

    def find(self, request: HttpRequest) -> Tenant | None:
        """Whose request it is; None where its client shows no key that is known: see ``keys.unknown_key``."""
        owner = self.keys.owner(request)
        return self.tenants[owner - 1] if owner else None

    def refusal(self, request: HttpRequest) -> RequestRefused | None:
        """Why the client may not be served: 401; None if it shows a tenant's key."""
        return self.keys.refusal(request)


def admission(table: TenantTable) -> Tenants:
    """The limits and shares of all tenants."""
    options = [tenant_options(entry.spec) for entry in table.tenants]
    return Tenants(options, table.spec.in_flight_max, table.spec.wait_max_s)


def tenant_options(spec: TenantSpec) -> TenantOptions:
    """What the file says of a tenant's limits."""
    burst, tokens_burst = spec.burst, spec.tokens_burst
    if burst is None:
        burst = max(1, ceil(spec.requests_per_s or 0))
    if tokens_burst is None:
        tokens_burst = max(1, ceil((spec.tokens_per_s or 0) * _BURST_S))
    return TenantOptions(
        name=spec.name,
        weight=spec.weight,
        requests_per_s=spec.requests_per_s,
        burst=burst,
        tokens_per_s=spec.tokens_per_s,
        tokens_burst=tokens_burst,
        concurrent_max=spec.concurrent_max,
        queue_max=spec.queue_max,
    )
