"""The verbs that run one server say the same of the same thing: ports, flags, secrets.

Nothing is served: what a verb would run is replaced, or refused before. Out of scope: the life of the processes
(tests/process).
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from antiphon.cli import cache_server, coordinator, router, sim_engine
from antiphon.cli.flags import FlagsCommand
from antiphon.cli.main import main
from antiphon.cli.serving import Listener, refusals, refuse_one_port_twice
from antiphon.core.errors import ConfigError, StartError
from antiphon.transport.listening import cannot_listen, listen_tcp

SECRET = "0123456789abcdef0123456789abcdef\n"
PEERS = ["--coordinator-url", "127.0.0.1:1"]
VERBS = {
    "cache-server": ["--l1-size-gb", "0.01", "--port", "0", "--http-port", "0"],
    "coordinator": ["--port", "0", "--http-port", "0"],
    "router": ["--decode", "http://127.0.0.1:9", "--port", "0"],
    "sim-engine": [],
}


def run(verb: str, *flags: str) -> Result:
    return CliRunner().invoke(main, [verb, *VERBS[verb], *flags])


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def quiet_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verbs set up the log of the whole process: not here."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)


# ---- the flag that is meant ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "flags", "meant"),
    [
        ("cache-server", ["--port", "PORT"], "--port"),
        ("cache-server", ["--http-port", "PORT"], "--http-port"),
        (
            "cache-server",
            ["--coordinator-url", "127.0.0.1:1", "--p2p-advertise-url", "127.0.0.1:PORT"],
            "--p2p-advertise-url",
        ),
        ("coordinator", ["--port", "PORT"], "--port"),
        ("coordinator", ["--http-port", "PORT"], "--http-port"),
        ("router", ["--port", "PORT"], "--port"),
        ("sim-engine", ["--port", "PORT"], "--port"),
        ("sim-engine", ["--side-channel-port", "PORT"], "--side-channel-port"),
    ],
)
@pytest.mark.usefixtures("quiet_log")
def test_a_port_that_is_taken_is_told_by_its_flag(
    verb: str, flags: list[str], meant: str, taken: int, tmp_path: Path
) -> None:
    folder = [] if verb in ("router", "sim-engine") else ["--runtime-dir", str(tmp_path)]
    ran = run(verb, *folder, *(flag.replace("PORT", str(taken)) for flag in flags))
    assert ran.exit_code == 1, ran.output
    assert ran.output.startswith(f"antiphon {verb}: cannot listen ")
    assert f"on 127.0.0.1:{taken}: Address already in use\n" in ran.output
    assert ran.output.rstrip().endswith(f"\n  fix: choose another {meant}, or stop what listens there")


@pytest.mark.parametrize(
    ("verb", "flags", "meant"),
    [
        ("coordinator", ["--host", "192.0.2.1", "--cluster-secret-file", "SECRET"], "--host"),
        ("router", ["--host", "192.0.2.1"], "--host"),
        ("sim-engine", ["--side-channel-host", "192.0.2.1"], "--side-channel-host"),
        ("cache-server", ["--p2p-advertise-url", "192.0.2.1:0"], "--p2p-advertise-url"),
        ("cache-server", ["--p2p-advertise-url", "127.0.0.1:0", "--p2p-host", "192.0.2.1"], "--p2p-host"),
    ],
)
@pytest.mark.usefixtures("quiet_log")
def test_an_address_of_another_machine_is_told_by_its_flag(
    verb: str, flags: list[str], meant: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    if verb == "cache-server":
        flags = [*flags, "--coordinator-url", "127.0.0.1:1", "--cluster-secret-file", "SECRET"]
        flags += ["--runtime-dir", str(tmp_path / "run")]
    ran = run(verb, *(str(secret) if flag == "SECRET" else flag for flag in flags))
    assert ran.exit_code == 1, ran.output
    assert ran.output.rstrip().endswith(f"\n  fix: give {meant} an address of this machine")


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (
            OSError(errno.EADDRINUSE, "error while attempting to bind on address ('::1', 7)"),
            "Address already in use",
            "choose another --a-port, or stop what listens there",
        ),
        (
            OSError(errno.EADDRNOTAVAIL, "x"),
            "Cannot assign requested address",
            "give --a-host an address of this machine",
        ),
        (OSError(errno.ENODEV, "x"), "No such device", "give --a-host an address of this machine"),
        (
            socket.gaierror(-2, "Name or service not known"),
            "Name or service not known",
            "give --a-host an address of this machine",
        ),
        (PermissionError(errno.EACCES, "x"), "Permission denied", "choose another --a-port or --a-host"),
        (OSError("nothing is known"), "nothing is known", "choose another --a-port or --a-host"),
    ],
)
def test_why_it_cannot_listen(error: OSError, reason: str, remedy: str) -> None:
    told = cannot_listen("::1", 7, error, port_flag="--a-port", host_flag="--a-host")
    assert (told.message, told.remedy) == (f"cannot listen on ::1:7: {reason}", remedy)


def test_a_socket_names_the_flags_it_was_given(taken: int) -> None:
    with pytest.raises(StartError) as caught:
        listen_tcp("127.0.0.1", taken, port_flag="--mine")
    assert caught.value.remedy == "choose another --mine, or stop what listens there"


# ---- one port, two uses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "flags", "one", "other"),
    [
        ("cache-server", ["--port", "7001", "--http-port", "7001"], "--port", "--http-port"),
        (
            "cache-server",
            ["--http-port", "7001", *PEERS, "--p2p-advertise-url", "192.0.2.1:7001", "--p2p-host", "0.0.0.0"],
            "--http-port",
            "--p2p-advertise-url",
        ),
        ("coordinator", ["--host", "0.0.0.0", "--port", "7001", "--http-port", "7001"], "--port", "--http-port"),
        ("router", ["--port", "7001", "--kv-events-port", "7001"], "--port", "--kv-events-port"),
        (
            "router",
            ["--port", "7003", "--kv-events-port", "7001", "--kv-events-ranks", "3"],
            "--port",
            "--kv-events-port",
        ),
        ("sim-engine", ["--port", "7001", "--side-channel-port", "7001"], "--port", "--side-channel-port"),
    ],
)
def test_two_uses_of_one_port_are_refused(verb: str, flags: list[str], one: str, other: str) -> None:
    ran = run(verb, *flags)
    assert ran.exit_code == 2, ran.output
    assert f"{other}: two uses of one port, 700" in ran.output
    assert f"it is {one} already\n  fix: give {one} and {other} a value each" in ran.output


@pytest.mark.parametrize(
    ("hosts", "do_meet"),
    [
        (("127.0.0.1", "localhost"), True),
        (("0.0.0.0", "127.0.0.1"), True),
        (("127.0.0.1", "::"), True),
        (("127.0.0.1", "127.0.0.2"), False),
    ],
)
def test_which_addresses_meet(hosts: tuple[str, str], do_meet: bool) -> None:
    listeners = [Listener("--a", hosts[0], 7), Listener("--b", hosts[1], 7)]
    refuse_one_port_twice([listener._replace(port=0) for listener in listeners])
    if not do_meet:
        refuse_one_port_twice(listeners)
        return
    with pytest.raises(click.UsageError):
        refuse_one_port_twice(listeners)


# ---- what each verb does ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["cache-server", "server", "coordinator", "router"])
def test_a_value_behind_a_flag_that_takes_none_is_explained(verb: str) -> None:
    ran = CliRunner().invoke(main, [verb, "--enable-tracing", "true"])
    assert ran.exit_code == 2
    assert (
        "unexpected extra argument (true). --enable-tracing takes no value: write --enable-tracing for true, or "
        "--no-enable-tracing for false" in ran.output
    )


@pytest.mark.parametrize("verb", ["server", *VERBS])
def test_every_verb_reads_its_flags_alike(verb: str) -> None:
    assert isinstance(main.get_command(click.Context(main), verb), FlagsCommand)


def files_of(folder: Path, mode: int, *names: str) -> list[str]:
    paths = []
    for name in names:
        path = folder / name
        path.write_text(SECRET)
        path.chmod(mode)
        paths.append(str(path))
    return paths


@pytest.mark.parametrize(
    ("verb", "module", "flags", "said"),
    [
        (
            "cache-server",
            cache_server,
            ["--cluster-secret-file", "A", "--l2", "redis://h?password_file=B&name=near", "--l2", "s3://b/x"],
            ["--cluster-secret-file", "--l2 near, password_file"],
        ),
        ("coordinator", coordinator, ["--cluster-secret-file", "A"], ["--cluster-secret-file"]),
        (
            "router",
            router,
            ["--api-key-file", "A", "--worker-api-key-file", "B", "--admin-key-file", "C"],
            ["--api-key-file", "--worker-api-key-file", "--admin-key-file"],
        ),
    ],
)
@pytest.mark.parametrize("mode", [0o600, 0o640])
@pytest.mark.usefixtures("quiet_log")
def test_a_secret_that_others_can_read_is_told(
    verb: str,
    module: Any,
    flags: list[str],
    said: list[str],
    mode: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def served(life: Any) -> bool:
        life.close()
        return verb == "cache-server"

    monkeypatch.setattr(module, "run", served)
    monkeypatch.delitem(sys.modules, "nixl", raising=False)  # with it a cache server ends the process at once
    paths = dict(zip("ABC", files_of(tmp_path, mode, "a", "b", "c"), strict=True))
    given = [paths.get(flag, flag.replace("=B", f"={paths['B']}")) for flag in flags]
    assert run(verb, *given).exit_code == 0
    told = [each.getMessage() for each in caplog.records if "open to other users of this host" in each.getMessage()]
    assert [text.partition(": ")[0] for text in told] == (said if mode == 0o640 else [])


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            ConfigError("it is wrong", field="router.a_field", remedy="mend it"),
            2,
            "Error: --a-field: it is wrong\n  fix: mend it\n",
        ),
        (ConfigError("it is wrong"), 2, "Error: it is wrong\n"),
        (StartError("it is wrong", remedy="mend it"), 1, "antiphon VERB: it is wrong\n  fix: mend it\n"),
        (StartError("it is wrong"), 1, "antiphon VERB: it is wrong\n"),
    ],
)
@pytest.mark.usefixtures("quiet_log")
def test_every_verb_says_alike_what_refuses_it(
    verb: str, error: Exception, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def served(life: Any) -> None:
        life.close()
        raise error

    modules: dict[str, Any] = {"cache-server": cache_server, "coordinator": coordinator, "router": router}
    monkeypatch.setattr(modules.get(verb, sim_engine), "run", served)
    ran = run(verb)
    assert ran.exit_code == status
    assert ran.output.endswith(said.replace("VERB", verb))


def test_what_is_no_refusal_passes() -> None:
    with pytest.raises(KeyError), refusals("router"):
        raise KeyError("a bug")
