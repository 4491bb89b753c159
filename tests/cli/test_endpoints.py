"""``antiphon endpoints`` against a router, and against what is none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from antiphon.cli.main import main
from antiphon.router.app import Router
from tests.router.scripted import EVENT, Seen, Wire, connected, engine, prefills, routing, streams, until


async def run(router: Router, *args: str) -> Result:
    """The command in a thread of its own, while the router answers it in this one."""
    argv = ["endpoints", *args, "--router", f"http://127.0.0.1:{router.spec.port}"]
    return await asyncio.to_thread(CliRunner().invoke, main, argv)


async def test_list_add_drain_remove() -> None:
    async with (
        engine(prefills) as p,
        engine(streams) as d,
        engine(streams) as e,
        routing([p], [d], health_interval_s=0.05) as router,
    ):
        result = await run(router, "list")
        lines = [line.split() for line in result.output.splitlines()]
        assert lines[0] == ["ROLE", "URL", "STATE", "ACTIVE", "ANSWERED", "EJECTIONS"]
        assert lines[1:] == [
            ["prefill", p.url, "ready", "0", "0", "0"],
            ["decode", d.url, "ready", "0", "0", "0"],
        ]
        result = await run(router, "add", "decode", f"{e.url}/", "--wait-s", "5")
        assert (result.exit_code, result.output) == (0, f"decode engine {e.url} is added: ready\n")
        result = await run(router, "add", "decode", e.url)
        assert result.output == f"decode engine {e.url} is there already: ready\n"
        result = await run(router, "drain", "decode", e.url, "--wait-s", "5")
        assert result.output == f"decode engine {e.url} drains: 0 requests in flight\n"
        assert f"{e.url}  draining" in (await run(router, "list")).output
        result = await run(router, "remove", "decode", e.url)
        assert (result.exit_code, result.output) == (0, f"decode engine {e.url} is removed\n")
        answer = json.loads((await run(router, "list", "--json")).output)
        assert [row["url"] for row in answer["endpoints"]] == [p.url, d.url]


async def test_last_one_goes_only_knowingly() -> None:
    async with engine(streams) as d, routing([], [d]) as router:
        result = await run(router, "remove", "decode", d.url)
        assert result.exit_code == 1
        assert "this is the last decode engine that takes requests" in result.output
        result = await run(router, "remove", "decode", d.url, "--allow-empty")
        assert result.exit_code == 0
        assert "warning: no decode engine takes requests: requests are refused with 503" in result.output


async def test_waiting_for_a_request_to_end() -> None:
    go_on = asyncio.Event()

    async def holds(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(EVENT)
        await go_on.wait()
        wire.piece(b"data: [DONE]\n\n")
        wire.end()

    async with (
        engine(holds) as d,
        engine(streams) as e,
        routing([], [d, e]) as router,
        connected(router) as client,
    ):
        client.send()
        await until(lambda: router.fleet.decode.num_active == 1, "the request has begun")
        result = await run(router, "remove", "decode", d.url, "--wait-s", "0.2")
        assert result.exit_code == 1
        assert f"not done within 0.2 s: decode engine {d.url} is leaving, 1 requests in flight" in result.output
        result = await run(router, "remove", "decode", d.url)
        assert result.output == f"decode engine {d.url} is removed when its 1 requests have ended\n"
        go_on.set()
        assert (await client.reply()).status == 200
        assert d.url not in (await run(router, "list")).output


async def test_what_the_router_refuses(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    async with engine(streams) as d, routing([], [d], admin_key_file=str(key)) as router:
        result = await run(router, "list")
        assert result.exit_code == 1
        assert "the admin key is missing or wrong" in result.output
        assert "fix: give the router's key with --admin-key-file" in result.output
        assert d.url in (await run(router, "list", "--admin-key-file", str(key))).output
        result = await run(router, "remove", "prefill", d.url, "--admin-key-file", str(key))
        assert (result.exit_code, "no prefill engine has the URL" in result.output) == (1, True)
        result = await run(router, "add", "decode", "nonsense", "--admin-key-file", str(key))
        assert (result.exit_code, "'nonsense' is not the URL of an engine" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["list", "--router", "http://127.0.0.1:1"], 1, "no router answers at http://127.0.0.1:1"),
        (["list", "--router", "ftp://h"], 2, "not an address of the form http://HOST:PORT"),
        (["list", "--router", "http://h:99999"], 2, "not an address of the form http://HOST:PORT"),
        (["list", "--admin-key-file", "/nowhere/key"], 2, "/nowhere/key cannot be read"),
        (["add", "worker", "http://h:1"], 2, "'worker' is not one of"),
        (["add", "decode"], 2, "Missing argument 'URL'"),
    ],
)
def test_command_lines_that_lead_nowhere(args: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(main, ["endpoints", *args])
    assert result.exit_code == code
    assert words in result.output


async def test_what_answers_is_no_router() -> None:
    async def html(_: Seen, wire: Wire) -> None:
        wire.whole(b"<html>", status=404, content_type="text/html")

    async with engine(html) as other:
        argv = ["endpoints", "list", "--router", other.url]
        result = await asyncio.to_thread(CliRunner().invoke, main, argv)
        assert result.exit_code == 1
        assert f"what answers at {other.url} is no router (status 404, no JSON)" in result.output
