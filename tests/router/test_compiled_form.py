"""Which form of the router's modules the other tests of this folder run on."""

from __future__ import annotations

import os
from pathlib import Path

from antiphon.cli.compiled import SWITCH
from antiphon.router import flight, relay
from antiphon.routing import life, pool
from antiphon.transport.http import server_connection


def test_the_modules_have_the_form_that_was_asked_for() -> None:
    wanted = ".so" if os.environ.get(SWITCH) == "1" else ".py"
    for module in (flight, relay, life, pool, server_connection):
        assert Path(module.__file__ or "").suffix == wanted
