"""Keys of clients, the key that engines are shown, and what a public bind leaves closed."""

from __future__ import annotations

import json
from hmac import compare_digest
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ConfigError, RequestRefused
from antiphon.router.app import Router
from antiphon.router.keys import ClientKeys, EngineAccess, KeyRing, admin_key, client_keys, engine_access
from antiphon.router.routes import ROUTES
from antiphon.transport.http.message import HttpRequest
from tests.router.scripted import (
    Client,
    Reply,
    ScriptedEngine,
    connected,
    counted,
    engine,
    prefills,
    routing,
    streams,
    until,
)

CLIENT_KEY, OTHER_KEY, WORKER_KEY, ADMIN_KEY = "sk-client", "sk-other-é", "sk-worker", "sk-admin"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The knobs of a router with every kind of key."""
    (tmp_path / "clients").write_text(f"# who may\n{CLIENT_KEY}\n\n  {OTHER_KEY}  \n")
    (tmp_path / "worker").write_text(f"# the engines'\n{WORKER_KEY}\n")
    (tmp_path / "admin").write_text(ADMIN_KEY)
    names = {"api_key_file": "clients", "worker_api_key_file": "worker", "admin_key_file": "admin"}
    return {knob: str(tmp_path / name) for knob, name in names.items()}


async def say(client: Client, line: str, *fields: str, body: bytes = b"") -> Reply:
    """One request with these header fields, and its answer."""
    head = [f"{line} HTTP/1.1", "host: x", f"content-length: {len(body)}", *fields, "", ""]
    client.writer.write("\r\n".join(head).encode() + body)
    return await client.reply()


def fields_of(head: bytes) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in head.decode("latin-1").split("\r\n")[1:-2]:
        name, _, value = line.partition(": ")
        found.setdefault(name.lower(), []).append(value)
    return found


def shown(engine: ScriptedEngine) -> list[dict[str, list[str]]]:
    """The header fields of every request that an engine got, health checks included."""
    return [fields_of(head) for head in engine.heads]


POST = "POST /v1/completions"
BODY = b'{"prompt":"x"}'


# ---- clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        f"authorization: Bearer {CLIENT_KEY}",
        f"Authorization: bearer   {CLIENT_KEY} ",
        f"x-api-key: {CLIENT_KEY}",
        f"authorization: Bearer {OTHER_KEY}",
    ],
)
async def test_a_client_with_a_key_is_served_and_its_key_goes_no_further(files: dict[str, str], field: str) -> None:
    knobs = {"api_key_file": files["api_key_file"]}
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], **knobs) as router:
        async with connected(router) as client:
            reply = await say(client, POST, field, "x-other: kept", body=BODY)
        assert reply.status == 200
        for each in (p, d):
            assert shown(each)[-1]["x-other"] == ["kept"]
            assert all("authorization" not in head and "x-api-key" not in head for head in shown(each))
            assert not any(b"sk-" in head for head in each.heads)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ([], "missing_api_key"),
        (["authorization: Bearer "], "missing_api_key"),
        ([f"authorization: Basic {CLIENT_KEY}"], "missing_api_key"),
        ([f"authorization: {CLIENT_KEY}"], "missing_api_key"),
        (["x-api-key:"], "missing_api_key"),
        (["authorization: Bearer sk-wrong"], "invalid_api_key"),
        ([f"authorization: Bearer {CLIENT_KEY}x"], "invalid_api_key"),
        ([f"authorization: Bearer {CLIENT_KEY[:-1]}"], "invalid_api_key"),
        ([f"authorization: Bearer {CLIENT_KEY} {CLIENT_KEY}"], "invalid_api_key"),
        ([f"authorization: Bearer {ADMIN_KEY}"], "invalid_api_key"),
        ([f"authorization: Bearer {WORKER_KEY}"], "invalid_api_key"),
        (["authorization: Bearer # who may"], "invalid_api_key"),
        (["x-api-key: " + "x" * 10_000], "invalid_api_key"),
    ],
)
async def test_a_client_without_a_key_is_refused(files: dict[str, str], fields: list[str], code: str) -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], **files) as router:
        async with connected(router) as client:
            reply = await say(client, POST, *fields, body=BODY)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            error = json.loads(reply.body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("authentication_error", code)
            assert b"sk-" not in reply.body
            # The connection is as good as before.
            assert (await say(client, POST, f"x-api-key: {CLIENT_KEY}", body=BODY)).status == 200
        assert counted(router, "key_refusals_total", code=code) == 1
        assert len(p.seen) == len(d.seen) == 1


async def test_which_routes_need_a_key(files: dict[str, str]) -> None:
    async with (
        engine(prefills) as p,
        engine(streams) as d,
        routing([p], [d], **files) as router,
        connected(router) as client,
    ):
        for path in ("/health", "/liveness", "/readiness"):
            assert (await say(client, f"GET {path}")).status == 200, path
        for line in ("GET /v1/models", "GET /nothing", "POST /nothing", "DELETE /v1/completions"):
            assert (await say(client, line)).status == 401, line
        for route in ROUTES:
            assert (await say(client, f"POST {route}", body=BODY)).status == 401, route
        for path in ("/metrics", "/status", "/receipts", "/receipts/0"):
            reply = await say(client, f"GET {path}", f"authorization: Bearer {CLIENT_KEY}")
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), path
            answer = await say(client, f"GET {path}", f"authorization: Bearer {ADMIN_KEY}")
            assert answer.status == (404 if path.endswith("0") else 200), path
        assert (p.seen, d.seen) == ([], [])


async def test_a_refusal_has_the_shape_of_the_api_that_was_asked(files: dict[str, str]) -> None:
    async with engine(streams) as d, routing([], [d], **files) as router, connected(router) as client:
        answer = json.loads((await say(client, "POST /v1/messages", body=BODY)).body)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "authentication_error"


def body_bytes(router: Router) -> int:
    """What has arrived of bodies."""
    return sum(connection._body_bytes for connection in router.server._connections)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_what_a_client_without_a_key_sends_takes_no_memory(files: dict[str, str], is_chunked: bool) -> None:
    size = 300_000
    framing = "transfer-encoding: chunked" if is_chunked else f"content-length: {size + 14}"
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], **files) as router:
        for key, status in (("x-api-key: wrong", 401), (f"x-api-key: {CLIENT_KEY}", 200)):
            async with connected(router) as client:
                head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{key}\r\n{framing}\r\n\r\n".encode()
                body = b'{"prompt":"%b"}' % (b"x" * size)
                sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body + b" "
                client.writer.write(head + sent[:-9])
                await client.writer.drain()
                await until(lambda: body_bytes(router) > size, "all but the end is here")
                assert (router.server.held_bytes > size) is (status == 200)
                client.writer.write(sent[-9:])
                assert (await client.reply()).status == status
                client.get("/health")
                assert (await client.reply()).status == 200, "the connection is in step"
        assert (len(p.seen), len(d.seen)) == (1, 1)
        assert len(d.seen[0].body) >= size


def request_with(*fields: tuple[bytes, bytes]) -> HttpRequest:
    return HttpRequest("POST", b"/", "1.1", list(fields))


def test_whatever_is_no_key_is_none() -> None:
    keys = ClientKeys([b"a" * 20, b"b"])

    def is_allowed(*fields: tuple[bytes, bytes]) -> bool:
        return keys.refusal(request_with(*fields)) is None

    assert is_allowed((b"x-api-key", b"b"))
    assert is_allowed((b"authorization", b"Bearer wrong"), (b"x-api-key", b"b")), "either will do"
    assert not is_allowed((b"x-api-key", b"c"), (b"x-api-key", b"b")), "the first one counts"
    assert not is_allowed((b"x-api-key", b""))
    assert not is_allowed((b"authorization", b"Bearer " + b"a" * 19))


def digests_of(ring: KeyRing) -> set[bytes]:
    return {digest for row in ring._rows for digest, _ in row}


def test_keys_are_held_as_digests_that_another_process_cannot_make() -> None:
    keys = [b"a" * 20, b"b"]
    ring, other = KeyRing([(key, 1) for key in keys]), KeyRing([(key, 1) for key in keys])
    assert not any(b"a" * 20 in digest for digest in digests_of(ring))
    assert digests_of(ring).isdisjoint(digests_of(other))


class Counting:
    """Compares as the router does, and keeps what it was given and how often they were equal."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, bytes]] = []
        self.num_equal = 0

    def __call__(self, one: bytes, other: bytes) -> bool:
        self.calls.append((one, other))
        self.num_equal += one == other
        return compare_digest(one, other)


