"""``AntiphonConnector``: what vLLM loads, by name or by module path, alone or inside ``MultiConnector``.

It translates vLLM's hooks to the two sides (``scheduler``, ``worker``) and owns nothing else. vLLM makes two of it for
an engine: one in the scheduler's process, one in each worker's. They share nothing but the plan of a step and the news
of the workers.

Reuse that cannot work (another layout, no server, a gate that fails) is off, loudly, and never keeps the engine from
serving. A setting that is wrong is refused when the engine starts.

A hook that fails ends reuse in both processes: a worker says so in its news and to the server, and nothing more is
promised. Loads promised before are still done. With ``kv_load_failure_policy=fail`` vLLM ends a request whose load
fails; these are left:

- the request for which ``update_state_after_alloc`` itself failed: it was promised a load that nobody has planned;
- loads that a worker had been given when its load thread met a bug, or lost the connections that cover them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from antiphon.client.client import CacheClient
from antiphon.client.options import ClientOptions
from antiphon.connector import compat
from antiphon.connector.copier import Copier
from antiphon.connector.copy import BlockCopier, layer_blocks
from antiphon.connector.gate import GateResult, run_gate
from antiphon.connector.guarding import guarded
from antiphon.connector.identity import EngineFacts, engine_facts
from antiphon.connector.options import SchedulerOptions
from antiphon.connector.plan import LoadPlan, StepPlan, WorkerNews
from antiphon.connector.scheduler import SchedulerSide
from antiphon.connector.settings import ConnectorSettings, read_settings
from antiphon.connector.start_watch import SCHEDULER_ROLE
from antiphon.connector.worker import NoReuse, WorkerSide
from antiphon.core.errors import AntiphonError, LayoutMismatch

log = logging.getLogger("antiphon.connector")

SERVER_WAIT_S = 3.0
"""How long a worker waits for the server before its gate runs without it; an engine takes far longer to start."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The plan of a step, on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """The news of the workers, on their way to the scheduler."""

    news: WorkerNews = field(default_factory=WorkerNews)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """The news of both."""
        assert isinstance(other, WorkerMetadata)
        self.news.merge(other.news)
        return self


def _nothing() -> None:
    return None


def _no_load() -> LoadPlan | None:
    return None


def _no_params() -> dict[str, Any] | None:
    return None


def _miss() -> tuple[int | None, bool]:
    return 0, False


class AntiphonConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's view of Antiphon's cache.

    Raises:
        ConfigError: a key of ``kv_connector_extra_config`` cannot be used.
    """

    _cache_hit_source = compat.host_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.out_of_service: str | None = None
        self._config = vllm_config
        self._num_blocks: int = kv_cache_config.num_blocks
        self._client: CacheClient | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._held_back: list[str] = []  # not part of a plan that can fail: each must reach the workers
        self._local_tokens: dict[str, int] = {}  # of the requests asked for since the last plan
        self._waiting: dict[str, LoadPlan] = {}  # what vLLM waits for since the last plan
        self._no_reuse = NoReuse()
        self._has_passed = False  # the gate of this worker
        settings, notices = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        for notice in notices:
            log.warning("%s", notice)
        self._settings = settings
        self._facts = self._read_facts(settings, kv_cache_config)
        if self._facts is not None and role == KVConnectorRole.SCHEDULER:
            for notice in self._facts.notices:
                log.warning("%s", notice)
            self._start_scheduler(self._facts)

    def _read_facts(self, settings: ConnectorSettings, kv_cache_config: Any) -> EngineFacts | None:
        try:
            return engine_facts(self._config, kv_cache_config, settings)
        except AntiphonError as error:
            self.out_of_service = str(error)
        except Exception as error:  # supervised: what this vLLM is made of is not what is known here
            log.exception("what this engine's KV means cannot be read")
            self.out_of_service = f"what this engine's KV means cannot be read: {error!r}"
        log.error("reuse is off for this engine: %s", self.out_of_service)
        return None

    def _start_scheduler(self, facts: EngineFacts) -> None:
        settings = self._settings
        client = self._new_client(facts, SCHEDULER_ROLE, (), needs_arena=False)
        options = SchedulerOptions(
            engine=facts.engine,
            incarnation=facts.incarnation,
            model=facts.model.model_name,
            block_size_tokens=facts.block_size_tokens,
            chunk_size_tokens=facts.chunk_size_tokens,
            num_ranks=facts.num_ranks,
            lookup_timeout_s=settings.lookup_timeout_ms / 1000,
            can_store=settings.can_store,
            can_load=settings.can_load,
            store_jobs_max=settings.store_queue_max,
            onboard_max_s=settings.onboard_max_ms / 1000,
            is_async=compat.plans_ahead(self._config),
        )
        self._scheduler = SchedulerSide(options, client, facts.identify)
        client.start()

    def _new_client(self, facts: EngineFacts, role: str, slabs: tuple[int, ...], *, needs_arena: bool) -> CacheClient:
        options = ClientOptions(
            host=self._settings.host,
            port=self._settings.port,
            role=role,
            engine=facts.engine,
            incarnation=facts.incarnation,
            model=facts.model.model_name,
            layout=facts.layout,
            chunk_size_tokens=facts.chunk_size_tokens,
            slabs=slabs,
            needs_arena=needs_arena,
        )
        self._client = CacheClient(options, self._session_changed)
        return self._client

    def _session_changed(self) -> None:
        if self._worker is not None:
            self._worker.session_changed()

    # ---- scheduler -------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may always miss: nothing is recomputed for its sake."""
        return False

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed_tokens`` that the cache can load, always asynchronously; None: ask again."""
        self._local_tokens[request.request_id] = num_computed_tokens
        return self._matched(request, num_computed_tokens)

    @guarded(_miss)
    def _matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.num_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks. Where some are to be loaded, it waits until a worker reports it."""
        block_ids = blocks.get_block_ids()[0]
        if num_external_tokens > 0 and self._facts is not None:
            size = self._facts.block_size_tokens
            start = self._local_tokens[request.request_id]
            to_fill = tuple(block_ids[start // size : -(-(start + num_external_tokens) // size)])
            # A load that fails, unless the scheduler side makes a better one.
            self._waiting[request.request_id] = LoadPlan(request.request_id, "", (), 0, to_fill, 0.0)
        load = self._allocated(request, block_ids, num_external_tokens)
        if load is not None:
            self._waiting[request.request_id] = load

    @guarded(_no_load)
    def _allocated(self, request: Any, block_ids: list[int], num_external_tokens: int) -> LoadPlan | None:
        if self._scheduler is None:
            return None
        return self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of this step."""
        plan = self._plan_step(scheduler_output)
        if self.out_of_service is not None:  # what was promised in this step is loaded all the same: its lease stands
            plan = StepPlan(cancel_stores=True, loads=list(self._waiting.values()))
        self._local_tokens.clear()
        self._waiting.clear()
        plan.finished, self._held_back = self._held_back, []
        return StepMetadata(plan)

    @guarded(StepPlan)
    def _plan_step(self, output: Any) -> StepPlan:
        side = self._scheduler
        if side is None:
            return StepPlan()
        step = compat.read_step(output)
        for request_id in step.preempted:
            side.preempted(request_id)
        for request in step.requests:
            if request.added:
                side.more_blocks(request.request_id, request.added)
            side.scheduled(request.request_id, request.table, request.num_computed_tokens, request.num_scheduled_tokens)
        return side.take_plan()

    @guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did in a step."""
        if self._scheduler is None:
            return
        meta = connector_output.kv_connector_worker_meta
        news = meta.news if isinstance(meta, WorkerMetadata) else None
        received: Iterable[str] = connector_output.finished_recving or ()
        self._scheduler.worker_news(news, received, connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is done with the request; True holds its blocks back until the workers report it as stored.

        With it comes what a decode engine needs to find the KV, where the request asked for that.
        """
        params = None if compat.has_ended_early(request) else self._handed_over(request)
        is_held_back = self._finished(request)
        if is_held_back:
            self._held_back.append(request.request_id)
        return is_held_back, params

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, block_ids[0])

    @guarded(_no_params)
    def _handed_over(self, request: Any) -> dict[str, Any] | None:
        return None if self._scheduler is None else self._scheduler.handed_over(request)

    @guarded(bool)
    def _finished(self, request: Any) -> bool:
        if self._scheduler is None:
            return False
        return self._scheduler.finished(request, compat.has_ended_early(request))

    def reset_cache(self) -> bool | None:
        """Clears this model's chunks on the server."""
        return self._clear()

    @guarded(bool)
    def _clear(self) -> bool:
        return self._scheduler.clear() if self._scheduler is not None else False

    # ---- worker ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV blocks exist: the gate runs, then the threads start."""
        self._register(kv_caches)
        if self.out_of_service is not None:
            log.error("reuse is off for this engine: %s", self.out_of_service)

    @guarded(_nothing)
    def _register(self, kv_caches: dict[str, Any]) -> None:
        facts = self._facts
        if facts is None:
            return
        difference = facts.check_kv_caches(self._config, kv_caches, self._num_blocks)
        if difference is not None:
            self.out_of_service = difference
            return
        try:
            copier = self._new_copier(facts, kv_caches)
        except AntiphonError as error:
            self.out_of_service = f"the engine's KV cannot be copied: {error}"
            return
        rank = self._config.parallel_config.rank
        slab, slabs = facts.rank_slab(rank), facts.slabs_written_by(rank)
        client = self._new_client(facts, f"worker-{rank % facts.num_ranks}", slabs, needs_arena=True)
        client.start()
        client.wait_connected(SERVER_WAIT_S)
        session = client.session
        if session is not None and session.arena is not None:
            copier.arena_mapped(session.arena)
        result = run_gate(copier, session, slab)
        self._worker = WorkerSide(client, copier, slab, slabs=slabs)
        self._worker.start("passed" if result.has_passed else "failed", result.detail)
        self._announce(result, client)

    def _new_copier(self, facts: EngineFacts, kv_caches: dict[str, Any]) -> Copier:
        """Raises LayoutMismatch where the tensors are not understood."""
        tensors = [kv_caches[name] for name in facts.kv.layer_names]
        blocks_per_chunk = facts.chunk_size_tokens // facts.block_size_tokens
        kinds = {tensor.device.type for tensor in tensors}
        copier: Copier
        if kinds == {"cpu"}:
            copier = BlockCopier(layer_blocks(tensors), blocks_per_chunk)
        elif kinds == {"cuda"}:
            from antiphon.connector.cuda_device import cuda_copier  # torch.cuda is of no use to the others

            copier = cuda_copier(tensors, self._num_blocks, blocks_per_chunk)
        else:
            raise LayoutMismatch(f"the KV blocks are on {', '.join(sorted(kinds))}")
        num_parts = max(1, facts.layout.num_slabs // facts.num_ranks)
        assert copier.slab_bytes == num_parts * facts.layout.slab_bytes, (copier.slab_bytes, facts.layout)
        return copier

    def _announce(self, result: GateResult, client: CacheClient) -> None:
        self._has_passed = result.has_passed
        if result.has_passed:
            log.info("KV reuse is on, gate passed %s (cache server: %s)", result.detail, client.state)
        else:
            self.out_of_service = f"the gate failed: {result.detail}"

    def get_handshake_metadata(self) -> None:
        """Nothing to hand over. vLLM asks when its workers have warmed up and captured their CUDA graphs."""
        self._engine_started()

    @guarded(_nothing)
    def _engine_started(self) -> None:
        if self._worker is not None:
            self._worker.engine_started()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before any block is overwritten in this step."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._begin(kv_connector_metadata.plan)
        if self.out_of_service is not None:
            self._tell_failure(self.out_of_service)

    @guarded(_nothing, is_always_run=True)
    def _begin(self, plan: StepPlan) -> None:
        if self._worker is None:
            self._no_reuse.begin_step(plan)
        else:
            if self.out_of_service is not None:
                plan.cancel_stores = True
            self._worker.begin_step(plan)

    @guarded(_nothing, is_always_run=True)
    def _tell_failure(self, reason: str) -> None:
        """Before the step: what stores have read of blocks that it overwrites is not committed."""
        if self._worker is not None and self._has_passed:
            self._worker.fail(reason)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins the loads of this step."""
        # Out of service too, once the gate has passed: vLLM may end a request whose load fails.
        copies = self._worker if self._worker is not None and self._has_passed else self._no_reuse
        copies.start_loads(self._step_plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole chunks and asynchronous: no layer is waited for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores are whole chunks, after the forward."""

    def wait_for_save(self) -> None:
        """Begins the stores of this step; they are not waited for."""
        # What takes plans and gives reports is not guarded: each plan is answered, out of service or not, or requests
        # would wait and blocks be kept for ever. These parts only pass sets and queues on.
        copies = self._worker if self._worker is not None and self.out_of_service is None else self._no_reuse
        copies.start_stores(self._step_plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose stores ended, of those held back; and requests whose loads ended."""
        sent, received = self._no_reuse.take_finished()
        if self._worker is not None:
            stored, loaded = self._worker.take_finished()
            sent, received = sent | stored, received | loaded
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed."""
        failed = self._no_reuse.take_failed_blocks()
        return failed if self._worker is None else failed | self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The news of this worker."""
        news = self._no_reuse.take_news()
        if self._worker is not None:
            news.merge(self._worker.take_news())
        news.out_of_service = self.out_of_service or news.out_of_service
        return WorkerMetadata(news) if news.stored or news.out_of_service else None

    def _step_plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan

    # ---- both ------------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Another connector's: NIXL's handshake goes to every child of a ``MultiConnector``."""

    def shutdown(self) -> None:
        """Ends the threads and the connection."""
        self._shutdown()

    @guarded(_nothing, is_always_run=True)
    def _shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._client is not None:
            self._client.close()
            self._client = None


# Under a MultiConnector vLLM looks children up by name, also those that were loaded by their module's path.
compat.register_connector_once(AntiphonConnector.__name__, __name__, AntiphonConnector.__name__)
