"""``antiphon endpoints``: look at a running router's engines, and change them, through its admin routes.

A thin client: what is allowed, and what happens, is the router's decision. Exit code 0; 1 where the router does not
answer or refuses, or the time of ``--wait-s`` is over; 2 for a command line that cannot be meant.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from antiphon.cli.asking import Asker, Kind
from antiphon.cli.shown import printable, table_lines
from antiphon.core.errors import AntiphonError, ConfigError

DEFAULT_URL: Final = "http://127.0.0.1:30000"
TIMEOUT_S: Final = 10.0
KIND: Final = Kind("router", "--router", "name its address with --router http://HOST:PORT")
POLL_INTERVAL_S: Final = 0.1
ROLES: Final = ("prefill", "decode")

Command = TypeVar("Command", bound=Callable[..., Any])


class RouterClient:
    """Asks one router, one connection a question, no proxy.

    Args:
        url: ``http://HOST:PORT``.
        key: of the admin routes.

    Raises:
        ConfigError: ``url`` is none.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self._asker = Asker(url, KIND, {} if key is None else {"authorization": f"Bearer {key}"})

    def ask(self, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        """The router's JSON answer.

        Raises:
            AntiphonError: it does not answer, is no router, or refuses.
        """
        status, answer = self._asker.ask(method, path, body, timeout_s=TIMEOUT_S)
        if status < 300:
            return answer
        error = answer.get("error")
        if not isinstance(error, dict):
            raise self._asker.wrong_kind(f"status {status}")
        remedy = None
        if status in (401, 403):
            remedy = "give the router's key with --admin-key-file, or ask on the router's own machine"
        raise AntiphonError(printable(str(error.get("message"))), remedy=remedy)


def router_options(command: Command) -> Command:
    """The options that every verb of the group has."""
    command = click.option("--json", "is_json", is_flag=True, help="Print JSON as the router sends it.")(command)
    command = click.option(
        "--admin-key-file", help="File with the router's admin key. Not needed on the router's own machine without one."
    )(command)
    return click.option("--router", "url", default=DEFAULT_URL, show_default=True, help="Address of the router.")(
        command
    )


def endpoint_arguments(command: Command) -> Command:
    """The role and the URL of an engine, and the options of every verb."""
    command = click.argument("endpoint", metavar="URL")(router_options(command))
    return click.argument("role", type=click.Choice(ROLES))(command)


wait_option = click.option(
    "--wait-s", type=click.FloatRange(min=0), default=0.0, metavar="NUMBER", help="Seconds to wait until it is done."
)
empty_option = click.option("--allow-empty", is_flag=True, help="Also the last engine of its pool that takes requests.")


@click.group()
def endpoints() -> None:
    """Look at a running router's engines; add, drain and remove them.

    What is changed here lasts until the router stops: what is to stay belongs in antiphon.yaml.
    """


@endpoints.command(name="list")
@router_options
def list_(url: str, admin_key_file: str | None, is_json: bool) -> None:
    """Show every engine: role, state, requests in flight, and why it is not used."""

    def act() -> None:
        answer = client_of(url, admin_key_file).ask("GET", "/endpoints")
        click.echo(json.dumps(answer, indent=2) if is_json else "\n".join(table(answer)))

    _run(act)


@endpoints.command()
@endpoint_arguments
@wait_option
def add(role: str, endpoint: str, url: str, admin_key_file: str | None, is_json: bool, wait_s: float) -> None:
    """Add an engine, or open one again that drains. It is warmed before it takes requests."""

    def act() -> None:
        client = client_of(url, admin_key_file)
        answer = client.ask("POST", "/endpoints", {"role": role, "url": endpoint})
        row = _waited(client, answer["endpoint"], lambda row: row is not None and row["state"] == "ready", wait_s)
        words = "added" if answer["is_new"] else "there already"
        _say(answer | {"endpoint": row}, is_json, f"{role} engine {row['url']} is {words}: {_state(row)}")

    _run(act)


@endpoints.command()
@endpoint_arguments
@wait_option
@empty_option
def drain(role: str, endpoint: str, wait_s: float, allow_empty: bool, **connection: Any) -> None:
    """Send an engine no new requests; those in flight go on. With --wait-s, wait until they have ended."""

    def act() -> None:
        client = client_of(connection["url"], connection["admin_key_file"])
        body = {"role": role, "url": endpoint, "allow_empty": allow_empty}
        answer = client.ask("POST", "/endpoints/drain", body)
        row = _waited(client, answer["endpoint"], lambda row: row is None or not row["active_requests"], wait_s)
        text = f"{role} engine {row['url']} drains: {row['active_requests']} requests in flight"
        _say(answer | {"endpoint": row}, connection["is_json"], text)

    _run(act)


@endpoints.command()
@endpoint_arguments
@wait_option
@empty_option
@click.option("--force", is_flag=True, help="Cut its requests at once; they are tried again where that is safe.")
def remove(role: str, endpoint: str, wait_s: float, allow_empty: bool, force: bool, **connection: Any) -> None:
    """Drain an engine and forget it when its last request has ended. With --wait-s, wait for that."""

    def act() -> None:
        client = client_of(connection["url"], connection["admin_key_file"])
        body = {"role": role, "url": endpoint, "allow_empty": allow_empty, "force": force}
        answer = client.ask("DELETE", "/endpoints", body)
        row = answer["endpoint"]
        if not answer["is_removed"]:
            row = _waited(client, row, lambda row: row is None, wait_s)
        num_active = row["active_requests"]
        words = "removed" if not num_active else f"removed when its {num_active} requests have ended"
        _say(answer, connection["is_json"], f"{role} engine {row['url']} is {words}")

    _run(act)


def table(answer: dict[str, Any]) -> list[str]:
    """The lines of ``endpoints list``."""
    rows = [("ROLE", "URL", "STATE", "ACTIVE", "ANSWERED", "EJECTIONS")]
    rows += [
        (
            row["role"],
            row["url"],
            _state(row),
            str(row["active_requests"]),
            str(row["answered"]),
            str(row["ejections"]),
        )
        for row in answer["endpoints"]
    ]
    return table_lines(rows)


def _state(row: dict[str, Any]) -> str:
    if row["is_warming"]:
        return "warming"
    if row["is_leaving"]:
        return "leaving"
    return f"{row['state']} ({row['cause']})" if row["cause"] else str(row["state"])


def _waited(
    client: RouterClient, row: dict[str, Any], holds: Callable[[dict[str, Any] | None], bool], wait_s: float
) -> dict[str, Any]:
    """The endpoint's row once it ``holds``, None standing for one that is gone; the row that there is without a wait.

    Raises:
        AntiphonError: not within ``wait_s``.
    """
    if not wait_s:
        return row
    deadline_s = time.monotonic() + wait_s
    while True:
        rows = client.ask("GET", "/endpoints")["endpoints"]
        found = next((one for one in rows if (one["role"], one["url"]) == (row["role"], row["url"])), None)
        if holds(found):
            return found if found is not None else row | {"active_requests": 0}
        if time.monotonic() >= deadline_s:
            shown = "gone" if found is None else f"{_state(found)}, {found['active_requests']} requests in flight"
            raise AntiphonError(f"not done within {wait_s:g} s: {row['role']} engine {row['url']} is {shown}")
        time.sleep(POLL_INTERVAL_S)


def _say(answer: dict[str, Any], is_json: bool, text: str) -> None:
    click.echo(json.dumps(answer, indent=2) if is_json else text)
    if "warning" in answer:
        click.echo(f"warning: {answer['warning']}", err=True)


def client_of(url: str, admin_key_file: str | None) -> RouterClient:
    """A client of the router at ``url``, with the key in a file where one is named.

    Raises:
        ConfigError: no address, or no key.
    """
    key = None
    if admin_key_file is not None:
        try:
            key = Path(admin_key_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--admin-key-file {admin_key_file} cannot be read: {error}") from error
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(f"--admin-key-file {admin_key_file} holds no key")
    return RouterClient(url, key)


def _run(act: Callable[[], None]) -> None:
    """An error of ours is a message and an exit code."""
    try:
        act()
    except AntiphonError as error:
        text = error.message if error.remedy is None else f"{error.message}\n  fix: {error.remedy}"
        click.echo(f"antiphon endpoints: {text}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
