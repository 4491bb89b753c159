"""Who may use the router, and what engines are shown: keys of clients, and the key of the router itself at its engines.

Invariants: a key that the router checks reaches no engine, no log and no answer. What a check costs does not depend on
how much of a key is right, nor on whether it is known: it is a hash with a secret of this process, and a number of
comparisons that is the same for every key.

Which routes ask for a key is decided in ``app``; who may use the admin routes, in ``admin``; what a tenant is, in
``tenants``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from hashlib import blake2b
from hmac import compare_digest
from typing import Final

from antiphon.config.key_files import read_key, read_keys
from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import RequestRefused
from antiphon.router.headers import NOT_FORWARDED, forwarded_headers
from antiphon.transport.http.message import HttpRequest, field_lines

CHALLENGE = b"www-authenticate: Bearer\r\n"
KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))
"""Where a client shows its key; the second is the habit of clients of ``/v1/messages``."""

_KEY_MAX_BYTES: Final = 4096
_DIGEST_BYTES: Final = 16
_ONE_ROW_MAX: Final = 16
"""Up to so many keys, each is compared with all."""

Compare = Callable[[bytes, bytes], bool]


class KeyRing:
    """Keys as digests, each with the number of its owner.

    A digest is compared with every digest of its row, and never fewer. Which row that is follows from the digest, which
    nobody can foretell; all rows have the same length.

    Args:
        owned: keys with the number of their owner, 1 and up. A key has one owner.
        compare: whether two digests are equal, in a time that does not depend on where they differ.
    """

    def __init__(self, owned: Iterable[tuple[bytes, int]], compare: Compare = compare_digest) -> None:
        self._secret = secrets.token_bytes(32)
        self._compare = compare
        owners: dict[bytes, int] = {}
        for key, owner in owned:
            assert key and owner >= 1
            assert owners.setdefault(self._digest(key), owner) == owner, "a key has one owner"
        assert owners, "a ring has a key"
        num_rows = 1
        while num_rows * _ONE_ROW_MAX < len(owners) * 8 and len(owners) > _ONE_ROW_MAX:
            num_rows *= 2
        self._mask = num_rows - 1
        self._rows: list[list[tuple[bytes, int]]] = [[] for _ in range(num_rows)]
        for digest, owner in owners.items():
            self._rows[self._row(digest)].append((digest, owner))
        length = max(map(len, self._rows))
        for row in self._rows:
            row += [(secrets.token_bytes(_DIGEST_BYTES), 0) for _ in range(length - len(row))]

    def owner(self, key: bytes) -> int:
        """The number of the owner of ``key``; 0 where it is not known."""
        digest = self._digest(key if len(key) <= _KEY_MAX_BYTES else b"")
        compare, found = self._compare, 0
        for known, owner in self._rows[self._row(digest)]:
            found += owner * int(compare(digest, known))
        return found

    def _row(self, digest: bytes) -> int:
        return int.from_bytes(digest[:4], "little") & self._mask

    def _digest(self, key: bytes) -> bytes:
        # Whoever times the look-up learns something of a digest that cannot be foretold, and nothing of a key.
        return blake2b(key, key=self._secret, digest_size=_DIGEST_BYTES).digest()


class ClientKeys:
    """The keys of clients.

    Args:
        keys: either the keys, or keys with the number of their owner: see :class:`KeyRing`.
        compare: see there.
    """

    def __init__(self, keys: Iterable[bytes | tuple[bytes, int]], compare: Compare = compare_digest) -> None:
        self.ring = KeyRing([(key, 1) if isinstance(key, bytes) else key for key in keys], compare)

    def owner(self, request: HttpRequest) -> int:
        """The number of the owner of the key that the client shows; 0 where none is known. Of two keys with different
        owners, that of ``authorization`` counts."""
        first, found = request.first, 0
        for key in (bearer(first.get(b"authorization")), first.get(b"x-api-key")):
            if key:
                owner = self.ring.owner(key.strip())
                found = found or owner
        return found

    def refusal(self, request: HttpRequest) -> RequestRefused | None:
        """Why the client may not be served: 401; None if it shows a key."""
        return None if self.owner(request) else unknown_key(request)


def unknown_key(request: HttpRequest) -> RequestRefused:
    """What a client is told that shows no key that is known: 401."""
    first = request.first
    is_shown = bool(bearer(first.get(b"authorization")) or first.get(b"x-api-key"))
    words = "the API key is wrong" if is_shown else "an API key is needed: send Authorization: Bearer KEY"
    code = "invalid_api_key" if is_shown else "missing_api_key"
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

    def trace(self) -> None:
        """From now on engines get a ``traceparent`` of the router's own, and not the client's."""
        self._dropped = self._dropped | {b"traceparent"}

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
    return EngineAccess(worker_key, has_client_keys=spec.api_key_file is not None or spec.tenants_file is not None)


def bearer(value: bytes | None) -> bytes | None:
    """The key in the value of ``authorization``; None where there is none."""
    scheme, _, key = (value or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None
