"""The router's knobs: every one once, with its unit, range and reason.

The same model is the ``router:`` section of ``antiphon.yaml`` and the command line of ``antiphon router``. It imports
pydantic only, so that the router process stays small. It checks one field at a time; what concerns several processes
(ports, reachability) is in ``checks.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from antiphon.config.hosts import http_url
from antiphon.config.model import SpecModel
from antiphon.config.tracing_spec import (
    OtlpEndpoint,
    OtlpProtocol,
    enable_tracing_field,
    otlp_endpoint_field,
    otlp_metrics_interval_field,
    otlp_protocol_field,
    trace_sample_share_field,
)


def engine_url(url: str) -> str:
    """``url`` in the one spelling that an engine is known by; ValueError unless it is ``http://host:port``."""
    wrong = f"{url[:200]!r} is not the URL of an engine: write http://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(wrong) from None
    rest = (parts.path.rstrip("/"), parts.query, parts.fragment, parts.username, parts.password)
    if parts.scheme != "http" or not host or any(rest) or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(wrong)
    if ":" not in host and not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        raise ValueError(wrong)  # no name of a host
    if not port:
        raise ValueError(f"{url[:200]!r} has no port: write http://HOST:PORT")
    return http_url(host, port)


def _admin_url(url: str) -> str:
    """``url`` without a trailing slash; ValueError unless it is ``http://host:port``."""
    try:
        return engine_url(url)
    except ValueError as error:
        raise ValueError(str(error).replace("URL of an engine", "admin URL of a cache server")) from error


EngineUrl = Annotated[str, AfterValidator(engine_url)]
AdminUrl = Annotated[str, AfterValidator(_admin_url)]


Policy = Literal["round_robin", "random", "least_load", "power_of_two", "consistent_hash", "prefix_aware", "kv_aware"]


