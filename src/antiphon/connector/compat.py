"""Every difference between the versions of vLLM that the connector runs in: 0.26 and 0.32, and those between.

Always true: importing this file imports no vLLM; a name that one version lacks is looked for here and nowhere else;
what both versions agree on (see ``tests/connector/signatures``) is not repeated here.

What differs, and what is done about it:

| | 0.26 | 0.32 | here |
|---|---|---|---|
| sources of external hits | none | ``CacheHitSource`` | ``host_hit_source`` |
| end of transfers | ``get_finished`` | ``get_transfer_results``, which calls it | ``get_finished`` only |
| block pool | ``bind_gpu_block_pool`` | ``bind_kv_cache_manager``, which calls it | the first only |
| ``wait_for_save`` | not in steps without a forward | in every step | stores are planned with tokens only |
| ``start_load_kv`` | before the forward | after its launch, if no load is synchronous | loads are asynchronous |
| pending frees | none | ``has_pending_block_frees`` | the default, False, is right |
| cross-layer blocks | ``prefer_cross_layer_blocks`` | gone | the default, False, is right |
| packing on a CPU | ``_get_attn_isa`` | the same, other rules | vLLM's own function is asked: ``attention_isa`` |
| packing in use | not kept | ``isa`` of each layer | ``isas_in_use`` |
| scales from the first batch | ``calculate_kv_scales`` | gone | ``has_first_batch_scales`` |
"""

from __future__ import annotations

import importlib
import logging
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

OLDEST = (0, 26)
NEWEST = (0, 32)
"""The versions whose hooks are recorded; between them the hooks changed once each, from one record to the other."""

CPUINFO = Path("/proc/cpuinfo")
CPU_FLAGS = re.compile(r"amx|avx|asimd|^sve|^bf16$|^i8mm$|^zvl|^vx|altivec|vsx")
"""Flags that name vector and matrix units."""

log = logging.getLogger("antiphon.connector")

TRACEPARENT_CHARS_MAX = 128
"""A longer one is of no version that is known, and is not passed on."""

ENDED_EARLY = frozenset({"FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"})


# ---- versions --------------------------------------------------------------------------------------------------------


def minor_version(version: str) -> tuple[int, int] | None:
    """Major and minor of ``0.32.0``, ``0.32.1rc1.dev5+cpu``…; None for a text that does not begin with both."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def supported_version(version: str) -> str | None:
    """Why the connector cannot be used with this vLLM; None where it can."""
    found = minor_version(version)
    if found is not None and OLDEST <= found <= NEWEST:
        return None
    oldest, newest = ("{}.{}".format(*bound) for bound in (OLDEST, NEWEST))
    return f"vLLM {version} is not among the versions that the connector knows, {oldest} to {newest}"


def engine_version() -> str:
    """``vllm.__version__`` of this process."""
    return str(importlib.import_module("vllm").__version__)


# ---- names that only some versions have ------------------------------------------------------------------------------


def host_hit_source() -> Any:
    """For the class attribute ``_cache_hit_source``: our hits come from host memory. None in a vLLM without sources."""
    try:
        return importlib.import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource.HOST
    except (ImportError, AttributeError):
        return None


def register_connector_once(name: str, module: str, class_name: str) -> bool:
    """Makes ``--kv-transfer-config '{"kv_connector": name}'`` find the class. Returns whether it was not known before.

    The module is imported when the connector is created. Calling it again does nothing.
    """
    try:
        factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    except (ImportError, AttributeError) as error:
        log.warning("%s is not known to vLLM by its name, only by its module path: %s", name, error)
        return False
    if name in factory._registry:
        return False
    factory.register_connector(name, module, class_name)
    return True


def has_first_batch_scales(cache_config: Any) -> bool:
    """Whether K and V are scaled by what the engine saw first, so that no other process has the same scales."""
    return bool(getattr(cache_config, "calculate_kv_scales", False))


def join_logs() -> None:
    """What Antiphon logs inside an engine appears in the engine's own log, in vLLM's form."""
    ours, theirs = logging.getLogger("antiphon"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


# ---- packing on a CPU ------------------------------------------------------------------------------------------------


def attention_isa(dtype: Any, block_size: int, head_size: int, cache_dtype: str) -> str:
    """The instruction set for which vLLM packs the blocks of a CPU engine, as vLLM itself chooses it.

    A vLLM that does not say leaves ``by-flags``: ``cpu_flags`` tells machines apart then.
    """
    try:
        choose = importlib.import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa
    except (ImportError, AttributeError):
        return "by-flags"
    return str(choose(dtype, block_size, head_size, cache_dtype))


def cpu_flags(cpuinfo: Path = CPUINFO) -> str:
    """The vector and matrix units of this machine, sorted, joined with ``+``; its architecture where none is told."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    line = re.search(r"^(?:flags|Features|isa|features)\s*:(.*)$", text, re.MULTILINE)
    flags = sorted({flag for flag in line[1].split() if CPU_FLAGS.search(flag)}) if line else []
    return "+".join([platform.machine(), *flags])


