"""``antiphon cache clear``: forget chunks, in memory and in the tiers, and say what of that is not finished."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import click

from antiphon.cli.cache_client import (
    AdminClient,
    ServerRefuses,
    admin_options,
    change_each,
    format_bytes,
    run,
    targets,
)
from antiphon.cli.shown import printable
from antiphon.core.errors import AntiphonError

CLEAR_WAIT_S: Final = 10.0
"""For the tiers of a server, after it has answered a clear; what takes longer goes on without this."""
_ASK_AGAIN_S: Final = 0.1
CHUNKS_PINNED: Final = "chunks_pinned"
"""The code of a clear that is refused since something is pinned."""

tenant_option = click.option("--tenant", help="Only this tenant's chunks: a cache_salt, or default.")
model_option = click.option("--model", help="Only chunks of this model.")


@click.command()
@admin_options
@tenant_option
@model_option
@click.option("--pinned", "with_pinned", is_flag=True, help="What is pinned too; without this, nothing goes then.")
def clear(urls: tuple[str, ...], is_json: bool, tenant: str | None, model: str | None, with_pinned: bool) -> None:
    """Forget chunks: of a tenant, of a model, of both, or, with neither, all; in memory and in the tiers behind it.

    What a request is reading or writing at the moment is forgotten too; its bytes become free when that has ended. A
    large tier takes its time: after 10 s this says so, and the server goes on.
    """

    def act() -> int:
        names = {"tenant": tenant, "model": model}
        body: dict[str, object] = {name: value for name, value in names.items() if value is not None}
        if with_pinned:
            body["pinned"] = True
        sharing: list[AdminClient] = []

        def change(server: AdminClient) -> None:
            answer = _after_clear(server, _clear_at(server, body))
            click.echo(json.dumps(answer, indent=2) if is_json else "\n".join(cleared_lines(server.url, answer)))
            if answer.get("has_peers") or any(tier["is_shared"] for tier in answer["tiers"]):
                sharing.append(server)

        code = change_each(targets(urls), change)
        if sharing and not is_json:
            click.echo(
                "cache servers that are not named here keep what they hold in memory: run this on their hosts too"
            )
        return code

    run(act)


def _clear_at(server: AdminClient, body: dict[str, object]) -> dict[str, Any]:
    try:
        return server.post("/clear", body)
    except ServerRefuses as error:
        if error.code != CHUNKS_PINNED:
            raise
        raise ServerRefuses(error.message, remedy="antiphon cache unpin --all, or clear --pinned") from error


def _after_clear(server: AdminClient, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer to a clear with ``clears_pending`` of each tier as it is when all are through, or the time is up, or
    the server answers no more."""
    end_s = time.monotonic() + CLEAR_WAIT_S
    while any(tier["clears_pending"] for tier in answer["tiers"]) and time.monotonic() < end_s:
        time.sleep(_ASK_AGAIN_S)
        try:
            status = server.get("/status")
        except AntiphonError:
            break
        now = {each["name"]: each for each in status["storage_manager"].get("l2_tiers", ())}
        for tier in answer["tiers"]:
            tier["clears_pending"] = now.get(tier["name"], tier)["clears_pending"]
    return answer


def cleared_lines(url: str, answer: dict[str, Any]) -> list[str]:
    """What was cleared, for people."""
    freed, held = format_bytes(answer["freed_bytes"]), format_bytes(answer["held_bytes"])
    later = f", {held} more when their requests end" if answer["held_bytes"] else ""
    pins = f", {count_text(answer['num_unpinned'], 'pin')} ended" if answer["num_unpinned"] else ""
    lines = [f"{url}: {count_text(answer['num_chunks'], 'chunk')} forgotten, {freed} free at once{later}{pins}"]
    if not answer["is_known"]:
        lines.append("  nothing here is known to have that; a tier that others write to may")
    return lines + [_cleared_tier_line(tier) for tier in answer["tiers"]]


def _cleared_tier_line(tier: dict[str, Any]) -> str:
    name = printable(tier["name"])
    shared = ", for all that use it; others may store them again" if tier["is_shared"] else ""
    if not tier["can_list"]:
        shared = ", ONLY what this server knows to be there: it cannot be listed, and keeps what else it has"
    if tier["clears_pending"]:
        return (
            f"  NOT FINISHED in {name}{shared}; the server goes on, and finds nothing of it there meanwhile "
            "(antiphon cache status --json: clears_pending)"
        )
    return f"  and in {name}{shared}"


def count_text(num: int, what: str) -> str:
    """``1 pin``, ``2 pins``."""
    return f"{num} {what}" if num == 1 else f"{num} {what}s"
