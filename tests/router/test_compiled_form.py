"""Which form of the router's modules the other tests of this folder run on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from antiphon.cli.compiled import SWITCH
from antiphon.router import flight, relay
from antiphon.routing import life, pool
from antiphon.transport.http import server_connection
from tests.router.scripted import connected, engine, routing, streams


def test_the_modules_have_the_form_that_was_asked_for() -> None:
    wanted = ".so" if os.environ.get(SWITCH) == "1" else ".py"
    for module in (flight, relay, life, pool, server_connection):
        assert Path(module.__file__ or "").suffix == wanted


async def test_status_says_which_form_it_is() -> None:
    async with engine(streams) as d, routing([], [d]) as router, connected(router) as client:
        client.writer.write(b"GET /status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert json.loads((await client.reply()).body)["compiled"] is (os.environ.get(SWITCH) == "1")
