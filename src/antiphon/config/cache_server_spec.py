"""The knobs of one cache server, which are its command line: every one once, with its unit, range and reason.

Flags are spelled as the field's cache servers spell them, so that their command lines work as they stand. Imports
pydantic only, so that the process stays small.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from antiphon.config.cluster import Address, ListenAddress
from antiphon.config.hosts import is_loopback
from antiphon.config.model import SpecModel
from antiphon.config.tier_spec import TierSpec, parse_tier
from antiphon.config.tracing_spec import (
    OtlpEndpoint,
    OtlpProtocol,
    enable_tracing_field,
    otlp_endpoint_field,
    otlp_metrics_interval_field,
    otlp_protocol_field,
)
from antiphon.core.errors import ConfigError
from antiphon.core.tenants import tenant_named

GB = 10**9
"""Bytes of what the flags call a GB."""

_SIZE_MIN_GB = 0.001
_SIZE_MAX_GB = 16_384.0
SIZE_MIN_BYTES = round(_SIZE_MIN_GB * GB)
SIZE_MAX_BYTES = round(_SIZE_MAX_GB * GB)


def default_runtime_dir() -> str:
    """``$XDG_RUNTIME_DIR/antiphon``, or ``/tmp/antiphon-UID`` where the variable is unset or relative."""
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    return str(Path(root) / "antiphon") if Path(root).is_absolute() else f"/tmp/antiphon-{os.getuid()}"


def _loopback(host: str) -> str:
    if not is_loopback(host):
        raise ValueError(
            f"{host!r} is not a loopback address: calls carry no key in this version, so that anybody who reached the "
            "port could read names and clear the cache. Engines use the server of their own host; write 127.0.0.1"
        )
    return host


def parse_quota(text: str) -> tuple[str, int]:
    """Tenant and bytes of ``TENANT=GB``.

    Raises:
        ValueError: it has another form.
    """
    tenant, _, size = text.rpartition("=")
    try:
        gigabytes = float(size)
    except ValueError:
        gigabytes = 0.0
    if not tenant or not _SIZE_MIN_GB <= gigabytes <= _SIZE_MAX_GB:
        raise ValueError(f"{text!r} is no quota: write TENANT=GB, from {_SIZE_MIN_GB} to {_SIZE_MAX_GB:g} GB")
    return tenant, round(gigabytes * GB)


def _quota(text: str) -> str:
    parse_quota(text)
    return text


def _quotas(texts: list[str]) -> list[str]:
    tenants = [tenant_named(parse_quota(text)[0]) for text in texts]
    twice = sorted({tenant for tenant in tenants if tenants.count(tenant) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} has two quotas: give one")
    return texts


def _policy_name(value: object) -> object:
    folded = value.lower() if isinstance(value, str) else value
    # What is none is shown as it was written.
    return folded if folded in ("lru", "arc") else value


def _tier(text: str) -> str:
    try:
        parse_tier(text)
    except ConfigError as error:
        raise ValueError(f"{error.message}: {error.remedy}" if error.remedy else error.message) from None
    return text


def _tiers(texts: list[str]) -> list[str]:
    names = [parse_tier(text).tier_name for text in texts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two tiers are named {twice[0]}: give one of them another name, as in ?name=second")
    return texts


LoopbackHost = Annotated[str, AfterValidator(_loopback)]
Quota = Annotated[str, AfterValidator(_quota)]
TierUrl = Annotated[str, AfterValidator(_tier)]
TierUrls = Annotated[list[TierUrl], AfterValidator(_tiers)]
PolicyName = Annotated[Literal["lru", "arc"], BeforeValidator(_policy_name)]
"""In any case: the field's command lines write LRU."""


