"""One simulated host: a cache server, engines, and clients that send requests. One seed decides all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from antiphon.cache.options import CacheOptions
from antiphon.cache.tier_options import StorePolicy, TierOptions, TiersOptions
from antiphon.sim.client import Answer, Call
from antiphon.sim.engine import Engine, EngineOptions, Job
from antiphon.sim.faults import Fault, SimulationOptions
from antiphon.sim.memory import QUARANTINE_S
from antiphon.sim.network import Channel, Process
from antiphon.sim.server import Server
from antiphon.sim.tier import SimulatedTier
from antiphon.sim.timeline import Timeline
from antiphon.sim.values import CHUNK_SIZE_TOKENS, SLAB_BYTES, SimulatedModel, Tokens
from antiphon.sim.worker import WorkerOptions

TENANTS = ("", "capped", "other")
PROMPT_TOKENS_MAX = 28
OUTPUT_TOKENS_MAX = 8


class World:
    """The host of one seed."""

    def __init__(self, seed: int, options: SimulationOptions) -> None:
        self.timeline = Timeline(seed)
        self.server: Server
        self.engines: list[Engine] = []
        self.jobs: list[Job] = []
        self.options = options
        self.channels: list[Channel[Call] | Channel[Answer]] = []
        self.tiers: list[SimulatedTier] = []
        self._tiers_options: TiersOptions | None = None
        self._num_servers = 0
        self._build()

    # ---- what there is -----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        chance = self.timeline.random
        slabs = [1, 2, 4]
        chance.shuffle(slabs)
        models = [SimulatedModel("first", slabs[0]), SimulatedModel("second", slabs[1])]
        chunk_bytes_max = self.chunk_bytes_max = max(models[0].num_slabs, models[1].num_slabs) * SLAB_BYTES
        self._cache_options = CacheOptions(
            arena_bytes=max(chance.randint(16, 72) * SLAB_BYTES, 4 * chunk_bytes_max),
            usable_bytes=chance.choice((0, 4 * SLAB_BYTES, None)),
            chunk_size_tokens=CHUNK_SIZE_TOKENS,
            alignment_bytes=SLAB_BYTES,
            eviction_policy=chance.choice(("lru", "arc")),
            quarantine_s=QUARANTINE_S,
            lease_alarm_s=1.5,
            reservation_alarm_s=1.5,
            leased_share_max=chance.choice((0.5, 1.0)),
            leases_per_engine_max=chance.choice((3, 64)),
            pinned_share_max=chance.choice((0.3, 0.5)),
            pins_max=chance.choice((2, 64)),
            reserved_share_max=chance.choice((0.5, 1.0)),
            quota_bytes={"capped": chance.choice((2, 3, 5)) * chunk_bytes_max},
            event_log_max=64,
        )
        self._prefixes = {
            model.name: [tuple(chance.randrange(1000) for _ in range(24)) for _ in range(2)] for model in models
        }
        if self.options.has_tiers:
            self._build_tiers(chunk_bytes_max)
        self.start_server()
        names = [("prefill", models[0]), ("decode", models[0])]
        if chance.random() < 0.6:
            names.append(("second", models[1]))
        for name, model in names:
            worker = WorkerOptions(
                announces_copies=chance.random() < 0.35,
                commits_late=chance.random() < 0.8,
                num_blocks=chance.randint(20, 40),
            )
            engine = EngineOptions(name, model, chance.choice((1, 1, 2)), worker, worker.announces_copies)
            if self.options.has_tiers:
                onboard_s, rate = chance.choice((0.0, 0.05, 1.0, 3.0)), chance.choice((0.0, 0.0, 100.0))
                engine = replace(engine, onboard_s=onboard_s, prefill_tokens_per_s=rate)
            self.engines.append(Engine(self.timeline, engine, self._connect, self._job_ended))
            self.timeline.note(f"{engine}")

    def _build_tiers(self, chunk_bytes_max: int) -> None:
        """One tier or two, the second often shared and without a list."""
        chance = self.timeline.random
        options = []
        for name in ("fast", "slow")[: chance.choice((1, 2, 2))]:
            is_shared = name == "slow" and chance.random() < 0.6
            policies: tuple[StorePolicy, ...] = ("through", "through", "back")
            options.append(
                TierOptions(
                    name,
                    store=chance.choice(policies),
                    is_shared=is_shared,
                    fetches_max=chance.choice((1, 2, 4)),
                    publishes_max=chance.choice((1, 2)),
                    queue_bytes_max=chance.choice((2, 5, 50)) * chunk_bytes_max,
                    timeout_s=chance.choice((0.15, 0.5)),
                    list_timeout_s=1.0,
                    flush_after_s=chance.choice((0.05, 0.5, 3.0)),
                    promotion_hits=chance.choice((0, 1, 2)),
                    known_max=chance.choice((4, 1000, 1000)),
                )
            )
            self.tiers.append(SimulatedTier(self.timeline, name, chance.choice((6, 200, 200)), not is_shared))
        self._tiers_options = TiersOptions(
            tuple(options),
            onboards_max=chance.choice((1, 8, 256)),
            onboard_share_max=chance.choice((0.3, 0.9)),
            ahead_max=chance.choice((1, 3, 32)),
            ask_keys_max=chance.choice((2, 512)),
            private_tenants=frozenset({"other"} if chance.random() < 0.2 else ()),
        )

    @property
    def quotas(self) -> Mapping[str, int]:
        """What each life of the server begins with."""
        return self._cache_options.quota_bytes

    def is_private(self, tenant: str) -> bool:
        """Whether the tenant's chunks stay in the arena."""
        return self._tiers_options is not None and tenant in self._tiers_options.private_tenants

    @property
    def can_ask_for_two(self) -> bool:
        """Whether a lookup that finds nothing may bring two chunks: both may be held, and the tiers keep as many."""
        options = self._tiers_options
        if options is None:
            return False
        chunk_bytes = max(engine.options.model.layout.chunk_bytes for engine in self.engines)
        share = min(options.onboard_share_max, self._cache_options.leased_share_max)
        return 2 * chunk_bytes <= int(self._cache_options.arena_bytes * share)

    def start_server(self) -> None:
        """The next life of the server."""
        self._num_servers += 1
        name = f"server#{self._num_servers}"
        behind = None if self._tiers_options is None else (self._tiers_options, self.tiers)
        self.server = Server(self.timeline, self._cache_options, name, self.options.validate_every, behind)
        self.timeline.note(f"{name} starts")

    def _connect(self, client: Process) -> tuple[Channel[Call], Channel[Answer]] | None:
        if not self.server.process.is_alive:
            return None
        to_server, to_client = self.server.accept(client)
        self.channels += [to_server, to_client]
        return to_server, to_client

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _prompt(self, model: SimulatedModel) -> Tokens:
        """A prompt that begins as others do, and often goes on alone."""
        chance = self.timeline.random
        prefixes = self._prefixes[model.name]
        shared = chance.choice(prefixes)[: chance.randint(3, 24)]
        if chance.random() < 0.15:  # the same chunk in another place of its prefix has other KV
            length = len(shared) // CHUNK_SIZE_TOKENS * CHUNK_SIZE_TOKENS
            shared = (*shared[:length], *chance.choice(prefixes)[length:])
        own = chance.randint(0, 6) if chance.random() < 0.6 else 0
        return (*shared, *(chance.randrange(1000) for _ in range(own)))

    def ask(self, engine: Engine, tenant: str, prompt: Tokens, num_output: int) -> Job:
        """A client sends a request."""
        job = Job(f"r{len(self.jobs)}", engine.options.model.name, tenant, prompt, num_output)
        self.jobs.append(job)
        engine.submit(job)
        return job

    def ask_something(self) -> None:
        """A client sends a request, and may leave before its answer."""
        chance = self.timeline.random
        engine = chance.choice(self.engines)
        tenant = chance.choice(TENANTS)
        self._ask_or_leave(engine, tenant, self._prompt(engine.options.model))

    def ask_again(self) -> None:
        """The same with an earlier prompt, of any engine of its model; with any prompt where there is none."""
        if not self.jobs:
            self.ask_something()
            return
        chance = self.timeline.random
        job = chance.choice(self.jobs)
        engine = chance.choice([engine for engine in self.engines if engine.options.model.name == job.model])
        self._ask_or_leave(engine, job.tenant, job.prompt)

    def _ask_or_leave(self, engine: Engine, tenant: str, prompt: Tokens) -> None:
        chance = self.timeline.random
        job = self.ask(engine, tenant, prompt, chance.randint(1, OUTPUT_TOKENS_MAX))
        if Fault.ABORT in self.options.faults and chance.random() < 0.3:
            delay_s = chance.choice((0.001, 0.01, 0.1)) * chance.random()
            self.timeline.after(delay_s, lambda: self._abort(engine, job))

    def _abort(self, engine: Engine, job: Job) -> None:
        if not job.is_over:
            self.timeline.count(f"fault {Fault.ABORT.value}")
            engine.abort(job)

    def _job_ended(self, owner: Engine, job: Job) -> None:
        """Some answers are followed by the next turn of their chat, on any engine of the model."""
        chance = self.timeline.random
        if self.timeline.is_calm or job.output is None or chance.random() > 0.35:
            return
        prompt = (*job.prompt, *job.output, chance.randrange(1000))
        if len(prompt) <= PROMPT_TOKENS_MAX:
            engine = chance.choice([engine for engine in self.engines if engine.options.model is owner.options.model])
            output = chance.randint(1, OUTPUT_TOKENS_MAX)
            self.timeline.after(chance.random() * 0.1, lambda: self._next_turn(engine, job.tenant, prompt, output))

    def _next_turn(self, engine: Engine, tenant: str, prompt: Tokens, num_output: int) -> None:
        self.timeline.count("next turn")
        self.ask(engine, tenant, prompt, num_output)
