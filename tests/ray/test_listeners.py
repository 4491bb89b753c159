"""What ``python -m antiphon.ray.listeners`` prints, and how it ends."""

from __future__ import annotations

import pytest

from antiphon.ray import listeners
from antiphon.ray.listeners import Listener, main

RAY = Listener("ray", "raylet", 7, "0.0.0.0", 1)
ROUTER = Listener("process", "router", 8, "127.0.0.1", 30000)
PUBLIC = Listener("process", "prefill-1", 9, "192.0.2.1", 8001)


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ([RAY, ROUTER], 0, "2 listeners, 1 reached from other machines (!), 0 of the application"),
        ([RAY, ROUTER, PUBLIC], 1, "3 listeners, 2 reached from other machines (!), 1 of the application"),
        ([RAY], 2, "nothing of the application 'chat' listens on this node"),
        ([], 2, "nothing of the application 'chat' listens on this node"),
    ],
)
def test_the_end_says_what_was_found(
    found: list[Listener],
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(listeners, "app_listeners", lambda app: found if app == "chat" else [PUBLIC])
    assert main(["chat"]) == status
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("args", "status"), [(["--help"], 0), (["-h"], 0), (["--app", "x"], 2), (["a", "b"], 2)])
def test_anything_but_a_name_gets_the_usage(args: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == status
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("ray::ProxyActor", "ray::ProxyActor"),
        ("/a/ray/core/src/ray/raylet/raylet --raylet_socket_name=/x", "raylet"),
        ("/a/bin/python -u /a/ray/_private/log_monitor.py --session-dir=/x", "log_monitor.py"),
        ("/a/bin/python3.11 -m ray.util.client.server --port=1", "ray.util.client.server"),
    ],
)
def test_processes_of_ray_have_short_names(words: str, name: str) -> None:
    assert listeners._short(words) == name
