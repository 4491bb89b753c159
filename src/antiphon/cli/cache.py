"""``antiphon cache``: look at running cache servers, and clear them, through their admin addresses.

Without ``--url`` it means every cache server of the deployments that run here, or one that listens at the default
address. Exit code 0; 1 where no server answers, or it refuses; ``status`` also where one says that it is not healthy.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import urlencode, urlsplit

import click

from antiphon.cli.status import collect, format_uptime
from antiphon.config.supervisor_spec import default_state_dir
from antiphon.core.errors import AntiphonError, CacheUnavailable, CallTimeout, ConfigError, ProtocolError

DEFAULT_URL: Final = "http://127.0.0.1:8090"
TIMEOUT_S: Final = 5.0
POLL_WAIT_S: Final = 20.0
ANSWER_MAX_BYTES: Final = 16 << 20
TENANTS_SHOWN: Final = 20

FIELDS: Final = {
    "/status": frozenset(("instance", "storage_manager", "tokens", "reports", "leases", "engines", "tenants")),
    "/leases": frozenset(("leases", "num_left_out")),
    "/events": frozenset(("incarnation", "next", "num_lost", "events")),
    "/clear": frozenset(("num_chunks", "freed_bytes", "held_bytes")),
}
"""By what an answer is known: servers of other kinds have a ``/status`` too."""

Command = TypeVar("Command", bound=Callable[..., Any])


class AdminClient:
    """Asks one cache server, one connection a question, no proxy.

    Args:
        url: ``http://HOST:PORT``.

    Raises:
        ConfigError: ``url`` is none.
    """

    def __init__(self, url: str) -> None:
        text = url if "//" in url else f"http://{url}"
        wrong = ConfigError(f"--url {url}: not an address of the form http://HOST:PORT")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme != "http" or not host or parts.path.strip("/") or parts.query:
            raise wrong
        self.url = url
        self._host = host
        self._port = port or 80

    def get(self, path: str, *, wait_s: float | None = None, **query: object) -> dict[str, Any]:
        """The JSON answer to a GET.

        Args:
            wait_s: of a long poll; it is added to the time that the answer may take.
            query: parameters.

        Raises:
            CacheUnavailable, CallTimeout: no server answers there.
            ProtocolError: something else does.
            AntiphonError: the server refuses.
        """
        if wait_s is not None:
            query["wait_s"] = wait_s
        return self._ask("GET", path, urlencode(query), None, TIMEOUT_S + (wait_s or 0.0))

    def post(self, path: str, body: object) -> dict[str, Any]:
        """The JSON answer to a POST. Raises as ``get``."""
        return self._ask("POST", path, "", json.dumps(body).encode(), TIMEOUT_S)

    def _ask(self, method: str, path: str, query: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method, f"{path}?{query}" if query else path, body=body, headers=headers)
            response = connection.getresponse()
            status, data, num_missing = response.status, response.read(ANSWER_MAX_BYTES), response.length
        except TimeoutError as error:
            raise CallTimeout(
                f"the cache server at {self.url} did not answer within {timeout_s:g} s",
                remedy="it hangs or the machine is overloaded: look at its log, or restart it",
            ) from error
        except OSError as error:
            raise CacheUnavailable(
                f"no cache server answers at {self.url}: {error.strerror or error}",
                remedy="start one with antiphon cache-server or antiphon up, or name its --http-port with --url",
            ) from error
        except http.client.HTTPException as error:
            raise _not_a_cache_server(self.url, repr(error)) from error
        finally:
            connection.close()
        if num_missing:
            raise _not_a_cache_server(self.url, f"{num_missing} bytes of its answer are missing, or too many")
        try:
            answer = json.loads(data)
        except ValueError:
            raise _not_a_cache_server(self.url, f"status {status}, no JSON") from None
        if not isinstance(answer, dict):
            raise _not_a_cache_server(self.url, f"status {status}, no JSON object")
        if status == HTTPStatus.NOT_FOUND:
            raise _not_a_cache_server(self.url, f"it has no {path}")
        if "error" in answer:
            detail = answer["error"]
            message = detail.get("message") if isinstance(detail, dict) else detail
            raise AntiphonError(f"{self.url} refuses {method} {path}: {_printable(str(message))} (status {status})")
        lacking = sorted(FIELDS[path] - answer.keys())
        if lacking:
            raise _not_a_cache_server(self.url, f"{path} lacks {', '.join(lacking)}")
        return answer


def _not_a_cache_server(url: str, what: str) -> ProtocolError:
    return ProtocolError(
        f"what answers at {url} is no cache server ({what})", remedy="name the server's --http-port with --url"
    )


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


def _show(answers: list[dict[str, Any]], is_json: bool, lines_of: Callable[[dict[str, Any]], list[str]]) -> None:
    """Prints what each server answered, one after the other; as JSON a list, or the answer itself where it is one."""
    if is_json:
        click.echo(json.dumps(answers[0] if len(answers) == 1 else answers, indent=2))
    else:
        click.echo("\n\n".join("\n".join(lines_of(answer)) for answer in answers))


@click.group()
def cache() -> None:
    """Look at a running cache server, or clear it."""


def _run(act: Callable[[], int]) -> None:
    """Exit with what ``act`` returns; an error of ours is a message and exit code 1."""
    try:
        code = act()
    except AntiphonError as error:
        text = error.message if error.remedy is None else f"{error.message}\n  fix: {error.remedy}"
        click.echo(f"antiphon cache: {text}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
    sys.exit(code)


@cache.command()
@admin_options
def status(urls: tuple[str, ...], is_json: bool) -> None:
    """Show what each server holds, what it was asked, and which engines are attached."""

    def act() -> int:
        answers = [server.get("/status") for server in targets(urls)]
        _show(answers, is_json, status_lines)
        return 0 if all(answer["is_healthy"] for answer in answers) else 1

    _run(act)


@cache.command()
@admin_options
def leases(urls: tuple[str, ...], is_json: bool) -> None:
    """Show who protects chunks from eviction, oldest first."""

    def act() -> int:
        servers = targets(urls)
        for server in servers:
            if len(servers) > 1 and not is_json:
                click.echo(f"{server.url}:")
            _show([server.get("/leases")], is_json, leases_lines)
        return 0

    _run(act)


@cache.command()
@admin_options
@click.option("--tenant", help="Only this tenant's chunks: a cache_salt, or default.")
@click.option("--model", help="Only chunks of this model.")
def clear(urls: tuple[str, ...], is_json: bool, tenant: str | None, model: str | None) -> None:
    """Forget chunks: of a tenant, of a model, of both, or, with neither, all.

    What a request is reading or writing at the moment is forgotten too; its bytes become free when that has ended.
    """

    def act() -> int:
        names = {"tenant": tenant, "model": model}
        body = {name: value for name, value in names.items() if value is not None}
        for server in targets(urls):
            answer = server.post("/clear", body)
            click.echo(json.dumps(answer, indent=2) if is_json else cleared_line(server.url, answer))
        return 0

    _run(act)


@cache.command()
@admin_options
@click.option("--once", "is_once", is_flag=True, help="Print what there is, and end.")
def events(urls: tuple[str, ...], is_json: bool, is_once: bool) -> None:
    """Print chunks as they are stored and removed, from the oldest one known, until Ctrl-C. With --json, one a line."""

    def act() -> int:
        servers = targets(urls)
        if len(servers) > 1:
            names = ", ".join(server.url for server in servers)
            raise ConfigError(
                f"events are those of one server, and {len(servers)} run", remedy=f"--url with one of {names}"
            )
        try:
            for event in follow(servers[0], is_once=is_once):
                click.echo(json.dumps(event) if is_json else event_line(event))
        except KeyboardInterrupt:
            click.echo("", err=True)
        return 0

    _run(act)


def follow(client: AdminClient, *, is_once: bool) -> Iterator[dict[str, Any]]:
    """The events of a server, oldest first; a ``lost`` or ``restarted`` entry where the sequence breaks.

    A server that goes away after it was seen is waited for; one that was never there is an error.
    """
    since = 1
    incarnation: str | None = None
    while True:
        known: dict[str, object] = {} if incarnation is None else {"incarnation": incarnation}
        try:
            answer = client.get("/events", wait_s=0.0 if is_once else POLL_WAIT_S, since=since, **known)
        except (CacheUnavailable, CallTimeout):
            if incarnation is None or is_once:
                raise
            time.sleep(1.0)
            continue
        if incarnation not in (None, answer["incarnation"]):
            yield {"kind": "restarted", "incarnation": answer["incarnation"]}
        incarnation = answer["incarnation"]
        if answer["num_lost"]:
            yield {"kind": "lost", "num_lost": answer["num_lost"]}
        yield from answer["events"]
        since = answer["next"]
        if is_once and not answer["events"]:
            return


def cleared_line(url: str, answer: dict[str, Any]) -> str:
    """What was cleared, for people."""
    freed, held = format_bytes(answer["freed_bytes"]), format_bytes(answer["held_bytes"])
    later = f", {held} more when their requests end" if answer["held_bytes"] else ""
    return f"{url}: {answer['num_chunks']} chunks forgotten, {freed} free at once{later}"


# ---- tables ----------------------------------------------------------------------------------------------------------


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells in columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def format_bytes(num_bytes: int) -> str:
    """``3221225472`` as ``3.00 GiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _printable(text: str) -> str:
    """Names come from clients: what would move a terminal's cursor is shown, not sent."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def status_lines(answer: dict[str, Any]) -> list[str]:
    """``/status`` for people."""
    l1, tokens, leased = answer["storage_manager"]["l1_manager"], answer["tokens"], answer["leases"]
    total_bytes, usable_bytes = l1["memory_total_bytes"], l1["memory_usable_bytes"]
    health = "healthy" if answer["is_healthy"] else f"NOT HEALTHY: {_printable(answer['reason'])}"
    name = f"{_printable(answer['instance'])} ({answer['incarnation']})"
    usable = "" if usable_bytes == total_bytes else f", {_share(usable_bytes, total_bytes)} usable so far"
    states = ", ".join(f"{count} {state}" for state, count in leased["by_state"].items())
    sources = ", ".join(f"{source} {count}" for source, count in tokens["reported"].items())
    rows = [
        ("memory", f"{format_bytes(l1['memory_used_bytes'])} of {format_bytes(total_bytes)} used{usable}"),
        ("chunks", f"{l1['total_object_count']} of {answer['chunk_size_tokens']} tokens, {answer['eviction_policy']}"),
        ("prompts", f"{sources} tokens, of {answer['reports']['count']} requests of an engine"),
        ("lookups", f"{tokens['hit']} of {tokens['lookup']} tokens found ({_share(tokens['hit'], tokens['lookup'])})"),
        ("leases", f"{leased['count']}{f' ({states})' if states else ''}, {format_bytes(leased['leased_bytes'])}"),
    ]
    return [
        f"{name}, version {answer['version']}, up {format_uptime(answer['uptime_s'])}: {health}",
        *([f"its memory is not complete: {_printable(l1['detail'])}"] if l1["detail"] else []),
        *(f"{title:<9} {text}" for title, text in rows),
        *map(_tier_line, answer["storage_manager"].get("l2_tiers", ())),
        "",
        *_engine_lines(answer["engines"]),
        *_tenant_lines(answer["tenants"]),
    ]


def _tier_line(tier: dict[str, Any]) -> str:
    """One tier behind the memory."""
    fetches, publications, queue = tier["fetches"], tier["publications"], tier["queue"]
    num_asked = fetches["hit"] + fetches["miss"] + fetches["corrupt"]
    state = "" if tier["is_healthy"] else f"; OUT OF SERVICE ({tier['breaker']}): {_printable(tier['reason'] or '')}"
    holds = f"{tier['total_object_count']} chunks, {format_bytes(tier['held_bytes'])}"
    return (
        f"{'tier':<9} {_printable(tier['name'])}: {holds}; "
        f"{fetches['hit']} of {num_asked} read, {publications['published']} stored, {format_bytes(queue['bytes'])} wait"
        f"{state}"
    )


def _engine_lines(engines: list[dict[str, Any]]) -> list[str]:
    processes = [(engine, each) for engine in engines for each in engine["processes"]]
    if not processes:
        return ["no engine is attached"]
    rows = [
        tuple(map(_printable, (engine["engine"], each["role"], str(each["pid"]), engine["model"], _gate(each))))
        for engine, each in processes
    ]
    failed = [
        f"{_printable(engine['engine'])} {_printable(each['role'])} reuses nothing: {_printable(each['detail'])}"
        for engine, each in processes
        if each["gate"] == "failed"
    ]
    return [*table_lines([("engine", "process", "pid", "model", "gate"), *rows]), *failed]


def _gate(process: dict[str, Any]) -> str:
    """A scheduler copies nothing: only workers have a gate."""
    return str(process["gate"]) if process["role"].startswith("worker") else "-"


def _tenant_lines(tenants: dict[str, dict[str, Any]]) -> list[str]:
    largest = sorted(tenants.items(), key=lambda item: -item[1]["used_bytes"])[:TENANTS_SHOWN]
    if not largest:
        return []
    rows = [
        (_printable(name) or "(none)", format_bytes(each["used_bytes"]), _quota(each), *_hits(each["tokens"]))
        for name, each in largest
    ]
    lines = ["", *table_lines([("tenant", "used", "quota", "hit tokens", "hit rate"), *rows])]
    num_left_out = len(tenants) - len(largest)
    return lines + ([f"and {num_left_out} more tenants (--json shows all)"] if num_left_out else [])


def _quota(tenant: dict[str, Any]) -> str:
    return "-" if tenant["quota_bytes"] is None else format_bytes(tenant["quota_bytes"])


def _hits(tokens: dict[str, int]) -> tuple[str, str]:
    return str(tokens["hit"]), _share(tokens["hit"], tokens["hit"] + tokens["miss"])


def leases_lines(answer: dict[str, Any]) -> list[str]:
    """``/leases`` for people."""
    if not answer["leases"]:
        return ["no lease is held"]
    rows = [
        (
            str(each["lease"]),
            each["state"],
            format_uptime(each["age_s"]),
            str(each["num_chunks"]),
            format_bytes(each["num_bytes"]),
            _printable(each["engine"]),
            _printable(each["request"]),
        )
        for each in answer["leases"]
    ]
    lines = table_lines([("lease", "state", "age", "chunks", "bytes", "engine", "request"), *rows])
    return lines + ([f"and {answer['num_left_out']} younger ones"] if answer["num_left_out"] else [])


def event_line(event: dict[str, Any]) -> str:
    """One event for people."""
    if event["kind"] == "lost":
        return f"({event['num_lost']} events are lost: they were gone before they were read)"
    if event["kind"] == "restarted":
        return f"(the server restarted and is empty: {event['incarnation']})"
    reason = f" ({event['reason']})" if event["kind"] == "removed" else ""
    tenant = f" tenant {_printable(event['tenant'])}" if event["tenant"] else ""
    size = format_bytes(event["num_bytes"])
    model = _printable(event["model"])
    return f"{event['sequence']:>8}  {event['kind']:<7}  {event['key'][:16]}  {size:>10}  {model}{tenant}{reason}"
