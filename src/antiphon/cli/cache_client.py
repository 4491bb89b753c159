"""What the verbs of ``antiphon cache`` share: the questions to a server's admin address, and how answers are shown.

Without ``--url`` a verb means every cache server of the deployments that run here, or one that listens at the default
address.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import click

from antiphon.cli.asking import Asker, Kind
from antiphon.cli.shown import printable
from antiphon.cli.status import collect
from antiphon.config.supervisor_spec import default_state_dir
from antiphon.core.errors import AntiphonError, ConfigError

DEFAULT_URL: Final = "http://127.0.0.1:8090"
TIMEOUT_S: Final = 5.0
KIND: Final = Kind(
    "cache server", "--url", "start one with antiphon cache-server or antiphon up, or name its --http-port with --url"
)
REFUSALS_TOLD: Final = 5

FIELDS: Final = {
    "/status": frozenset(("instance", "storage_manager", "tokens", "reports", "leases", "engines", "tenants", "pins")),
    "/leases": frozenset(("leases", "num_left_out")),
    "/events": frozenset(("incarnation", "next", "num_lost", "events")),
    "/clear": frozenset(("num_chunks", "freed_bytes", "held_bytes", "num_unpinned", "tiers")),
    "/namespaces": frozenset(("namespaces", "num_left_out")),
    "/chunks": frozenset(("after", "chunks")),
    "/chunks/facts": frozenset(("after", "chunks", "chunk_size_tokens")),
    "/pins": frozenset(("pins", "pinned_bytes", "pinned_bytes_max")),
    "/pin": frozenset(("key", "num_chunks", "num_named", "num_bytes")),
    "/unpin": frozenset(("num_pins", "pinned_bytes")),
    "/quota": frozenset(("quotas", "num_left_out", "default_quota_bytes")),
    "PUT /quota": frozenset(("tenant", "quota_bytes", "used_bytes", "num_evicted")),
}
"""By what an answer is known: servers of other kinds have a ``/status`` too."""

ROUTE_NOT_FOUND: Final = "route_not_found"

Command = TypeVar("Command", bound=Callable[..., Any])


class NotThere(AntiphonError):
    """The server has nothing of what was named."""


class ServerRefuses(AntiphonError):
    """The server answers, and does not do what it was asked.

    Args:
        message, remedy: for people.
        code: why, as the server names it; empty where it does not.
    """

    def __init__(self, message: str, *, remedy: str | None = None, code: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class AdminClient:
    """Asks one cache server, one connection a question, no proxy.

    Args:
        url: ``http://HOST:PORT``.

    Raises:
        ConfigError: ``url`` is none.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._asker = Asker(url, KIND)

    def get(self, path: str, *, wait_s: float | None = None, **query: object) -> dict[str, Any]:
        """The JSON answer to a GET.

        Args:
            wait_s: of a long poll; it is added to the time that the answer may take.
            query: parameters.

        Raises:
            NoAnswer: no server answers there, or not in time.
            ProtocolError: something else does.
            NotThere: the server has nothing of what was named.
            ServerRefuses: the server refuses.
        """
        if wait_s is not None:
            query["wait_s"] = wait_s
        return self._ask("GET", path, urlencode(query), None, wait_s or 0.0)

    def post(self, path: str, body: object) -> dict[str, Any]:
        """The JSON answer to a POST. Raises as ``get``."""
        return self._ask("POST", path, "", body)

    def put(self, path: str, body: object) -> dict[str, Any]:
        """The JSON answer to a PUT. Raises as ``get``."""
        return self._ask("PUT", path, "", body)

    def _ask(self, method: str, path: str, query: str, body: object, wait_s: float = 0.0) -> dict[str, Any]:
        where = f"{path}?{query}" if query else path
        status, answer = self._asker.ask(method, where, body, timeout_s=TIMEOUT_S + wait_s)
        detail = answer.get("error")
        code = detail.get("code") if isinstance(detail, dict) else None
        if status == HTTPStatus.NOT_FOUND and code in (None, ROUTE_NOT_FOUND):
            raise self._asker.wrong_kind(f"it has no {path}")
        if "error" in answer:
            message = printable(str(detail.get("message") if isinstance(detail, dict) else detail))
            if status == HTTPStatus.NOT_FOUND:
                raise NotThere(f"{self.url}: {message}")
            raise ServerRefuses(
                f"{self.url} refuses {method} {path}: {message} (status {status})", code=str(code or "")
            )
        lacking = sorted(FIELDS.get(f"{method} {path}", FIELDS[path]) - answer.keys())
        if lacking:
            raise self._asker.wrong_kind(f"{path} lacks {', '.join(lacking)}")
        return answer


