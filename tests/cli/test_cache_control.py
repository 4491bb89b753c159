"""``antiphon cache list``, ``clear``, ``pin``, ``unpin`` and ``quota`` against a real server process."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from antiphon.cache import events
from antiphon.cache.effects import Reserved
from antiphon.cache_server.admin import start_admin
from antiphon.cache_server.probe_connection import ProbeConnection
from antiphon.cli.cache_control import KEYS_SENT_MAX
from antiphon.cli.cache_list import list_lines
from antiphon.cli.main import main
from antiphon.core.chunks import chunk_keys
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import cache as wire
from tests.cache_server.admin_process import MIB, NAMESPACE, Process, engine_at, keys, started
from tests.cache_server.admin_standin import StandIn, namespace_of, standing_in

TOKENS = list(range(1_000, 1_000 + 2 * 256 + 40))
CHAIN = chunk_keys(NamespaceDigest(NAMESPACE), TOKENS, 256)


@pytest.fixture
def process(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[Process]:
    with started(tmp_path, die_with_parent, "--instance-id", "kv") as process:
        yield process


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["cache", *args])


async def store_chain(engine: ProbeConnection, chain: Sequence[bytes], tenant: str, name: bytes = NAMESPACE) -> None:
    """Stores consecutive chunks, one after the other."""
    for parent, key in zip([None, *chain[:-1]], chain, strict=True):
        reserved = await engine.call(wire.Reserve(name, tenant, parent, key), wire.Reserved)
        if reserved.grants:
            await engine.call(wire.Commit(tuple(grant.region for grant in reserved.grants)), wire.Committed)


@contextmanager
def tokenizing(tokens: list[int], status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Stands for a router or engine: its address, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            shown = self.headers["authorization"]
            asked.append({"path": self.path} | body | ({} if shown is None else {"authorization": shown}))
            data = json.dumps({"tokens": tokens, "count": len(tokens)}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join(5)


@pytest.mark.process
async def test_list_pin_and_clear_a_prompt(process: Process, tmp_path: Path) -> None:
    url = ("--url", process.url)

    async def verb(name: str, *args: str) -> Result:
        return await asyncio.to_thread(run, name, *url, *args)

    assert (await verb("list")).output == f"{process.url}: no chunk is in memory\n"
    tokens_file, request_file = tmp_path / "tokens.json", tmp_path / "request.json"
    tokens_file.write_text(json.dumps(TOKENS))
    request_file.write_text(json.dumps({"model": "m", "messages": [{"role": "system", "content": "You are"}]}))
    async with engine_at(process.socket_path, MIB) as engine:
        early = await verb("pin", "--tokens-file", str(tokens_file))
        assert (early.exit_code, early.stdout) == (1, "")
        await store_chain(engine, CHAIN[:1], "default")
        part = await verb("pin", "--tokens-file", str(tokens_file), "--model", "m", "--ttl-s", "600")
        assert "1 of 2 chunks pinned, 1.0 MiB" in part.output
        assert "the rest is not in memory" in part.output
        await store_chain(engine, CHAIN, "default")

        listed = (await verb("list", "--chunks", "--tenant", "default")).output.splitlines()
        assert listed[2].split() == ["default", "m", "2", "2.0", "MiB", "0", "1", "-", NAMESPACE.hex()[:16]]
        shown = [line.split() for line in listed[-2:]]
        assert [(row[0], row[1]) for row in shown] == [
            (CHAIN[0].hex()[:16], "0-255"),
            (CHAIN[1].hex()[:16], "256-511"),
        ]
        answer = json.loads((await verb("list", "--chunks", "--json", "--limit", "1")).output)
        assert ([each["key"] for each in answer["chunks"]], answer["is_cut"]) == ([CHAIN[0].hex()], True)
        assert answer["pins"][0]["key"] == CHAIN[0].hex()

        by_key = await verb("pin", CHAIN[1].hex()[:16])
        assert "all 2 chunks pinned, 2.0 MiB" in by_key.output
        assert f"up to {CHAIN[1].hex()[:16]}" in by_key.output
        assert (await verb("pin", "0" * 10)).exit_code == 1

        # The arena has room for four: two others come and go beside what is pinned.
        for number in range(10, 30):
            await store_chain(engine, [keys(number)], "other", b"o" * 32)
        kept = json.loads((await verb("list", "--tenant", "default", "--json")).output)["namespaces"]
        assert [each["num_chunks"] for each in kept] == [2]
        refused = await verb("clear")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "2 pins keep 2097152 bytes of what would be cleared (unpin them" in refused.stderr
        ended = await verb("unpin", CHAIN[0].hex()[:8])
        assert ended.output == f"{process.url}: 1 pin ended, 2.0 MiB still pinned\n"
        assert (await verb("unpin", "ffffffff")).exit_code == 1
        assert "pins      1, 2.0 MiB of at most" in (await verb("status")).output
        with tokenizing(TOKENS) as (tokenizer, asked):
            again = await verb("pin", "--request-file", str(request_file), "--tokenizer-url", tokenizer)
        assert "all 2 chunks pinned" in again.output
        assert asked == [{"path": "/tokenize", "model": "m", "messages": [{"role": "system", "content": "You are"}]}]
        cleared = await verb("clear", "--tenant", "default", "--pinned")
        assert cleared.output == f"{process.url}: 2 chunks forgotten, 2.0 MiB free at once, 1 pin ended\n"


@pytest.mark.process
async def test_quotas_at_run_time(process: Process) -> None:
    url = ("--url", process.url)

    async def verb(*args: str) -> Result:
        return await asyncio.to_thread(run, "quota", *url, *args)

    async with engine_at(process.socket_path, MIB) as engine:
        await store_chain(engine, [keys(number) for number in (1, 2, 3)], "team")
        shown = (await verb()).output.splitlines()
        assert shown[0] == f"{process.url}: tenants without a quota of their own may occupy: no quota"
        assert shown[2].split() == ["team", "3.0", "MiB", "-"]
        lowered = await verb("team=0.0015")
        assert lowered.output == (
            f"{process.url}: team has a quota of 1.4 MiB and holds 1.0 MiB, 2 chunks evicted for it\n"
        )
        taken = await verb("team=none", "--json")
        assert json.loads(taken.output) == {
            "tenant": "team",
            "quota_bytes": None,
            "used_bytes": MIB,
            "num_evicted": 0,
        }
        again = await verb("team=none", "other=1")
        first, second = again.output.splitlines()
        assert first == f"{process.url}: team had no quota of its own, nothing was taken away"
        assert (again.exit_code, second.startswith(f"{process.url}: other has a quota of")) == (0, True)
        told = json.loads((await verb("team=none", "--json")).output)
        assert told == {"tenant": "team", "is_own": False, "num_evicted": 0}


@pytest.mark.process
def test_of_several_servers_the_one_that_has_it_answers(tmp_path: Path, die_with_parent: Callable[[], None]) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    with (
        started(tmp_path / "one", die_with_parent, "--quota", "team=0.001") as one,
        started(tmp_path / "two", die_with_parent) as two,
    ):
        urls = ("--url", one.url, "--url", two.url)
        cleared = run("clear", *urls, "--tenant", "team")
        assert (cleared.exit_code, cleared.stdout) == (0, f"{one.url}: 0 chunks forgotten, 0 B free at once\n")
        assert f"antiphon cache: {two.url}: nothing here has the tenant 'team'" in cleared.stderr
        assert run("clear", *urls, "--tenant", "nobody").exit_code == 1


# ---- servers that refuse, and do not answer --------------------------------------------------------------------------

Said = tuple[int, dict[str, Any]]
Sayings = dict[str, Said | Callable[[Any], Said]]
"""Status and JSON by method and path; or what makes them of the body."""

CLEARED = {"num_chunks": 3, "freed_bytes": 0, "held_bytes": 0, "num_unpinned": 0}
PINNED = {"key": "ab" * 32, "num_bytes": 1, "pinned_bytes": 1, "pinned_bytes_max": 2}
DONE: Sayings = {
    "POST /clear": (200, CLEARED | {"tiers": [], "is_known": True, "has_peers": False}),
    "POST /pin": (200, PINNED | {"num_chunks": 1, "num_named": 1}),
    "POST /unpin": (200, {"num_pins": 1, "pinned_bytes": 0}),
    "PUT /quota": lambda order: (200, order | {"used_bytes": 0, "num_evicted": 0}),
}
FULL: Said = (409, {"error": {"code": "refused", "message": "it will not"}})


@contextmanager
def saying(sayings: Sayings) -> Iterator[str]:
    """Stands for a cache server's admin address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"null")
            said = sayings[f"{self.command} {self.path.partition('?')[0]}"]
            status, value = said(body) if callable(said) else said
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def do_PUT(self) -> None:
            self.answer()

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(5)