class CacheServerSpec(SpecModel):
    """The command line of ``antiphon cache-server``."""

    host: LoopbackHost = Field(
        default="127.0.0.1",
        description="Loopback address for calls over TCP. An engine's first call goes there; it is told the unix "
        "socket, which passes the memory.",
    )
    port: int = Field(
        default=6555, ge=0, le=65535, description="TCP port for calls, 0 to 65535; 0 takes a free one and logs it."
    )
    http_host: LoopbackHost = Field(
        default="127.0.0.1", description="Loopback address for people, metrics and the router."
    )
    http_port: int = Field(
        default=8090,
        ge=0,
        le=65535,
        description="TCP port for people, metrics and the router, 0 to 65535; 0 takes a free one and logs it.",
    )
    l1_size_gb: float = Field(
        ge=_SIZE_MIN_GB,
        le=_SIZE_MAX_GB,
        description="Memory for KV in GB (10^9 bytes), 0.001 to 16384. More than is free is refused.",
    )
    eviction_policy: PolicyName = Field(
        default="lru",
        description="What goes when room is needed: lru, the chunk used longest ago; arc, which also keeps what is "
        "used often when many prompts pass by once.",
    )
    chunk_size: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Tokens in a chunk, 1 to 65536, the same in every engine; a multiple of their block sizes.",
    )
    instance_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=48,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of this server, one at a time in a runtime folder: letters, digits, dot, dash, underscore. "
        "Default: port-PORT.",
    )
    runtime_dir: str = Field(
        default_factory=default_runtime_dir,
        min_length=1,
        description="Folder of the unix socket, for this user only (default: $XDG_RUNTIME_DIR/antiphon, or "
        "/tmp/antiphon-UID). Short, since a socket's path has at most 107 bytes.",
    )
    default_quota_gb: float | None = Field(
        default=None,
        ge=_SIZE_MIN_GB,
        le=_SIZE_MAX_GB,
        description="GB that each tenant without a --quota may occupy, 0.001 to 16384 (default: no quota).",
    )
    quota: Annotated[list[Quota], AfterValidator(_quotas)] = Field(
        default_factory=list,
        max_length=4096,
        description="TENANT=GB: what one tenant may occupy: the cache_salt of its requests, or default for those "
        "without; past it, its own oldest chunks go. May be given again and again.",
    )
    l2: TierUrls = Field(
        default_factory=list,
        max_length=8,
        description="URL of a tier behind the memory, the fastest first: disk:///folder?capacity_gb=100, "
        "redis://host:6379/0, s3://bucket/prefix, mooncake://host:50051, each with options such as store=back. Chunks "
        "outlive evictions and restarts there. May be given again and again (default: none).",
    )
    onboard_max_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="Longest time in seconds that a lookup waits for chunks of a tier, up to 600. What is in memory is "
        "answered at once, and an engine waits no longer than computing the same would take.",
    )
    coordinator_url: Address | None = Field(
        default=None,
        description="Address of the coordinator, as HOST:PORT or with http:// in front, to share chunks with other "
        "cache servers; with --p2p-advertise-url (default: nothing is shared).",
    )
    p2p_advertise_url: ListenAddress | None = Field(
        default=None,
        description="Address under which other cache servers reach this one, as HOST:PORT or with http:// in front; "
        "port 0 takes a free one. With --coordinator-url.",
    )
    p2p_host: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Address to listen on for other cache servers, with the port of --p2p-advertise-url (default: its "
        "host).",
    )
    p2p_transport: Literal["auto", "nixl", "tcp"] = Field(
        default="auto",
        description="How KV comes from other cache servers: nixl; tcp, which needs nothing; auto, nixl where it works.",
    )
    cluster_secret_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the secret that all cache servers and their coordinator share, at least 32 characters; "
        "needed for addresses that are not loopback (default: cluster.secret in --runtime-dir, made if absent).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged."
    )
    enable_tracing: bool = enable_tracing_field()
    otlp_endpoint: OtlpEndpoint = otlp_endpoint_field()
    otlp_protocol: OtlpProtocol = otlp_protocol_field()
    otlp_metrics_interval_s: float = otlp_metrics_interval_field()

    @property
    def l1_size_bytes(self) -> int:
        """Memory for KV in bytes."""
        return round(self.l1_size_gb * GB)

    @property
    def tiers(self) -> list[TierSpec]:
        """The tiers, the fastest first."""
        return [parse_tier(text) for text in self.l2]

    @property
    def quota_bytes(self) -> dict[str, int]:
        """Bytes by tenant."""
        return {tenant_named(name): size_bytes for name, size_bytes in map(parse_quota, self.quota)}

    @property
    def default_quota_bytes(self) -> int | None:
        """Bytes of each other tenant; None without a quota."""
        return None if self.default_quota_gb is None else round(self.default_quota_gb * GB)
