"""Who may use the router, and what engines are shown: keys of clients, and the key of the router itself at its engines.

Invariants: a key that the router checks reaches no engine, no log and no answer. What a check costs depends neither on
how many keys there are nor on how much of one is right: it is a hash with a secret of this process, and one look-up.

Which routes ask for a key is decided in ``app``; who may use the admin routes, in ``admin``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import blake2b

from antiphon.config.key_files import read_key, read_keys
from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import RequestRefused
from antiphon.router.headers import NOT_FORWARDED, forwarded_headers
from antiphon.transport.http.message import HttpRequest, field_lines

CHALLENGE = b"www-authenticate: Bearer\r\n"
KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))
"""Where a client shows its key; the second is the habit of clients of ``/v1/messages``."""

_KEY_MAX_BYTES = 4096


class ClientKeys:
    """The keys of clients, as digests."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests = frozenset(map(self._digest, keys))
        assert self._digests

    def _digest(self, key: bytes) -> bytes:
        # Whoever times the look-up learns something of a digest that cannot be foretold, and nothing of a key.
        return blake2b(key, key=self._secret, digest_size=16).digest()

    def refusal(self, request: HttpRequest) -> RequestRefused | None:
        """Why the client may not be served: 401; None if it shows a key."""
        first = request.first
        shown = [key for key in (bearer(first.get(b"authorization")), first.get(b"x-api-key")) if key]
        if any(len(key) <= _KEY_MAX_BYTES and self._digest(key.strip()) in self._digests for key in shown):
            return None
        words = "the API key is wrong" if shown else "an API key is needed: send Authorization: Bearer KEY"
        code = "invalid_api_key" if shown else "missing_api_key"
        return RequestRefused(words, status=401, kind="authentication_error", code=code)


class EngineAccess:
    """What engines are shown of a client's header, and of the router itself.

    Without a worker key and without keys of clients, engines see the client's own ``authorization``.

    Args:
        worker_key: shown to every engine in the place of whatever the client showed.
        has_client_keys: the router checks clients' keys, so that engines get none of them.
    """

    def __init__(self, worker_key: bytes | None, *, has_client_keys: bool) -> None:
        is_replaced = has_client_keys or worker_key is not None
        self._dropped = NOT_FORWARDED | KEY_HEADERS if is_replaced else NOT_FORWARDED
        self.fields = [] if worker_key is None else [(b"authorization", b"Bearer " + worker_key)]
        """What requests of the router's own carry: health checks among them."""
        self._lines = field_lines(self.fields)

    def forwarded_lines(self, request: HttpRequest) -> bytes:
        """The header fields that an engine gets with a client's request, as they are written."""
        return field_lines(forwarded_headers(request, self._dropped)) + self._lines


def client_keys(spec: RouterSpec) -> ClientKeys | None:
    """The keys of clients; None where none are asked for.

    Raises:
        ConfigError: the file cannot be used.
    """
    return None if spec.api_key_file is None else ClientKeys(read_keys(spec.api_key_file, "router.api_key_file"))


def admin_key(spec: RouterSpec) -> bytes | None:
    """The key of the admin routes; None where there is none.

    Raises:
        ConfigError: the file cannot be used.
    """
    return None if spec.admin_key_file is None else read_key(spec.admin_key_file, "router.admin_key_file")


def engine_access(spec: RouterSpec) -> EngineAccess:
    """What engines are shown.

    Raises:
        ConfigError: the file of the worker key cannot be used.
    """
    path = spec.worker_api_key_file
    worker_key = None if path is None else read_key(path, "router.worker_api_key_file")
    return EngineAccess(worker_key, has_client_keys=spec.api_key_file is not None)


def bearer(value: bytes | None) -> bytes | None:
    """The key in the value of ``authorization``; None where there is none."""
    scheme, _, key = (value or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None
