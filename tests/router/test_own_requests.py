"""Requests of the router's own (health checks, warm-ups, questions about KV) are no client's: they show engines the
worker's key alone, and count for no tenant and no admission."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.router.scripted import Seen, Wire, counted, engine, routing, until
from tests.router.test_warming import Model


async def test_they_carry_the_workers_key_and_count_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "clients").write_text("client-key\n")
    (tmp_path / "worker").write_text("worker-key\n")
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("in_flight_max: 1\ntenants:\n  - {name: one, api_key_files: [clients], requests_per_s: 0.001}\n")
    knobs = {"tenants_file": str(tenants), "worker_api_key_file": str(tmp_path / "worker"), "policy": "kv_aware"}
    # Every prompt would be cold, and only one at a time would be admitted.
    knobs |= {"kv_bytes_per_token": 1_000_000_000, "cold_min_bytes": 1, "cold_queue_max": 0}
    prefill, decode = Model(), Model()

    def serving(model: Model) -> Callable[[Seen, Wire], Awaitable[None]]:
        async def script(seen: Seen, wire: Wire) -> None:
            if seen.path == "/metrics":
                wire.whole(b"")
            else:
                await model(seen, wire)

        return script

    async with (
        engine(serving(prefill)) as one,
        engine(serving(prefill)) as two,
        engine(serving(decode)) as three,
        engine(serving(decode)) as four,
        routing([one, two], [three, four], warm_pairs=True, warm_pairs_at_start=True, **knobs) as router,
    ):
        await until(lambda: counted(router, "pair_warmups_total", outcome="warmed") == 4, "all pairs are warm")
        await until(lambda: any(seen.path == "/metrics" for seen in three.seen), "the free KV is asked for")
        for each in (one, two, three, four):
            assert {"/v1/completions", "/v1/models"} & {seen.path for seen in each.seen}
            for head in each.heads:
                fields = [line.partition(b": ") for line in head.split(b"\r\n")]
                shown = [(name, value) for name, _, value in fields if name in (b"authorization", b"x-api-key")]
                assert shown == [(b"authorization", b"Bearer worker-key")], head
        assert router.tenants is not None
        assert router.cold is not None
        (tenant,) = router.tenants.statistics()
        assert (tenant.num_admitted, tenant.num_in_flight, tenant.num_waiting) == (0, 0, 0)
        assert not router.cold.counts.total()
        assert list(router.receipts.latest(10)) == []
