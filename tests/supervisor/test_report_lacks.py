"""What a cache server says that it lacks is in the report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.engine import vllm
from antiphon.supervisor import report
from antiphon.supervisor.report import DeploymentReport, ProcessRow, with_load

L1 = {"total_object_count": 1, "memory_used_bytes": 2, "memory_total_bytes": 3}
ROW = ("cache", "cache_server", "ready", 12, 8090, "http://127.0.0.1:8090", "cache_server", 1.0, 0, None, "/l")
DOWN = {"name": "redis", "is_healthy": False, "reason": "no connection"}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, ()),
        ({"peers": {"is_member": True, "reason": None}}, ()),
        (
            {"peers": {"is_member": False, "reason": "another secret"}},
            ("shares nothing with other cache servers: another secret",),
        ),
        ({"l2": [{"name": "disk", "is_healthy": True}, DOWN]}, ("does without its tier redis: no connection",)),
    ],
)
async def test_what_a_cache_server_lacks(
    told: dict[str, Any], said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(url: str, *, timeout_s: float) -> tuple[int, bytes]:
        manager = {"l1_manager": L1} | ({"l2_tiers": told["l2"]} if "l2" in told else {})
        return 200, json.dumps({"storage_manager": manager} | told).encode()

    monkeypatch.setattr(vllm, "http_get", answer)
    assert report.vllm is vllm
    (row,) = (await with_load(DeploymentReport("demo", 7, True, False, (ProcessRow(*ROW),)))).processes  # type: ignore[arg-type]
    assert (row.num_objects, row.lacks) == (1, said)
