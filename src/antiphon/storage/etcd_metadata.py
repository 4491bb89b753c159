"""An etcd with users or TLS as the metadata server of a Mooncake store.

Mooncake's own client of etcd knows neither users nor client certificates. So it is given the URL of a small HTTP
server in this process, which speaks Mooncake's HTTP metadata protocol (GET, PUT and DELETE of ``?key=``) and keeps each
value in etcd under the same key as Mooncake's own client would, through etcd's JSON gateway (etcd 3.4 and later).

Always true:

- The server listens on loopback only, and answers only under a path that cannot be guessed: a user of the machine who
  does not know it reaches nothing in etcd. The path is no secret from the child that is told it.
- It serves ``REQUESTS_MAX`` requests at once, each for ``timeout_s`` at each member of etcd at most; its values are at
  most ``VALUE_MAX_BYTES``.
- A password is in memory and in requests to etcd only, in no message and no log.

It keeps nothing itself: with etcd down, a request fails, and what Mooncake does then is Mooncake's matter.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import secrets
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from antiphon.core.errors import ConfigError, TierUnavailable

__all__ = ["EtcdAccess", "EtcdMetadata"]

REQUESTS_MAX: Final = 16
VALUE_MAX_BYTES: Final = 8 << 20
_DRAINED_MAX_BYTES: Final = 4_096
"""Of a request that is refused: a client that is still sending would not see the answer."""
_UNAUTHENTICATED: Final = 401
_STALE: Final = ("auth token", "revision of auth store is old", "user name is empty")
"""What etcd says of a token that another life of it gave, or that was given before users or roles changed."""


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How etcd is reached.

    Args:
        endpoints: host and port of each member.
        is_tls: whether it is spoken to over TLS.
        user, password: empty for none.
        ca_file: PEM certificates to check it against; empty for those of the system.
        cert_file, key_file: PEM certificate and key to be known by; empty for none.
        timeout_s: of a request to one member.
    """

    endpoints: Sequence[str]
    is_tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    timeout_s: float = 2.0