def isas_in_use(vllm_config: Any, layer_names: Iterable[str]) -> frozenset[str]:
    """The instruction sets that the layers of this worker were built for; empty where vLLM does not keep them."""
    layers: Mapping[str, Any] = getattr(vllm_config.compilation_config, "static_forward_context", None) or {}
    found = (getattr(layers.get(name), "isa", None) for name in layer_names)
    return frozenset(isa for isa in found if isinstance(isa, str))


def dtype_name(dtype: Any) -> str:
    """``bfloat16`` for ``torch.bfloat16`` and for ``"bfloat16"``."""
    return f"{dtype}".removeprefix("torch.")


# ---- requests --------------------------------------------------------------------------------------------------------


class Placeholder(Protocol):
    """Where a multimodal item stands in the prompt."""

    offset: int
    length: int


class Feature(Protocol):
    """A multimodal item of a request."""

    identifier: str
    mm_position: Placeholder


class Adapter(Protocol):
    """A request's LoRA adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


class RequestFields(Protocol):
    """What the connector reads of a vLLM ``Request``: fields and properties of both versions."""

    request_id: str
    num_prompt_tokens: int
    cache_salt: str | None
    lora_request: Adapter | None
    mm_features: Sequence[Feature]
    prompt_embeds: Any
    sampling_params: Any
    pooling_params: Any
    skip_reading_prefix_cache: bool
    kv_transfer_params: dict[str, Any] | None
    resumable: bool
    status: Any

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the output so far."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""


def bypass_reason(request: RequestFields) -> str | None:
    """Why the KV of this request is neither loaded nor stored; None where it may be both."""
    sampling = request.sampling_params
    if request.pooling_params is not None or sampling is None:
        return "pooling reads every token's own output"
    if getattr(sampling, "prompt_logprobs", None) is not None:
        return "prompt_logprobs need every prompt token computed"
    if request.prompt_embeds is not None:
        return "a prompt of embeddings has no tokens that could name its KV"
    if request.skip_reading_prefix_cache:
        return "the request asks for no cached prefix"
    if request.resumable:
        return "tokens of a streaming session are replaced while it runs"
    if request.lora_request is not None and request.lora_request.load_inplace:
        return "an adapter that is loaded in place changes under its name"
    if any(not feature.identifier for feature in request.mm_features):
        return "a multimodal item has no hash"
    return None


def is_remote_prefill(request: RequestFields) -> bool:
    """Whether another connector brings this request's KV from a prefill engine."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def traceparent_of(request: RequestFields) -> str:
    """The W3C trace context that came with the request; empty where none did, or the engine sends no traces
    (``--otlp-traces-endpoint``): vLLM then leaves it out."""
    headers: Mapping[str, str] | None = getattr(request, "trace_headers", None)
    found = None if headers is None else headers.get("traceparent")
    return found if isinstance(found, str) and len(found) <= TRACEPARENT_CHARS_MAX else ""


def plans_ahead(config: Any) -> bool:
    """Whether this engine plans a step while the one before it runs: asynchronous scheduling, or pipeline stages."""
    is_async = getattr(getattr(config, "scheduler_config", None), "async_scheduling", False)
    num_stages = getattr(getattr(config, "parallel_config", None), "pipeline_parallel_size", 1)
    return bool(is_async) or num_stages > 1


def has_ended_early(request: RequestFields) -> bool:
    """Whether a finished request was aborted or failed, rather than completed."""
    return getattr(request.status, "name", "") in ENDED_EARLY


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of a step.

    Args:
        request_id: the engine's request id.
        table: its whole block table where it is new or was preempted and resumed; None where it goes on.
        added: blocks that are appended to the table of one that goes on.
        num_computed_tokens: tokens computed before this step.
        num_scheduled_tokens: tokens of this step, guesses of speculative decoding among them.
    """

    request_id: str
    table: list[int] | None
    added: list[int]
    num_computed_tokens: int
    num_scheduled_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What the connector reads of a ``SchedulerOutput``.

    Args:
        requests: those that compute in this step.
        preempted: request ids that lost their blocks, which may be used again in this step.
    """

    requests: tuple[ScheduledRequest, ...]
    preempted: frozenset[str]


def read_step(scheduler_output: Any) -> Step:
    """A ``SchedulerOutput`` of an engine with one KV cache group, read only."""
    scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
    requests = [
        ScheduledRequest(new.req_id, list(new.block_ids[0]), [], new.num_computed_tokens, scheduled.get(new.req_id, 0))
        for new in scheduler_output.scheduled_new_reqs
    ]
    cached = scheduler_output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        groups = cached.new_block_ids[index]
        blocks = [] if groups is None else list(groups[0])
        is_resumed = request_id in cached.resumed_req_ids
        requests.append(
            ScheduledRequest(
                request_id,
                blocks if is_resumed else None,
                [] if is_resumed else blocks,
                cached.num_computed_tokens[index],
                scheduled.get(request_id, 0),
            )
        )
    return Step(tuple(requests), frozenset(scheduler_output.preempted_req_ids or ()))
