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

from antiphon.cache_server.probe_connection import ProbeConnection
from antiphon.cli.cache_control import cleared_lines
from antiphon.cli.main import main
from antiphon.core.chunks import chunk_keys
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import cache as wire
from tests.cache_server.admin_process import MIB, NAMESPACE, Process, engine_at, keys, started

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
            asked.append({"path": self.path} | body)
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

    assert (await verb("list")).output == f"{process.url}: no chunk is held\n"
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
        assert ended.output == f"{process.url}: 1 pins ended, 2.0 MiB still pinned\n"
        assert (await verb("unpin", "ffffffff")).exit_code == 1
        assert "pins      1, 2.0 MiB of at most" in (await verb("status")).output
        with tokenizing(TOKENS) as (tokenizer, asked):
            again = await verb("pin", "--request-file", str(request_file), "--tokenizer-url", tokenizer)
        assert "all 2 chunks pinned" in again.output
        assert asked == [{"path": "/tokenize", "model": "m", "messages": [{"role": "system", "content": "You are"}]}]
        cleared = await verb("clear", "--tenant", "default", "--pinned")
        assert cleared.output == f"{process.url}: 2 chunks forgotten, 2.0 MiB free at once, 1 pins ended\n"


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
        again = await verb("team=none")
        assert (again.exit_code, again.stdout) == (1, "")
        assert "has no quota of its own" in again.stderr


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


def test_what_a_clear_meant_for_people() -> None:
    tiers = [{"name": "disk", "is_shared": False}, {"name": "s3\x1b", "is_shared": True}]
    cleared = {"num_chunks": 2, "freed_bytes": 1024, "held_bytes": 0, "num_unpinned": 0}
    lines = cleared_lines("u", cleared | {"tiers": tiers, "is_known": False, "has_peers": True})
    assert lines[:3] == [
        "u: 2 chunks forgotten, 1.0 KiB free at once",
        "  nothing here is known to have that; a tier that cannot be listed may",
        "  and in disk",
    ]
    assert lines[3].startswith("  and in s3\\x1b, for all that use it")
    assert lines[4] == "  what peers hold is theirs: clear it there"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("pin",), "in one way: KEY, --tokens-file or --request-file"),
        (("pin", "a" * 64, "--tokens-file", "x"), "in one way"),
        (("pin", "--tokens-file", "x", "--tokenizer-url", "h:1"), "of --request-file"),
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
    path.write_text(json.dumps({"input": "text"}))
    assert "no prompt or messages" in run(*args, f"http://127.0.0.1:{free_port}").stderr
