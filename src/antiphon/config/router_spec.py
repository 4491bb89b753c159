"""The router's knobs: every one once, with its unit, range and reason.

The same model is the ``router:`` section of ``antiphon.yaml`` and the command line of ``antiphon router``. It imports
pydantic only, so that the router process stays small. It checks one field at a time; what concerns several processes
(ports, reachability) is in ``checks.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from antiphon.config.model import SpecModel


def _engine_url(url: str) -> str:
    """``url`` without a trailing slash; ValueError unless it is ``http://host:port``."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not the URL of an engine: write http://HOST:PORT")
    if parts.port is None:
        raise ValueError(f"{url!r} has no port: write http://HOST:PORT")
    return url.rstrip("/")


def _admin_url(url: str) -> str:
    """``url`` without a trailing slash; ValueError unless it is ``http://host:port``."""
    try:
        return _engine_url(url)
    except ValueError as error:
        raise ValueError(str(error).replace("URL of an engine", "admin URL of a cache server")) from error


EngineUrl = Annotated[str, AfterValidator(_engine_url)]
AdminUrl = Annotated[str, AfterValidator(_admin_url)]


Policy = Literal["round_robin", "random", "least_load", "power_of_two", "consistent_hash"]


class RouterSpec(SpecModel):
    """The ``router:`` section, and the command line of ``antiphon router``."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address that the router listens on. Loopback by default, so that nothing is published by "
        "accident; any other address needs public_without_key.",
    )
    port: int = Field(
        default=30000,
        ge=0,
        le=65535,
        description="TCP port that the router listens on, 0 to 65535. 0 takes a free one: for antiphon router "
        "alone, since in "
        "a deployment others must know it.",
    )
    policy: Policy = Field(
        default="round_robin",
        description="How an engine of a pool is picked, for prefill and decode independently. Loads are this router's "
        "own counts; consistent_hash goes by the x-session-id header, else user, else the prompt's beginning.",
    )
    prefill_policy: Policy | None = Field(
        default=None, description="The policy of the prefill pool alone; without it that of policy."
    )
    decode_policy: Policy | None = Field(
        default=None, description="The policy of the decode pool alone; without it that of policy."
    )
    prefill_fallback: Literal["fail", "local"] = Field(
        default="fail",
        description="When no prefill engine is left for a request: fail tells the client; local lets a decode engine "
        "prefill, which slows its other requests.",
    )
    retry_share: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Retries allowed for each request, 0 to 1, saved up to 1000: a pool that fails gets at most this "
        "much more load.",
    )
    retry_floor: float = Field(
        default=32.0,
        ge=0,
        le=1000,
        description="Retries allowed however few requests there are, 0 to 1000; they come back at one a second.",
    )
    health_failures_max: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Health checks that fail in a row before an engine is down, 1 to 100; busy is slow, not dead.",
    )
    request_failures_max: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Requests that fail in a row before an engine is suspect and tried by one request at a time, 1 to "
        "100.",
    )
    probe_wait_min_s: float = Field(
        default=0.5,
        gt=0,
        le=60,
        description="Seconds that a failed engine is left alone, 0 to 60; doubled with each failed try.",
    )
    probe_wait_max_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="The most seconds that a failed engine is left alone, 0 to 3600.",
    )
    prefill: list[EngineUrl] = Field(
        default_factory=list,
        max_length=1024,
        description="URL of a prefill engine, http://HOST:PORT. Empty in a spec file: the compiler fills it from "
        "the pool.",
    )
    decode: list[EngineUrl] = Field(
        default_factory=list,
        max_length=1024,
        description="URL of a decode engine, http://HOST:PORT. Empty in a spec file: the compiler fills it from the "
        "pool.",
    )
    cache_servers: list[AdminUrl] = Field(
        default_factory=list,
        max_length=1024,
        json_schema_extra={"flag": "cache-server"},
        description="Admin URLs of cache servers, http://HOST:PORT, from which token reports for receipts are read. "
        "The compiler adds those of the deployment.",
    )
    vllm_pd_disaggregation: bool = Field(
        default=True,
        description="Prefill on one engine, decode on another. Accepted because command lines of vllm-router carry it; "
        "false sends every request to a decode engine alone.",
    )
    connect_timeout_s: float = Field(
        default=2.0,
        gt=0,
        le=60,
        description="Seconds to open a connection to an engine, 0 to 60. A dead host must not hold a request.",
    )
    prefill_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Seconds a prefill may take in all, 0 to 86400. Long prompts on a CPU take minutes.",
    )
    first_token_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Seconds from sending a request to a decode engine to its first byte, 0 to 86400; "
        "it includes queueing there, and for an answer that is not streamed the whole of it.",
    )
    idle_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="Seconds without a byte from an engine in the middle of a response, 0 to 86400.",
    )
    body_read_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Seconds a client may take to send a request's body, 0 to 3600; bounds slow senders.",
    )
    keepalive_timeout_s: float = Field(
        default=75.0, gt=0, le=3600, description="Seconds an idle client connection is kept open, 0 to 3600."
    )
    body_max_bytes: int = Field(
        default=134217728,
        ge=1024,
        le=2147483647,
        description="Largest request body in bytes, 1 KiB to 2 GiB; the default (128 MiB) is a long chat "
        "with images inline. More is 413.",
    )
    header_max_bytes: int = Field(
        default=65536, ge=1024, le=1048576, description="Largest request head in bytes, 1 KiB to 1 MiB; more is 431."
    )
    connections_max: int = Field(
        default=4096,
        ge=1,
        le=1000000,
        description="Client connections at once, 1 to 1000000; each needs a file descriptor. More get 503.",
    )
    upstream_connections_max: int = Field(
        default=1024,
        ge=1,
        le=1000000,
        description="Connections to each engine at once, 1 to 1000000; a request past it gets 503.",
    )
    receipts_max: int = Field(
        default=10000,
        ge=0,
        le=1000000,
        description="Receipts kept for GET /receipts/ID, 0 to 1000000; about 2 KiB each, oldest go first.",
    )
    health_interval_s: float = Field(
        default=2.0, gt=0, le=3600, description="Seconds between two health checks of an engine, 0 to 3600."
    )
    health_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="Seconds an engine may take to answer a health check, 0 to 600; a busy CPU is slow, not dead.",
    )
    drain_timeout_s: float = Field(
        default=20.0,
        ge=0,
        le=3600,
        description="Seconds that requests in flight may take to end when the router stops, 0 to 3600; less than "
        "supervisor.stop_grace_s, after which it would be killed.",
    )
    handover_timeout_s: float = Field(
        default=20.0,
        gt=0,
        le=3600,
        description="Seconds after the prefill answered in which its KV may still be handed to a decode engine, "
        "0 to 3600. At most handoff.lease_s less 5 s (half of a short lease): after the lease the blocks hold other "
        "data.",
    )
    abort_grace_s: float = Field(
        default=1.0,
        ge=0,
        le=60,
        description="Seconds a decode request whose client has left is still held, 0 to 60, so that the engine "
        "admits it, pulls the KV and the prefill engine frees its blocks.",
    )
    admin_key_file: str | None = Field(
        default=None,
        description="File with the key that admin routes and receipts ask for (Authorization: Bearer KEY). "
        "Without it they answer on loopback only.",
    )
    public_without_key: bool = Field(
        default=False,
        description="Allow an address other than loopback, although there are no client keys in this version: anybody "
        "who reaches it may use the inference routes. admin_key_file protects the other routes only.",
    )
    request_id_tag: bool = Field(
        default=True,
        description="Put ___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_ into response ids, as vllm-router does.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged."
    )
    access_log: bool = Field(
        default=False, description="Log one line a request. Off by default: it costs CPU for each request."
    )