@pytest.mark.parametrize(
    ("verb", "done"),
    [
        (("clear",), "3 chunks forgotten"),
        (("pin", "a" * 64), "all 1 chunk pinned"),
        (("unpin", "--all"), "1 pin ended"),
        (("quota", "team=1"), "team has a quota of"),
    ],
)
def test_a_server_that_fails_hides_nothing_of_the_others(verb: tuple[str, ...], done: str, free_port: int) -> None:
    refusing: Sayings = dict.fromkeys(DONE, FULL)
    gone = f"http://127.0.0.1:{free_port}"
    with saying(DONE) as first, saying(refusing) as second, saying(DONE) as last:
        urls = [part for url in (first, second, gone, last) for part in ("--url", url)]
        result = run(*verb, *urls)
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == [first, last]
    assert result.stdout.count(done) == 2
    assert f"{second} refuses" in result.stderr
    assert "it will not (status 409)" in result.stderr
    assert f"no cache server answers at {gone}" in result.stderr
    assert result.stderr.splitlines()[-1] == f"antiphon cache: not done by 2 of 4 servers: {second}, {gone}"
    assert result.exit_code == 1


def test_what_cannot_be_meant_at_any_server_is_said_once_for_each(free_port: int) -> None:
    urls = ("--url", f"h:{free_port}", "--url", f"127.0.0.1:{free_port}")
    result = run("pin", "xyz", *urls)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("not a chunk's key") == 2


