"""Mooncake's metadata in an etcd with users, TLS and client certificates: what passes, and what does not.

Goal: values go to etcd and back under Mooncake's own keys; who is not let in is told so, with no password in any
message; a member that is down is passed by; nobody reaches etcd through the server who does not know its path. Method:
a real etcd, spoken to as Mooncake's client does, over HTTP.
"""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError
from antiphon.storage import etcd_metadata
from antiphon.storage.etcd_metadata import REQUESTS_MAX, VALUE_MAX_BYTES, EtcdAccess, EtcdMetadata
from tests.storage.secured_etcd import PASSWORD, USER, Certificates, SecuredEtcd
from tests.storage.servers import Take

pytestmark = pytest.mark.process
KEY = "mooncake/ram/127.0.0.1:1234 a&b=c"
KINDS = ("user", "tls", "certificate", "all")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("pem"))


Started = tuple[SecuredEtcd, EtcdAccess]


PATIENCE_S = 10.0
"""A password is checked slowly, by design; more so on a busy machine."""


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, adopted: set[int], take_ports: Take, certificates: Certificates
) -> Iterator[Callable[[str], Started]]:
    made: dict[str, Started] = {}

    def started(kind: str) -> Started:
        if kind not in made:
            has_user, has_tls, wants = kind in ("user", "all"), kind != "user", kind in ("certificate", "all")
            service = SecuredEtcd(
                tmp_path_factory.mktemp("etcd"),
                (adopted, take_ports),
                certificates if has_tls else None,
                has_user=has_user,
                wants_certificate=wants,
            )
            service.start()
            certificate, key = certificates.files("client") if wants else ("", "")
            access = EtcdAccess(
                [f"127.0.0.1:{service.port}"],
                is_tls=has_tls,
                user=USER if has_user else "",
                password=PASSWORD if has_user else "",
                ca_file=str(certificates.authority) if has_tls else "",
                cert_file=certificate,
                key_file=key,
                timeout_s=PATIENCE_S,
            )
            made[kind] = service, access
        return made[kind]

    yield started
    for service, _ in made.values():
        service.kill()


@pytest.fixture
def serve() -> Iterator[Callable[[EtcdAccess], EtcdMetadata]]:
    made: list[EtcdMetadata] = []

    def served(access: EtcdAccess) -> EtcdMetadata:
        made.append(EtcdMetadata(access))
        return made[-1]

    yield served
    for each in made:
        each.close()


def call(url: str, method: str = "GET", value: bytes | None = None, key: str = KEY) -> tuple[int, bytes]:
    request = urllib.request.Request(f"{url}?key={urllib.parse.quote(key, safe='')}", value, method=method)
    try:
        with urllib.request.urlopen(request, timeout=4 * PATIENCE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("kind", KINDS)
def test_values_go_to_etcd_and_back(
    kind: str, start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]
) -> None:
    service, access = start(kind)
    url = serve(access).url
    value = bytes(range(256)) * 300
    assert call(url) == (404, b"metadata not found")
    assert call(url, "DELETE")[0] == 404
    assert call(url, "PUT", value)[0] == 200
    assert call(url) == (200, value)
    assert KEY.encode() in service.all_keys()
    assert call(serve(access).url) == (200, value), "another node sees it"
    assert call(url, "PUT", b"")[0] == 200
    assert call(url) == (200, b"")
    assert call(url, "DELETE")[0] == 200
    assert KEY.encode() not in service.all_keys()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("user", {"user": "", "password": ""}),
        ("user", {"password": "another-word"}),
        ("user", {"user": "nobody"}),
        ("tls", {"is_tls": False}),
        ("tls", {"ca_file": ""}),
        ("certificate", {"cert_file": "", "key_file": ""}),
        ("all", {"cert_file": "", "key_file": ""}),
        ("all", {"password": "another-word"}),
        ("all", {"cert_file": "server.pem", "key_file": "server.key"}),
    ],
)
def test_who_is_not_let_in_is_told(
    kind: str, change: dict[str, object], start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]
) -> None:
    """With users, etcd refuses a certificate with a common name, as that of its server has."""
    service, access = start(kind)
    folder = Path(access.ca_file).parent
    before = service.all_keys()
    change = {name: str(folder / str(value)) if value and "file" in name else value for name, value in change.items()}
    access = replace(access, **change)  # type: ignore[arg-type]
    status, said = call(serve(access).url, "PUT", b"x")
    assert status == 503
    assert said.startswith(b"etcd ")
    for password in (PASSWORD, "another-word"):
        assert password.encode() not in said + repr(access).encode()
    assert service.all_keys() == before


def test_a_user_reaches_only_what_etcd_lets_it(
    start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]
) -> None:
    status, said = call(serve(start("user")[1]).url, "PUT", b"x", "elsewhere/key")
    assert (status, b"permission denied" in said) == (503, True)