class _Refused(Exception):
    """etcd has answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Etcd:
    """Calls of etcd's JSON gateway, each on a connection of its own: they are few.

    Args:
        access: to it.

    Raises:
        ConfigError: a certificate or key cannot be used.
    """

    def __init__(self, access: EtcdAccess) -> None:
        self._access = access
        self._tls = _tls_of(access) if access.is_tls else None
        self._lock = threading.Lock()
        self._token = ""

    def get(self, key: bytes) -> bytes | None:
        found = self._call("/v3/kv/range", {"key": _text(key)}).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")) if found else None

    def put(self, key: bytes, value: bytes) -> None:
        self._call("/v3/kv/put", {"key": _text(key), "value": _text(value)})

    def delete(self, key: bytes) -> bool:
        return int(self._call("/v3/kv/deleterange", {"key": _text(key)}).get("deleted", 0)) > 0

    def _call(self, path: str, body: dict[str, str]) -> dict[str, Any]:
        """Raises TierUnavailable where no member answers, or etcd refuses."""
        token = self._token_now("")
        try:
            return self._ask(path, body, token)
        except _Refused as error:
            is_stale = error.status == _UNAUTHENTICATED or any(words in str(error) for words in _STALE)
            if not (token and is_stale):
                raise TierUnavailable(f"etcd answers {error.status}: {error}") from None
        try:
            return self._ask(path, body, self._token_now(token))
        except _Refused as error:
            raise TierUnavailable(f"etcd answers {error.status}: {error}") from None

    def _token_now(self, refused: str) -> str:
        """A token that is not the refused one; empty without a user."""
        if not self._access.user:
            return ""
        with self._lock:
            if not self._token or self._token == refused:
                self._token = ""
                told = {"name": self._access.user, "password": self._access.password}
                try:
                    self._token = str(self._ask("/v3/auth/authenticate", told, "")["token"])
                except _Refused as error:
                    raise TierUnavailable(f"etcd does not let {self._access.user} in: {error}") from None
            return self._token

    def _ask(self, path: str, body: dict[str, str], token: str) -> dict[str, Any]:
        """The answer of the first member that gives one."""
        data = json.dumps(body)
        headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
        reason = "it has no members"
        for endpoint in self._access.endpoints:
            link = self._connection(endpoint)
            try:
                link.request("POST", path, data, headers)
                answer = link.getresponse()
                content = answer.read(2 * VALUE_MAX_BYTES)
                found = json.loads(content) if answer.status == 200 else {}
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = f"{endpoint}: {str(error) or type(error).__name__}"
                continue
            finally:
                link.close()
            if answer.status == 200:
                return dict(found)
            if answer.status < 500:
                raise _Refused(answer.status, _said(content) or answer.reason)
            reason = f"{endpoint}: {_said(content) or answer.reason}"
        raise TierUnavailable(f"etcd does not answer ({reason})")

    def _connection(self, endpoint: str) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(endpoint, timeout=self._access.timeout_s)
        return http.client.HTTPSConnection(endpoint, timeout=self._access.timeout_s, context=self._tls)


class EtcdMetadata:
    """The metadata server. It serves from its construction until ``close``.

    Args:
        access: to etcd. Nothing is connected to yet.

    Raises:
        ConfigError: a certificate or key cannot be used.
    """

    def __init__(self, access: EtcdAccess) -> None:
        self._server = _Server(_Etcd(access), f"/{secrets.token_urlsafe(24)}/metadata", access.timeout_s)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="antiphon-etcd-metadata", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """For Mooncake's client. Whoever knows it can use etcd as this process can."""
        return f"http://127.0.0.1:{self._server.server_address[1]}{self._server.path}"

    def close(self) -> None:
        """Stops listening. May be called twice."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, etcd: _Etcd, path: str, timeout_s: float) -> None:
        self.etcd = etcd
        self.path = path
        self.request_timeout_s = timeout_s
        self._free = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Longer than a client that says nothing can hold its place.
        if not self._free.acquire(timeout=1.5 * self.request_timeout_s):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # supervised: raised again; without a thread nothing else would release it
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left: nobody is told."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.request_timeout_s)

    def do_GET(self) -> None:
        self._serve(lambda etcd, key: etcd.get(key))

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self._is_known():
            self.rfile.read(min(int(length), _DRAINED_MAX_BYTES) if length.isdecimal() else 0)
            self._answer(404, b"no such place")
            return
        if not length.isdecimal() or int(length) > VALUE_MAX_BYTES:
            self._answer(413, b"no length, or too long")
            return
        value = self.rfile.read(int(length))
        if len(value) != int(length):
            self._answer(400, b"cut off")  # its sender has ended: half a value would look like a whole one
            return

        def put(etcd: _Etcd, key: bytes) -> bytes:
            etcd.put(key, value)
            return b"metadata updated"

        self._serve(put)

    def do_DELETE(self) -> None:
        self._serve(lambda etcd, key: b"metadata deleted" if etcd.delete(key) else None)

    def _serve(self, call: Any) -> None:
        """Answers with what ``call`` returns: the content, or None for 404."""
        (key, *_) = parse_qs(urlsplit(self.path).query).get("key", [""])
        if not self._is_known() or not key:
            self._answer(404, b"no such place")
            return
        try:
            found = call(self.server.etcd, key.encode())
        except TierUnavailable as error:
            self._answer(503, error.message.encode())
            return
        self._answer(200, found) if found is not None else self._answer(404, b"metadata not found")

    def _is_known(self) -> bool:
        """Whether the client knows the path."""
        return secrets.compare_digest(urlsplit(self.path).path.encode(), self.server.path.encode())

    def _answer(self, status: int, content: bytes) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Nothing is logged: the path is not for a log."""


def _said(content: bytes) -> str:
    """The message of an answer that is an error: JSON with one, or text."""
    with contextlib.suppress(ValueError, AttributeError):
        told = json.loads(content)
        return str(told.get("message") or told.get("error") or "")
    return content[:200].decode(errors="replace").strip()


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _tls_of(access: EtcdAccess) -> ssl.SSLContext:
    place = access.ca_file
    try:
        context = ssl.create_default_context(cafile=access.ca_file or None)
        if access.cert_file:
            place = f"{access.cert_file} with {access.key_file}"
            # A key with a passphrase would ask for it at the terminal.
            context.load_cert_chain(access.cert_file, access.key_file, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"{place} cannot be used: {error}",
            field="metadata_ca_file" if place == access.ca_file else "metadata_cert_file",
            remedy="name PEM files that can be read; a key has no passphrase",
        ) from error
    return context