def test_a_quota_that_is_refused_keeps_none_of_the_others(free_port: int) -> None:
    def put(order: dict[str, Any]) -> Said:
        return FULL if order["tenant"] == "b" else (200, order | {"used_bytes": 0, "num_evicted": 0})

    with saying({"PUT /quota": put}) as url:
        result = run("quota", "a=1", "b=1", "c=1", "--url", url)
    assert result.exit_code == 1
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["a", "c"]
    assert "b: " in result.stderr


def test_a_namespace_that_is_refused_hides_no_other(tmp_path: Path) -> None:
    names = [letter * 64 for letter in "123"]
    heads = [chunk_keys(NamespaceDigest(bytes.fromhex(name)), TOKENS, 256)[0].hex() for name in names]
    found = [{"namespace": name, "model": "m"} for name in names]

    def pin(body: dict[str, Any]) -> Said:
        if body["keys"].startswith(heads[1]):
            return FULL
        return 200, PINNED | {"key": body["keys"][:64], "num_chunks": 2, "num_named": 2}

    listed = {"namespaces": found, "num_left_out": 0, "chunk_size_tokens": 256}
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    with saying({"GET /namespaces": (200, listed), "POST /pin": pin}) as url:
        result = run("pin", "--tokens-file", str(path), "--url", url)
    assert [line.partition("up to ")[2][:16] for line in result.stdout.splitlines()] == [heads[0][:16], heads[2][:16]]
    assert result.exit_code == 1
    assert "it will not" in result.stderr