def test_a_token_that_etcd_has_forgotten_is_renewed(
    start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]
) -> None:
    """Simple tokens end with the life of etcd that gave them."""
    service, access = start("all")
    url = serve(access).url
    assert call(url, "PUT", b"x")[0] == 200
    service.kill()
    status, said = call(url)
    assert (status, said[:20]) == (503, b"etcd does not answer")
    service.restore()
    assert call(url) == (200, b"x")
    assert call(url, "DELETE")[0] == 200


@pytest.mark.parametrize("words", ["etcdserver: revision of auth store is old", "etcdserver: invalid auth token"])
def test_a_token_of_before_a_change_of_users_is_renewed(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter(("first", "second"))
    seen: list[tuple[str, str]] = []

    def ask(etcd: object, path: str, body: dict[str, str], token: str) -> dict[str, object]:
        seen.append((path, token))
        if path == "/v3/auth/authenticate":
            return {"token": next(given)}
        if token == "first":
            raise etcd_metadata._Refused(400, words)
        return {}

    monkeypatch.setattr(etcd_metadata._Etcd, "_ask", ask)
    assert etcd_metadata._Etcd(EtcdAccess(["127.0.0.1:1"], user="u", password="p")).get(b"key") is None
    assert [token for path, token in seen if path == "/v3/kv/range"] == ["first", "second"]


def test_a_value_that_is_cut_off_is_not_kept(
    start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]
) -> None:
    served = serve(start("user")[1]).url
    url = urllib.parse.urlsplit(served)
    with socket.create_connection((url.hostname, url.port)) as client:
        head = f"PUT {url.path}?key={urllib.parse.quote(KEY, safe='')} HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf"
        client.sendall(head.encode())
        client.shutdown(socket.SHUT_WR)
        assert b" 400 " in client.recv(1000)
    assert call(served)[0] == 404


def test_a_hung_etcd_costs_its_timeout(start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]) -> None:
    service, access = start("user")
    hasty, patient = serve(replace(access, timeout_s=1.0)).url, serve(access).url
    service.hang()
    try:
        start_s = time.monotonic()
        assert call(hasty)[0] == 503
        assert 0.9 < time.monotonic() - start_s < PATIENCE_S
    finally:
        service.go_on()
    assert call(patient)[0] == 404


def test_a_member_that_is_down_is_passed_by(
    start: Callable[[str], Started], serve: Callable[..., EtcdMetadata], take_ports: Take
) -> None:
    _, access = start("all")
    (nobody,) = take_ports(1)
    url = serve(replace(access, endpoints=[f"127.0.0.1:{nobody}", *access.endpoints])).url
    assert call(url, "PUT", b"x")[0] == 200
    assert call(url, "DELETE")[0] == 200


def test_nobody_reaches_etcd_who_does_not_know_the_path(
    start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]
) -> None:
    _, access = start("user")
    one, other = serve(access).url, serve(access).url
    port = urllib.parse.urlsplit(one).port
    wrong = [f"http://127.0.0.1:{port}/metadata", f"http://127.0.0.1:{port}{urllib.parse.urlsplit(other).path}"]
    for url in wrong:
        assert call(url, "PUT", b"x") == (404, b"no such place")
    assert call(one)[0] == 404
    assert call(f"http://127.0.0.1:{port}/%ff%00")[0] == 404


def test_what_is_too_long_is_refused(start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]) -> None:
    url = urllib.parse.urlsplit(serve(start("user")[1]).url)
    with socket.create_connection((url.hostname, url.port)) as client:
        head = f"PUT {url.path}?key=mooncake/x HTTP/1.1\r\nContent-Length: {VALUE_MAX_BYTES + 1}\r\n\r\n"
        client.sendall(head.encode())
        assert b" 413 " in client.recv(1000)


def test_clients_that_say_nothing_hold_it_up_for_a_moment_only(
    start: Callable[[str], Started], serve: Callable[..., EtcdMetadata]
) -> None:
    url = serve(replace(start("user")[1], timeout_s=2.0)).url
    parts = urllib.parse.urlsplit(url)
    silent = [socket.create_connection((parts.hostname, parts.port)) for _ in range(REQUESTS_MAX)]
    try:
        start_s = time.monotonic()
        assert call(url)[0] == 404
        assert time.monotonic() - start_s < PATIENCE_S
    finally:
        for client in silent:
            client.close()


def test_files_that_cannot_be_used(tmp_path: Path, certificates: Certificates) -> None:
    certificate, key = certificates.files("client")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    access = EtcdAccess(["127.0.0.1:1"], is_tls=True, ca_file=str(certificates.authority))
    num_threads = threading.active_count()
    for change, field in (
        ({"ca_file": str(tmp_path / "none.pem")}, "metadata_ca_file"),
        ({"ca_file": str(wrong)}, "metadata_ca_file"),
        ({"cert_file": str(wrong), "key_file": key}, "metadata_cert_file"),
        ({"cert_file": certificate, "key_file": certificates.files("server")[1]}, "metadata_cert_file"),
    ):
        with pytest.raises(ConfigError) as told:
            EtcdMetadata(replace(access, **change))  # type: ignore[arg-type]
        assert told.value.field == field
    assert threading.active_count() == num_threads
