"""What ``antiphon cache clear`` says, against stand-ins for servers: what it meant, and what is not finished."""

from __future__ import annotations

import json

import pytest

from antiphon.cli import cache_clear
from antiphon.cli.cache_clear import cleared_lines
from tests.cli.test_cache_control import CLEARED, DONE, Said, Sayings, run, saying


def test_what_a_clear_meant_for_people() -> None:
    tiers = [
        {"name": "disk", "is_shared": False, "can_list": True, "clears_pending": 0},
        {"name": "s3\x1b", "is_shared": True, "can_list": True, "clears_pending": 0},
        {"name": "mooncake", "is_shared": True, "can_list": False, "clears_pending": 0},
        {"name": "slow", "is_shared": True, "can_list": True, "clears_pending": 1},
    ]
    cleared = {"num_chunks": 2, "freed_bytes": 1024, "held_bytes": 0, "num_unpinned": 0}
    lines = cleared_lines("u", cleared | {"tiers": tiers, "is_known": False, "has_peers": True})
    assert lines[:3] == [
        "u: 2 chunks forgotten, 1.0 KiB free at once",
        "  nothing here is known to have that; a tier that others write to may",
        "  and in disk",
    ]
    assert lines[3] == "  and in s3\\x1b, for all that use it; others may store them again"
    assert lines[4].startswith("  and in mooncake, ONLY what this server knows to be there: it cannot be listed")
    assert lines[5].startswith("  NOT FINISHED in slow, for all that use it")
    assert len(lines) == 6


@pytest.mark.parametrize("is_late", [False, True])
def test_a_clear_waits_for_the_tiers_and_says_what_is_not_finished(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_clear, "CLEAR_WAIT_S", 0.3)
    left = [99 if is_late else 2]

    def status(_: object) -> Said:
        left[0] -= 1
        parts = dict.fromkeys(("engines", "instance", "leases", "pins", "reports", "tenants", "tokens"))
        return 200, parts | {"storage_manager": {"l2_tiers": [{"name": "s3", "clears_pending": max(0, left[0])}]}}

    tier = {"name": "s3", "is_shared": True, "can_list": True, "clears_pending": 1}
    answer = CLEARED | {"tiers": [tier], "is_known": True, "has_peers": False}
    with saying({"POST /clear": (200, answer), "GET /status": status}) as url:
        result = run("clear", "--url", url)
        told = json.loads(run("clear", "--url", url, "--json").output)
    _, line, others = result.output.splitlines()
    assert line.startswith("  NOT FINISHED in s3" if is_late else "  and in s3,")
    assert others.startswith("cache servers that are not named here keep what they hold")
    assert (told["tiers"][0]["clears_pending"] > 0) == is_late


def test_a_server_that_says_no_more_after_a_clear_has_not_finished() -> None:
    tier = {"name": "s3", "is_shared": True, "can_list": True, "clears_pending": 1}
    answer = CLEARED | {"tiers": [tier], "is_known": True, "has_peers": False}
    with saying({"POST /clear": (200, answer), "GET /status": (503, {})}) as url:
        result = run("clear", "--url", url)
    assert result.output.splitlines()[1].startswith("  NOT FINISHED in s3")


@pytest.mark.parametrize("num_that_share", [0, 1, 2])
def test_what_other_servers_hold_is_said_once_after_all(num_that_share: int) -> None:
    sharing: Sayings = {"POST /clear": (200, CLEARED | {"tiers": [], "is_known": True, "has_peers": True})}
    with saying(sharing if num_that_share else DONE) as first, saying(sharing if num_that_share > 1 else DONE) as last:
        lines = run("clear", "--url", first, "--url", last).output.splitlines()
    said = "cache servers that are not named here keep what they hold in memory"
    assert [line.split(": ")[0] for line in lines] == [first, last, *([said] if num_that_share else [])]


def test_a_refused_clear_names_the_flag() -> None:
    code = {"code": "chunks_pinned", "message": "1 pin keeps 7 bytes (unpin them)"}
    with saying({"POST /clear": (409, {"error": code})}) as url:
        result = run("clear", "--url", url)
    assert result.exit_code == 1
    assert "fix: antiphon cache unpin --all, or clear --pinned" in result.stderr


def test_one_is_one() -> None:
    cleared = {"num_chunks": 1, "freed_bytes": 1024, "held_bytes": 0, "num_unpinned": 1}
    lines = cleared_lines("u", cleared | {"tiers": [], "is_known": True, "has_peers": False})
    assert lines == ["u: 1 chunk forgotten, 1.0 KiB free at once, 1 pin ended"]