# ---- long prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_chunks", "num_stored", "num_asked"),
    [
        (2 * KEYS_SENT_MAX + 100, 2 * KEYS_SENT_MAX + 100, 1),
        (2 * KEYS_SENT_MAX + 100, KEYS_SENT_MAX + 101, 1),
        (2 * KEYS_SENT_MAX + 100, KEYS_SENT_MAX + 100, 2),  # up to the one before the last stretch
        (2 * KEYS_SENT_MAX + 100, KEYS_SENT_MAX, 2),
        (2 * KEYS_SENT_MAX + 100, 50, 3),
        (2 * KEYS_SENT_MAX + 100, 0, 3),
        (KEYS_SENT_MAX + 1, 1, 2),
        (KEYS_SENT_MAX, 1, 1),
        (KEYS_SENT_MAX, 0, 1),
    ],
)
async def test_a_long_prompt_is_counted_whole(tmp_path: Path, num_chunks: int, num_stored: int, num_asked: int) -> None:
    tokens = list(range(1_000, 1_000 + num_chunks * 256))
    chain = chunk_keys(namespace_of("a"), tokens, 256)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(tokens))
    async with standing_in(tmp_path, 2 * num_chunks + 2) as server:
        engine = server.attach_engine()
        server.store(engine, 1, tenant="a")  # so that the namespace is there
        for parent, key in zip([None, *chain], chain[:num_stored], strict=False):
            reply = server.step(events.Reserve(engine, namespace_of("a"), "a", parent, (key,)))[0]
            assert isinstance(reply, Reserved)
            server.step(events.Commit(engine, tuple(grant.region for grant in reply.grants)))
        asked = count_pins(server)
        admin = await start_admin(server, "127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{admin.port}"
            result = await asyncio.to_thread(run, "pin", "--tokens-file", str(path), "--tenant", "a", "--url", url)
        finally:
            await admin.close()
        kept = [(pin.key, pin.num_chunks) for pin in server.cache.pins()]
    assert len(asked) == num_asked
    if not num_stored:
        assert (result.exit_code, kept) == (1, [])
        return
    of = f"all {num_chunks}" if num_stored == num_chunks else f"{num_stored} of {num_chunks}"
    assert f": {of} chunks pinned" in result.stdout, result.output
    assert kept == [(chain[num_stored - 1], num_stored)]


def count_pins(server: StandIn) -> list[events.Pin]:
    """The pins that the server is asked for from now on."""
    asked: list[events.Pin] = []
    control = server.control

    def counted(event: Any) -> Any:
        if isinstance(event, events.Pin):
            asked.append(event)
        return control(event)

    server.control = counted  # type: ignore[method-assign]
    return asked


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_records_of_tiers_are_told_where_memory_has_none() -> None:
    answer = {"url": "u", "namespaces": [], "in_tiers": {"disk": 7, "s3\x1b": 2, "empty": 0}}
    assert list_lines(answer) == ["u: no chunk is in memory; in tiers: disk 7, s3\\x1b 2"]


async def test_pins_are_listed_by_tenant_and_model_whatever_namespaces_are_shown(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        engine = server.attach_engine()
        server.store(engine, 1, tenant="a")
        server.store(engine, 11, 12, 13, tenant="b")
        server.step(events.Pin((chain_key := server.cache.chunks_after(0, 1).groups[0].keys[0],), None))
        admin = await start_admin(server, "127.0.0.1", 0)
        try:
            url = ("--url", f"http://127.0.0.1:{admin.port}", "--json", "--limit", "1")
            listed = {
                names: json.loads((await asyncio.to_thread(run, "list", *names, *url)).output)
                for names in ((), ("--model", "m"), ("--tenant", "a"), ("--tenant", "b"))
            }
        finally:
            await admin.close()
    assert [each["tenant"] for each in listed["--model", "m"]["namespaces"]] == ["b"]
    pins = {names: [pin["key"] for pin in answer["pins"]] for names, answer in listed.items()}
    one = [chain_key.hex()]
    assert pins == {(): one, ("--model", "m"): one, ("--tenant", "a"): one, ("--tenant", "b"): []}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("pin",), "in one way: KEY, --tokens-file or --request-file"),
        (("pin", "a" * 64, "--tokens-file", "x"), "in one way"),
        (("pin", "--tokens-file", "x", "--tokenizer-url", "h:1"), "of --request-file"),
        (("pin", "a" * 64, "--tokenizer-key-file", "x"), "goes with --tokenizer-url"),
        (("pin", "--request-file", "/nowhere/request.json"), "No such file"),
        (("pin", "abc"), "not a chunk's key"),
        (("pin", "x" * 64), "not a chunk's key"),
        (("pin", "--tokens-file", "/nowhere/tokens.json"), "No such file"),
        (("unpin",), "KEY, or --all"),
        (("unpin", "a" * 64, "--all"), "KEY, or --all"),
        (("quota", "team"), "write TENANT=GB"),
        (("quota", "team=x"), "or TENANT=none"),
    ],
)
def test_command_lines_that_cannot_be_meant(args: tuple[str, ...], message: str, free_port: int) -> None:
    result = run(*args, "--url", f"http://127.0.0.1:{free_port}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is not JSON"),
        ("{}", "JSON list of token ids"),
        ('["a"]', "JSON list of token ids"),
        ("[true]", "JSON list"),
    ],
)
def test_files_of_tokens_that_are_none(tmp_path: Path, text: str, message: str, free_port: int) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    result = run("pin", "--tokens-file", str(path), "--url", f"http://127.0.0.1:{free_port}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_tokenizer_that_is_none(tmp_path: Path, free_port: int) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"prompt": "text"}))
    args = ("pin", "--request-file", str(path), "--url", f"http://127.0.0.1:{free_port}", "--tokenizer-url")
    assert run(*args, "x://y").exit_code == 2
    alone = run(*args[:-1])
    assert alone.exit_code == 2
    assert "a cache server has no tokenizer" in alone.stderr
    refused = run(*args, f"http://127.0.0.1:{free_port}")
    assert refused.exit_code == 1
    assert "does not tokenize" in refused.stderr
    with tokenizing([1], status=501) as (tokenizer, _):
        assert "status 501" in run(*args, tokenizer).stderr
    with tokenizing([1], status=401) as (tokenizer, _):
        assert "fix: name a file with a key that it takes with --tokenizer-key-file" in run(*args, tokenizer).stderr
    path.write_text(json.dumps({"input": "text"}))
    assert "no prompt or messages" in run(*args, f"http://127.0.0.1:{free_port}").stderr


def test_the_tokenizer_is_shown_the_key_in_a_file(tmp_path: Path, free_port: int) -> None:
    path, key_path = tmp_path / "request.json", tmp_path / "key"
    path.write_text(json.dumps({"model": "m", "prompt": "text"}))
    key_path.write_text("# the tenant's\nsk-one\n")
    args = ("pin", "--request-file", str(path), "--url", f"http://127.0.0.1:{free_port}")
    with tokenizing(TOKENS) as (tokenizer, asked):
        keyed = ("--tokenizer-url", tokenizer, "--tokenizer-key-file")
        assert run(*args, *keyed, str(key_path)).exit_code == 1  # it has the tokens, and no cache server
        assert [each["authorization"] for each in asked] == ["Bearer sk-one"]
        missing = run(*args, *keyed, str(tmp_path / "none"))
    assert (missing.exit_code, len(asked)) == (2, 1)
    assert "cannot be read" in missing.stderr