class RouterSpec(SpecModel):
    """The ``router:`` section, and the command line of ``antiphon router``."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address that the router listens on. Loopback by default, so that nothing is published by "
        "accident; any other address needs api_key_file, tenants_file or public_without_key.",
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
        "own counts; consistent_hash goes by the x-session-id header, else user, else the prompt's beginning; "
        "prefix_aware by what each engine was sent before; kv_aware by what each engine says it holds, which needs "
        "kv_events_port.",
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
    allow_empty: bool = Field(
        default=False,
        description="Start without engines: they come by POST /endpoints. Until a decode engine has, requests are "
        "refused with 503; without a prefill engine, prefill_fallback decides.",
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
    head_read_timeout_s: float = Field(
        default=15.0,
        gt=0,
        le=3600,
        description="Seconds from the first byte of a request to the end of its head, 0 to 3600; bounds slow senders.",
    )
    header_count_max: int = Field(
        default=128, ge=8, le=10000, description="Header fields of a request, 8 to 10000; more is 431."
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
    stop_notice_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="Seconds, from the signal to stop, in which /readiness says that the router stops while requests "
        "are still taken, so that a load balancer looks elsewhere first, 0 to 3600. With drain_timeout_s less than "
        "supervisor.stop_grace_s.",
    )
    handoff: Literal["nixl", "cache"] = Field(
        default="nixl",
        description="How KV gets from prefill to decode. nixl: the decode engine pulls it from the prefill engine. "
        "cache: through the cache servers of both; their engines have AntiphonConnector and no other.",
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
    local_max_tokens: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="Prompt tokens that a decode engine may be given to compute, 0 to 10000000: a prompt that is no "
        "longer, or of which a decode engine or its cache server holds all but so many, is sent there without a "
        "hand-over. 0: every request that can be split is. One chunk of the cache server (256) is a start; right is "
        "where computing so many takes a decode engine less time than a hand-over.",
    )
    tokenize_timeout_s: float = Field(
        default=0.02,
        ge=0,
        le=5,
        description="Seconds that a request waits for an engine to tokenize its prompt, 0 to 5, where kv_aware or "
        "local_max_tokens look at tokens; then it is placed by its bytes. 0: no engine is asked.",
    )
    kv_events_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address on which engines' KV events are heard. Whoever reaches it can make the router believe "
        "anything about what engines hold, which costs time, never a wrong answer.",
    )
    kv_events_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="TCP port on which engines' KV events are heard, 1 to 65535; engines connect to it "
        "(--kv-events-config). The compiler takes one for kv_aware.",
    )
    kv_events_ranks: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Data-parallel ranks of an engine that tell of their KV, 1 to 256, each on a port of its own: that "
        "of rank 0 is kv_events_port, and the next rank has one more. The compiler takes data-parallel-size of "
        "engine.args.",
    )
    kv_bytes_per_token: int = Field(
        default=0,
        ge=0,
        le=1_000_000_000,
        description="KV bytes of one token of the model, over all layers and ranks, 0 to 1000000000. 0: not known, or "
        "of no concern: no request waits for its admission. The compiler fills it in where it is not written and the "
        "model's config.json says it.",
    )
    cold_min_bytes: int = Field(
        default=268_435_456,
        ge=1,
        le=1_000_000_000_000,
        description="A prompt with at least so many KV bytes to compute is cold, 1 to 1000000000000 (default: 256 "
        "MiB): only a part of the prefill engines takes cold ones, and their transfers wait for each other.",
    )
    cold_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="The part of the prefill engines that cold prompts may always have, 0 to 1; one engine at least.",
    )
    cold_per_engine: int = Field(
        default=1, ge=1, le=1024, description="Cold prompts on such a prefill engine at once, 1 to 1024."
    )
    cold_queue_max: int = Field(
        default=256, ge=0, le=100_000, description="Cold requests that wait, 0 to 100000; one more gets 429."
    )
    cold_queue_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Seconds that a cold request waits at most, 0 to 3600; then it gets 503 with Retry-After.",
    )
    transfer_bytes_per_s: float = Field(
        default=1e9,
        ge=5e7,
        le=1e12,
        description="Bytes a second from a prefill to a decode engine, 5e7 to 1e12, until it has been measured.",
    )
    tenants_file: str | None = Field(
        default=None,
        description="File that says who the tenants are: their keys, the salt that keeps their KV apart, their rates "
        "and shares (docs/tenants.md). In a spec file, relative to the folder of that file; as a flag, to the working "
        "folder. Instead of api_key_file: every key is then a tenant's.",
    )
    warm_pairs: bool = Field(
        default=True,
        description="Let a decode engine pull a prompt of the router's own from a prefill engine before their pair "
        "serves a client, since their first transfer needs a handshake: for engines that are added at run time, which "
        "wait for it, and for those that come back.",
    )
    warm_pairs_at_start: bool = Field(
        default=False,
        description="Warm the pairs of the engines known at the start too, beside their traffic: one tiny request for "
        "each pair.",
    )
    warm_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds that an added engine may take to answer and its pairs to be warmed, 0 to 3600; then it "
        "takes requests in any case, and before if the engines that it is paired with are too full to answer.",
    )
    api_key_file: str | None = Field(
        default=None,
        description="File with the API keys of clients, one a line; lines that begin with # are left out. With it, "
        "every route but health and the admin routes asks for one of them (Authorization: Bearer KEY, or x-api-key: "
        "KEY). Read at start. There is no --api-key: command lines are visible to every user of a machine.",
    )
    worker_api_key_file: str | None = Field(
        default=None,
        description="File with the one key that engines are shown (Authorization: Bearer KEY), health checks included, "
        "instead of what clients send. Without it a client's Authorization goes on to engines, unless api_key_file or "
        "tenants_file is set: keys that the router checks reach no engine.",
    )
    admin_key_file: str | None = Field(
        default=None,
        description="File with the key that admin routes and receipts ask for (Authorization: Bearer KEY). "
        "Without it they answer on loopback only.",
    )
    public_without_key: bool = Field(
        default=False,
        description="Allow an address other than loopback without keys of clients: anybody who reaches it may use the "
        "inference routes. admin_key_file protects the other routes only.",
    )
    request_id_tag: bool = Field(
        default=True,
        description="Put ___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_ into response ids, as vllm-router does.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged."
    )
    access_log: bool = Field(
        default=False,
        description="Write one JSON object a line to standard output for each request (docs/metrics.md). Off by "
        "default: it costs CPU for each request.",
    )
    enable_tracing: bool = enable_tracing_field()
    otlp_endpoint: OtlpEndpoint = otlp_endpoint_field()
    otlp_protocol: OtlpProtocol = otlp_protocol_field()
    trace_sample_share: float = trace_sample_share_field()
    otlp_metrics_interval_s: float = otlp_metrics_interval_field()

    @property
    def policies(self) -> tuple[Policy, Policy]:
        """Of the prefill and of the decode pool."""
        return self.prefill_policy or self.policy, self.decode_policy or self.policy
