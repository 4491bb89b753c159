"""``antiphon cache list``: what cache servers hold, by namespace, and chunk by chunk."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from antiphon.cli.cache_client import (
    AdminClient,
    admin_options,
    each,
    format_bytes,
    run,
    targets,
)
from antiphon.cli.shown import printable, table_lines
from antiphon.cli.status import format_uptime
from antiphon.core.tenants import tenant_named

NAMESPACES_SHOWN: Final = 20
CHUNKS_SHOWN: Final = 100
LIMIT_MAX: Final = 100_000
PAGE_CHUNKS: Final = 1_000
KEY_SHOWN: Final = 16
"""Hex digits of a key in a table: enough to name it."""


@click.command("list")
@admin_options
@click.option("--tenant", help="Only this tenant's: a cache_salt, or default.")
@click.option("--model", help="Only those of this model.")
@click.option("--chunks", "has_chunks", is_flag=True, help="Also each chunk, in the order in which its room was given.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    help=f"At most so many namespaces ({NAMESPACES_SHOWN}), or, with --chunks, chunks ({CHUNKS_SHOWN}); up to 1000 and "
    f"{LIMIT_MAX}.",
)
def list_verb(
    urls: tuple[str, ...], is_json: bool, tenant: str | None, model: str | None, has_chunks: bool, limit: int | None
) -> None:
    """Show what is held: for each namespace (model and tenant) the sums, the largest first, and the pins.

    Where it is also stored: records of a tier are told by tenant and model. What is there under another server's names
    alone is not listed.
    """
    names: dict[str, Any] = {
        name: value for name, value in {"tenant": tenant, "model": model}.items() if value is not None
    }

    def act() -> int:
        servers = targets(urls)

        def ask(server: AdminClient) -> dict[str, Any]:
            most = min(1_000, (None if has_chunks else limit) or NAMESPACES_SHOWN)
            answer = server.get("/namespaces", limit=most, **names) | {"url": server.url}
            answer["pins"] = _pins_of(server.get("/pins")["pins"], tenant, model)
            if has_chunks:
                answer |= chunks_of(server, limit or CHUNKS_SHOWN, names)
            return answer

        answers = each(servers, ask)
        if is_json:
            shown = [answer for _, answer in answers]
            click.echo(json.dumps(shown[0] if len(servers) == 1 else shown, indent=2))
        else:
            click.echo("\n\n".join("\n".join(list_lines(answer)) for _, answer in answers))
        return 0

    run(act)


def _pins_of(pins: list[dict[str, Any]], tenant: str | None, model: str | None) -> list[dict[str, Any]]:
    """The pins of the tenant and model, those of namespaces that are left out too."""
    name = None if tenant is None else tenant_named(tenant)
    return [pin for pin in pins if name in (None, pin["tenant"]) and model in (None, pin["model"])]


def chunks_of(server: AdminClient, limit: int, names: dict[str, Any]) -> dict[str, Any]:
    """``chunks``: at most ``limit``; ``is_cut``: whether there are more."""
    chunks: list[dict[str, Any]] = []
    after: int | None = 0
    while after is not None and len(chunks) < limit:
        page = server.get("/chunks/facts", after=after, limit=min(PAGE_CHUNKS, limit - len(chunks)), **names)
        chunks += page["chunks"]
        after = page["after"]
    return {"chunks": chunks, "is_cut": after is not None}


# ---- tables ----------------------------------------------------------------------------------------------------------


def list_lines(answer: dict[str, Any]) -> list[str]:
    """What one server holds, for people."""
    namespaces = answer["namespaces"]
    if not namespaces:
        stored = [f"{printable(name)} {count}" for name, count in answer.get("in_tiers", {}).items() if count]
        return [f"{answer['url']}: no chunk is in memory" + (f"; in tiers: {', '.join(stored)}" if stored else "")]
    rows = [
        (
            printable(each["tenant"]),
            printable(each["model"]),
            str(each["num_chunks"]),
            format_bytes(each["num_bytes"]),
            str(each["num_leased"]),
            str(each["num_pinned"]),
            ", ".join(f"{printable(name)} {count}" for name, count in each["in_tiers"].items()) or "-",
            each["namespace"][:KEY_SHOWN],
        )
        for each in namespaces
    ]
    heads = ("tenant", "model", "chunks", "bytes", "leased", "pinned", "in tiers", "namespace")
    lines = [f"{answer['url']}:", *table_lines([heads, *rows])]
    if answer["num_left_out"]:
        lines.append(f"and {answer['num_left_out']} smaller namespaces (--limit)")
    if answer["pins"]:
        lines += ["", *pin_lines(answer["pins"])]
    if "chunks" in answer:
        lines += ["", *_chunk_lines(answer["chunks"], answer["chunk_size_tokens"])]
        lines += ["and more chunks (--limit)"] if answer["is_cut"] else []
    return lines


def pin_lines(pins: list[dict[str, Any]]) -> list[str]:
    """A table of pins."""
    rows = [
        (
            each["key"][:KEY_SHOWN],
            str(each["num_chunks"]),
            str(each["num_tokens"]),
            format_bytes(each["num_bytes"]),
            "-" if each["ends_in_s"] is None else f"in {format_uptime(each['ends_in_s'])}",
            printable(each["tenant"]),
            printable(each["model"]),
        )
        for each in pins
    ]
    return table_lines([("pinned up to", "chunks", "tokens", "bytes", "ends", "tenant", "model"), *rows])


def _chunk_lines(chunks: list[dict[str, Any]], chunk_size: int) -> list[str]:
    rows = [
        (
            each["key"][:KEY_SHOWN],
            _tokens(each["position"], chunk_size),
            format_bytes(each["num_bytes"]),
            format_uptime(each["age_s"]),
            format_uptime(each["unused_s"]),
            str(each["num_leases"]),
            str(each["num_pins"]),
            ", ".join(["memory", *map(printable, each["in_tiers"])]),
            each["namespace"][:KEY_SHOWN],
        )
        for each in chunks
    ]
    heads = ("chunk", "tokens", "bytes", "age", "unused", "leases", "pins", "where", "namespace")
    return table_lines([heads, *rows])


def _tokens(position: int | None, chunk_size: int) -> str:
    return "-" if position is None else f"{position * chunk_size}-{(position + 1) * chunk_size - 1}"