@pytest.mark.parametrize("num_keys", [1, 2, 16, 17, 1000])
def test_a_key_that_is_known_and_one_that_is_not_take_as_many_comparisons(num_keys: int) -> None:
    keys = [b"sk-%d" % number for number in range(num_keys)]
    compare = Counting()
    ring = KeyRing([(key, number) for number, key in enumerate(keys, 1)], compare)
    assert compare.calls == [], "what comparisons cost does not show at the start"
    wrong = [key + b"x" for key in keys] + [key[:-1] for key in keys] + [b"", b"\0", b"x" * 5000]
    counts = set()
    for key in keys + wrong:
        before, equal_before = len(compare.calls), compare.num_equal
        owner = ring.owner(key)
        is_known = key in keys
        assert owner == (keys.index(key) + 1 if is_known else 0)
        assert compare.num_equal - equal_before == is_known
        calls = compare.calls[before:]
        counts.add(len(calls))
        assert len({one for one, _ in calls}) == 1, "each time the digest of what was shown"
        assert all(len(one) == len(other) == 16 for one, other in calls)
    assert len(counts) == 1, "none ends early, wherever in its row a key stands"
    if num_keys <= 16:
        assert counts == {num_keys}, "with every key"
    else:
        assert max(counts) <= 16, "and a look-up among many stays short"


