"""``antiphon cache``: look at running cache servers, and control them, through their admin addresses.

Exit code 0; 1 where no server answers, or it refuses, or has nothing of what is named; ``status`` also where one says
that it is not healthy; 2 for a command line that cannot be meant. The verbs that change something are in
``cache_control`` and ``cache_clear``, ``list`` in ``cache_list``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final

import click

from antiphon.cli import cache_control
from antiphon.cli.asking import NoAnswer
from antiphon.cli.cache_client import (
    AdminClient,
    admin_options,
    format_bytes,
    run,
    share,
    show,
    targets,
)
from antiphon.cli.cache_list import list_verb
from antiphon.cli.shown import printable, table_lines
from antiphon.cli.status import format_uptime
from antiphon.core.errors import ConfigError

POLL_WAIT_S: Final = 20.0
TENANTS_SHOWN: Final = 20


@click.group()
def cache() -> None:
    """Look at running cache servers, and say what they keep."""


for verb in (list_verb, *cache_control.VERBS):
    cache.add_command(verb)


@cache.command()
@admin_options
def status(urls: tuple[str, ...], is_json: bool) -> None:
    """Show what each server holds, what it was asked, and which engines are attached."""

    def act() -> int:
        answers = [server.get("/status") for server in targets(urls)]
        show(answers, is_json, status_lines)
        return 0 if all(answer["is_healthy"] for answer in answers) else 1

    run(act)


@cache.command()
@admin_options
def leases(urls: tuple[str, ...], is_json: bool) -> None:
    """Show who protects chunks from eviction, oldest first."""

    def act() -> int:
        servers = targets(urls)
        for server in servers:
            if len(servers) > 1 and not is_json:
                click.echo(f"{server.url}:")
            show([server.get("/leases")], is_json, leases_lines)
        return 0

    run(act)


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

    run(act)


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
        except NoAnswer:
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


# ---- tables ----------------------------------------------------------------------------------------------------------


def status_lines(answer: dict[str, Any]) -> list[str]:
    """``/status`` for people."""
    l1, tokens, leased = answer["storage_manager"]["l1_manager"], answer["tokens"], answer["leases"]
    total_bytes, usable_bytes = l1["memory_total_bytes"], l1["memory_usable_bytes"]
    pins = answer["pins"]
    most_bytes = pins["pinned_bytes_max"]
    health = "healthy" if answer["is_healthy"] else f"NOT HEALTHY: {printable(answer['reason'])}"
    name = f"{printable(answer['instance'])} ({answer['incarnation']})"
    usable = "" if usable_bytes == total_bytes else f", {share(usable_bytes, total_bytes)} usable so far"
    states = ", ".join(f"{count} {state}" for state, count in leased["by_state"].items())
    sources = ", ".join(f"{source} {count}" for source, count in tokens["reported"].items())
    rows = [
        ("memory", f"{format_bytes(l1['memory_used_bytes'])} of {format_bytes(total_bytes)} used{usable}"),
        ("chunks", f"{l1['total_object_count']} of {answer['chunk_size_tokens']} tokens, {answer['eviction_policy']}"),
        ("prompts", f"{sources} tokens, of {answer['reports']['count']} requests of an engine"),
        ("lookups", f"{tokens['hit']} of {tokens['lookup']} tokens found ({share(tokens['hit'], tokens['lookup'])})"),
        ("pins", f"{pins['count']}, {format_bytes(pins['pinned_bytes'])} of at most {format_bytes(most_bytes)}"),
        ("leases", f"{leased['count']}{f' ({states})' if states else ''}, {format_bytes(leased['leased_bytes'])}"),
    ]
    return [
        f"{name}, version {answer['version']}, up {format_uptime(answer['uptime_s'])}: {health}",
        *([f"its memory is not complete: {printable(l1['detail'])}"] if l1["detail"] else []),
        *(f"{title:<9} {text}" for title, text in rows),
        *map(_tier_line, answer["storage_manager"].get("l2_tiers", ())),
        *([_peers_line(answer["peers"])] if "peers" in answer else []),
        "",
        *_engine_lines(answer["engines"]),
        *_tenant_lines(answer["tenants"]),
    ]


def _tier_line(tier: dict[str, Any]) -> str:
    """One tier behind the memory."""
    fetches, publications, queue = tier["fetches"], tier["publications"], tier["queue"]
    num_asked = fetches["hit"] + fetches["miss"] + fetches["corrupt"]
    state = "" if tier["is_healthy"] else f"; OUT OF SERVICE ({tier['breaker']}): {printable(tier['reason'] or '')}"
    if tier["is_healthy"] and tier["reason"]:
        state = f"; REFUSES WHAT IS WRITTEN: {printable(tier['reason'])}"
    holds = f"{tier['total_object_count']} chunks, {format_bytes(tier['held_bytes'])}"
    return (
        f"{'tier':<9} {printable(tier['name'])}: {holds}; "
        f"{fetches['hit']} of {num_asked} read, {publications['published']} stored, {format_bytes(queue['bytes'])} wait"
        f"{state}"
    )


def _peers_line(peers: dict[str, Any]) -> str:
    """Whether it shares with other cache servers."""
    coordinator = printable(peers["coordinator_url"])
    if not peers["is_member"]:
        state = f"NOT SHARING, no member at {coordinator}: {printable(peers['reason'] or '')}"
    else:
        state = f"a member of the cluster at {coordinator}"
        state += "" if peers["is_listed"] else ", which is still told what is here"
    return f"{'peers':<9} {state}"


def _engine_lines(engines: list[dict[str, Any]]) -> list[str]:
    processes = [(engine, each) for engine in engines for each in engine["processes"]]
    if not processes:
        return ["no engine is attached"]
    rows = [
        tuple(map(printable, (engine["engine"], each["role"], str(each["pid"]), engine["model"], _gate(each))))
        for engine, each in processes
    ]
    failed = [
        f"{printable(engine['engine'])} {printable(each['role'])} reuses nothing: {printable(each['detail'])}"
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
        (printable(name) or "(none)", format_bytes(each["used_bytes"]), _quota(each), *_hits(each["tokens"]))
        for name, each in largest
    ]
    lines = ["", *table_lines([("tenant", "used", "quota", "hit tokens", "hit rate"), *rows])]
    num_left_out = len(tenants) - len(largest)
    return lines + ([f"and {num_left_out} more tenants (--json shows all)"] if num_left_out else [])


def _quota(tenant: dict[str, Any]) -> str:
    return "-" if tenant["quota_bytes"] is None else format_bytes(tenant["quota_bytes"])


def _hits(tokens: dict[str, int]) -> tuple[str, str]:
    return str(tokens["hit"]), share(tokens["hit"], tokens["hit"] + tokens["miss"])


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
            printable(each["engine"]),
            printable(each["request"]),
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
    tenant = f" tenant {printable(event['tenant'])}" if event["tenant"] else ""
    size = format_bytes(event["num_bytes"])
    model = printable(event["model"])
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    return f"{event['sequence']:>8}  {at}  {event['kind']:<7}  {event['key'][:16]}  {size:>10}  {model}{tenant}{reason}"
