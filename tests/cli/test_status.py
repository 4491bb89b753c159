"""``antiphon status --router``: what one router knows, however it was started."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from antiphon.cli.main import main
from antiphon.router.app import Router
from tests.router.scripted import engine, prefills, routing, streams


async def run(router: Router, *args: str) -> Result:
    """The command in a thread of its own, while the router answers it in this one."""
    argv = ["status", "--router", f"http://127.0.0.1:{router.spec.port}", *args]
    return await asyncio.to_thread(CliRunner().invoke, main, argv)


async def test_engines_added_at_run_time_are_listed() -> None:
    async with engine(prefills) as p, engine(streams) as d, engine(streams) as e, routing([p], [d]) as router:
        address = f"http://127.0.0.1:{router.spec.port}"
        result = await run(router)
        assert result.output.splitlines()[0] == f"router {address}: 2 of 2 engines ready, 0 requests in progress"
        added = await asyncio.to_thread(
            CliRunner().invoke, main, ["endpoints", "add", "decode", e.url, "--router", address]
        )
        assert added.exit_code == 0
        result = await run(router)
        assert result.exit_code == 1, "it is not known yet whether it answers"
        await router.engines.probe(next(each for each in router.fleet.all() if each.url == e.url))
        result = await run(router)
        assert result.exit_code == 0, result.output
        first, _, *rows = [line.split() for line in result.output.splitlines()]
        assert first[2:5] == ["3", "of", "3"]
        assert [row[:3] for row in rows] == [
            ["prefill", p.url, "ready"],
            ["decode", d.url, "ready"],
            ["decode", e.url, "ready"],
        ]
        told = json.loads((await run(router, "--format", "json")).output)
        assert [row["url"] for row in told["engines"]] == [p.url, d.url, e.url]


async def test_what_waits_is_shown_too() -> None:
    async with engine(streams) as d, routing([], [d], kv_bytes_per_token=1) as router:
        assert (await run(router)).output.splitlines()[-1] == "cold prompts: 0 waiting, 0 bytes of KV in flight"


async def test_with_the_admin_key_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-admin")
    async with engine(streams) as d, routing([], [d], admin_key_file=str(key)) as router:
        refused = await run(router)
        assert refused.exit_code == 1
        assert "--admin-key-file" in refused.output
        assert (await run(router, "--admin-key-file", str(key))).exit_code == 0


async def test_what_is_no_router() -> None:
    async with engine(streams) as d:
        result = await asyncio.to_thread(CliRunner().invoke, main, ["status", "--router", d.url])
    assert result.exit_code == 1
    assert "is no router" in result.output
    result = CliRunner().invoke(main, ["status", "--router", d.url])
    assert result.exit_code == 1
    assert "no router answers" in result.output


@pytest.mark.parametrize(
    "args",
    [
        ("--router", "http://127.0.0.1:9", "--name", "demo"),
        ("--router", "http://127.0.0.1:9", "--state-dir", "/tmp"),
        ("--router", "ftp://127.0.0.1"),
        ("--admin-key-file", "/nonexistent"),
        ("--router", "http://127.0.0.1:9", "--admin-key-file", "/nonexistent"),
    ],
)
def test_what_cannot_be_meant(args: tuple[str, ...]) -> None:
    assert CliRunner().invoke(main, ["status", *args]).exit_code == 2