def test_a_request_with_a_known_key_and_one_with_an_unknown_take_as_many_comparisons() -> None:
    compare = Counting()
    keys = ClientKeys([(b"one", 1), (b"two", 2), (b"three", 3)], compare)
    expected = {b"one": 1, b"two": 2, b"three": 3, b"four": 0, b"x" * 9999: 0}
    for key, owner in expected.items():
        for field in ((b"authorization", b"Bearer " + key), (b"x-api-key", key)):
            before = len(compare.calls)
            assert keys.owner(request_with(field)) == owner
            assert len(compare.calls) - before == 3
    before = len(compare.calls)
    assert keys.owner(request_with((b"authorization", b"Bearer two"), (b"x-api-key", b"one"))) == 2
    assert len(compare.calls) - before == 6, "the second is looked up although the first is known"
    assert keys.owner(request_with((b"authorization", b"Bearer no"), (b"x-api-key", b"one"))) == 1


def test_a_key_has_one_owner() -> None:
    with pytest.raises(AssertionError):
        KeyRing([(b"a", 1), (b"a", 2)])
    assert KeyRing([(b"a", 1), (b"a", 1)]).owner(b"a") == 1


# ---- engines ---------------------------------------------------------------------------------------------------------


async def test_engines_are_shown_the_worker_key_health_checks_included(files: dict[str, str]) -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], **files) as router:
        async with connected(router) as client:
            key = f"authorization: Bearer {CLIENT_KEY}"
            assert (await say(client, POST, key, "x-api-key: mine", body=BODY)).status == 200
            assert (await say(client, "GET /v1/models", key)).status == 200
        for each in (p, d):
            assert len(shown(each)) >= 2
            assert all(head["authorization"] == [f"Bearer {WORKER_KEY}"] for head in shown(each))
            assert not any("x-api-key" in head for head in shown(each))
        assert {head.split(b" ")[1] for head in d.heads} == {b"/health", b"/v1/completions", b"/v1/models"}


