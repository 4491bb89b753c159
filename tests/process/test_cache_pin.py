"""The long beginning of many prompts is pinned by a request's body, with engines and a router that go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from antiphon.cli.cache_client import AdminClient
from antiphon.cli.main import main
from tests.cache_server.handoff_processes import servers
from tests.engine.simulated_processes import EngineProcess
from tests.router.stack import RouterProcess, ask, urls, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

CHUNK = 32
PAGE = 4096
BEGINNING = list(range(1_000, 1_000 + 5 * CHUNK))


def test_a_beginning_is_pinned_by_the_body_of_a_request(tmp_path: Path, die_with_parent: Callable[[], None]) -> None:
    request_file = tmp_path / "request.json"
    request_file.write_text(json.dumps({"model": "m", "prompt": BEGINNING}))
    started: list[Any] = []
    with servers(tmp_path, die_with_parent) as made:
        try:
            server = made.one("one", chunk_size=CHUNK)
            cache = {"cache_port": server.port, "cache_chunk_size": CHUNK}
            prefill, decode = (
                EngineProcess.start(die_with_parent, role=role, engine_id=f"{role}-1", **cache)
                for role in ("prefill", "decode")
            )
            started += [prefill, decode]
            wait_for(lambda: len(server.get("/status")["engines"]) == 2, "the engines are attached")
            pools = [*urls([prefill], "prefill"), *urls([decode], "decode")]
            router = RouterProcess.start(die_with_parent, *pools, "--cache-server", server.url, "--handoff", "cache")
            started.append(router)

            def complete(prompt: list[int]) -> None:
                body = {"model": "m", "prompt": prompt, "max_tokens": 2}
                assert ask(router.port, "POST", "/v1/completions", body).status == 200

            complete([*BEGINNING, *range(50)])
            wait_for(lambda: server.num_leases == 0 and server.num_chunks > 3, "the prompt is stored")
            place = ("--url", server.url, "--json")
            pinned = CliRunner().invoke(main, ["cache", "pin", "--request-file", str(request_file), *place])
            assert pinned.exit_code == 0, pinned.output
            answer = json.loads(pinned.output)
            assert (answer["num_chunks"], answer["num_named"]) == (5, 5)
            assert CliRunner().invoke(main, ["cache", "clear", *place]).exit_code == 1
            listed = json.loads(CliRunner().invoke(main, ["cache", "list", *place]).output)
            assert [pin["key"] for pin in listed["pins"]] == [answer["key"]]
            assert sum(each["num_pinned"] for each in listed["namespaces"]) == answer["num_chunks"]
            lowered = AdminClient(server.url).put("/quota", {"tenant": "default", "quota_bytes": 6 * PAGE})
            assert lowered["used_bytes"] <= 6 * PAGE
            for number in range(3):
                complete(list(range(2_000 + 1_000 * number, 2_200 + 1_000 * number)))
            wait_for(lambda: server.num_leases == 0, "the engines have stored")
            page = server.get("/chunks/facts")["chunks"]
            assert len(page) <= 6
            assert [each["position"] for each in page if each["num_pins"]] == [0, 1, 2, 3, 4]
            assert AdminClient(server.url).get("/status")["tenants"]["default"]["tokens"]["evicted"] > 0
        finally:
            for process in reversed(started):
                process.stop()