def admin_options(command: Command) -> Command:
    """The options that every verb of the group has."""
    command = click.option("--json", "is_json", is_flag=True, help="Print JSON as the server sends it.")(command)
    return click.option(
        "--url",
        "urls",
        multiple=True,
        help="A server's admin address, http://HOST:PORT of its --http-port; several times for several. Default: the "
        f"cache servers of what antiphon up runs here, or {DEFAULT_URL}.",
    )(command)


def targets(urls: Sequence[str]) -> list[AdminClient]:
    """The servers meant: those named, else those of the running deployments, else the default address.

    Raises:
        ConfigError: a URL is none.
    """
    if not urls:
        rows = [row for report in collect(default_state_dir(), None) for row in report.processes]
        urls = [row.base_url for row in rows if row.role == "cache_server" and row.state == "ready"] or [DEFAULT_URL]
    return [AdminClient(url) for url in urls]


def show(answers: list[dict[str, Any]], is_json: bool, lines_of: Callable[[dict[str, Any]], list[str]]) -> None:
    """Prints what each server answered, one after the other; as JSON a list, or the answer itself where it is one."""
    if is_json:
        click.echo(json.dumps(answers[0] if len(answers) == 1 else answers, indent=2))
    else:
        click.echo("\n\n".join("\n".join(lines_of(answer)) for answer in answers))


def run(act: Callable[[], int]) -> None:
    """Exit with what ``act`` returns; an error of ours is a message and exit code 1."""
    try:
        code = act()
    except AntiphonError as error:
        _tell(error)
        code = 2 if isinstance(error, ConfigError) else 1
    sys.exit(code)


def _tell(error: AntiphonError, url: str = "") -> None:
    """An error for people, with the server's address where the error does not have it."""
    where = "" if url in error.message else f"{url}: "
    fix = "" if error.remedy is None else f"\n  fix: {error.remedy}"
    click.echo(f"antiphon cache: {where}{error.message}{fix}", err=True)


Asked = TypeVar("Asked")


def each(servers: Sequence[AdminClient], ask: Callable[[AdminClient], Asked]) -> list[tuple[AdminClient, Asked]]:
    """What each server answers. Of several, one that has nothing of what was named is told of and left out.

    Raises:
        NotThere: none of them has.
        AntiphonError: as ``AdminClient``.
    """
    answers: list[tuple[AdminClient, Asked]] = []
    lacking: list[NotThere] = []
    for server in servers:
        try:
            answers.append((server, ask(server)))
        except NotThere as error:
            lacking.append(error)
    if lacking and not answers:
        raise lacking[0]
    for left_out in lacking:
        click.echo(f"antiphon cache: {left_out.message}", err=True)
    return answers


def change_each(servers: Sequence[AdminClient], change: Callable[[AdminClient], None]) -> int:
    """Has each server do ``change``, which prints what was done. None keeps those after it from being asked.

    Of several, those that have nothing of what was named are told of; those that refuse or do not answer are told of,
    and named at the end.

    Returns:
        The exit code: 0; or 1 where one failed, or none has it; or 2 where all failed by what cannot be meant.

    Raises:
        AntiphonError: what the only server raises, as ``AdminClient``.
    """
    lacking: list[tuple[AdminClient, AntiphonError]] = []
    failed: list[tuple[AdminClient, AntiphonError]] = []
    for server in servers:
        try:
            change(server)
        except AntiphonError as error:
            if len(servers) == 1:
                raise
            (lacking if isinstance(error, NotThere) else failed).append((server, error))
    for server, told in (*lacking, *failed):
        _tell(told, server.url)
    if failed:
        names = ", ".join(server.url for server, _ in failed)
        click.echo(f"antiphon cache: not done by {len(failed)} of {len(servers)} servers: {names}", err=True)
        is_meant = len(failed) < len(servers) or not all(isinstance(told, ConfigError) for _, told in failed)
        return 1 if is_meant else 2
    return 1 if len(lacking) == len(servers) else 0


def all_of(refused: Sequence[ServerRefuses]) -> ServerRefuses:
    """Several refusals of one server as one; the first few are told."""
    messages = list(dict.fromkeys(error.message for error in refused))
    more = f"; and {len(messages) - REFUSALS_TOLD} more" if len(messages) > REFUSALS_TOLD else ""
    return ServerRefuses("; ".join(messages[:REFUSALS_TOLD]) + more)


def format_bytes(num_bytes: int) -> str:
    """``3221225472`` as ``3.00 GiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