async def test_without_keys_a_clients_authorization_goes_on_as_it_came() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router, connected(router) as client:
        assert (await say(client, POST, "authorization: Basic  abc", "x-api-key: k", body=BODY)).status == 200
        for each in (p, d):
            assert "authorization" not in shown(each)[0], "a health check shows nothing"
            assert [value.strip() for value in shown(each)[-1]["authorization"]] == ["Basic  abc"]
            assert shown(each)[-1]["x-api-key"] == ["k"]


def test_a_worker_key_stands_once_whatever_the_client_says() -> None:
    access = EngineAccess(b"w", has_client_keys=False)
    fields = [(b"connection", b"authorization"), (b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")]
    lines = access.forwarded_lines(HttpRequest("POST", b"/", "1.1", fields))
    assert lines == b"authorization: Bearer w\r\n"


async def test_trace_context_reaches_both_engines_as_it_came() -> None:
    sent = [
        "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate: rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "tracestate: other=1",
        "baggage: userId=Am%C3%A9lie;prop=1,serverNode=DF%2028",
    ]
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router, connected(router) as client:
        assert (await say(client, POST, *sent, body=BODY)).status == 200
        for each in (p, d):
            got = [line for line in each.heads[-1].decode().split("\r\n") if line.split(":")[0] in _TRACE_FIELDS]
            assert got == sent
        assert router.receipts.latest(1)[0].as_dict()["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"


_TRACE_FIELDS = ("traceparent", "tracestate", "baggage")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_key_files_that_cannot_be_used(tmp_path: Path, files: dict[str, str]) -> None:
    assert client_keys(RouterSpec()) is None
    assert admin_key(RouterSpec()) is None
    assert engine_access(RouterSpec()).fields == []
    readers: dict[str, Any] = {
        "api_key_file": client_keys,
        "worker_api_key_file": engine_access,
        "admin_key_file": admin_key,
    }
    for name, read in readers.items():
        for content, words in (
            (None, "cannot be read"),
            (b"", "is empty"),
            (b"# x\n \n", "is empty"),
            (b"a b", "no key"),
        ):
            path = tmp_path / f"{name}-{words[:2]}-{content!r}"[:60]
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(ConfigError, match=words) as caught:
                read(RouterSpec.model_validate({name: str(path)}))
            assert caught.value.field == f"router.{name}"
            assert caught.value.remedy
    with pytest.raises(ConfigError, match="has 2 keys"):
        admin_key(RouterSpec(admin_key_file=files["api_key_file"]))


# ---- a public bind without keys --------------------------------------------------------------------------------------


class FromElsewhere:
    """A responder whose client is on another machine."""

    peer_is_loopback = False


@pytest.mark.interpreted  # with a stand-in for a responder
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "example.com"])
async def test_a_public_bind_without_keys_leaves_the_admin_routes_on_loopback(host: str) -> None:
    async with engine(streams) as d, routing([], [d], host="0.0.0.0") as router:
        request = HttpRequest("GET", b"/metrics", "1.1", [(b"host", host.encode())])
        with pytest.raises(RequestRefused) as refused:
            router.admin.check_access(request, cast("Any", FromElsewhere()))
        assert refused.value.status == 403
        async with connected(router) as client:
            client.send()
            assert (await client.reply()).status == 200, "inference is for everybody"
            client.writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert (await client.reply()).status == 200, "metrics are for this machine"
            client.writer.write(b"GET /metrics HTTP/1.1\r\nhost: rebound.example\r\n\r\n")
            assert (await client.reply()).status == 403, "a page whose name points here is not this machine"
