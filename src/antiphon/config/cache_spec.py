"""The cache section of the spec: every knob once, with its unit, range and reason.

It describes what a deployment wants of its cache servers; the command line of one server is ``cache_server_spec.py``.
Imports pydantic only. What concerns several processes is in ``checks.py`` and ``checks_cache.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from antiphon.config.cache_server_spec import (
    SIZE_MAX_BYTES,
    SIZE_MIN_BYTES,
    CacheServerSpec,
    LoopbackHost,
    PolicyName,
    TierUrls,
)
from antiphon.config.cluster import Address
from antiphon.config.model import SpecModel
from antiphon.config.tier_spec import TierSpec, parse_tier
from antiphon.config.units import Bytes
from antiphon.core.tenants import tenant_named


def _as_flag(name: str) -> str:
    """What the flag ``name`` of a cache server says about itself."""
    return CacheServerSpec.model_fields[name].description or ""


def _named_once(quota_bytes: dict[str, int]) -> dict[str, int]:
    names: dict[str, str] = {}
    for name in quota_bytes:
        other = names.setdefault(tenant_named(name), name)
        if other != name:
            raise ValueError(f"{other!r} and {name!r} are one tenant: give one of them")
    return quota_bytes


QuotaBytes = Annotated[Bytes, Field(ge=SIZE_MIN_BYTES, le=SIZE_MAX_BYTES)]


class CacheSpec(SpecModel):
    """The ``cache:`` section: the servers that keep KV for later requests."""

    enabled: bool = Field(
        default=True,
        description="Keep KV of earlier requests in a cache server beside the engines, so that a repeated prefix is "
        "loaded instead of computed. Beside simulated engines and engines on CUDA the servers start only where a key "
        "of this section is written, be it this one, or where another section needs them.",
    )
    shared: bool = Field(
        default=False,
        description="false: one server for the prefill and one for the decode engines of each host; true: one for both "
        "on each host, so that a later turn finds on prefill what decode has stored.",
    )
    l1_size_bytes: Bytes | None = Field(
        default=None,
        ge=SIZE_MIN_BYTES,
        le=SIZE_MAX_BYTES,
        description="Memory of each server for KV in bytes, 1 MB to 16384 GB, also 400MB or 2GiB. Default: a share of "
        "the free memory, at most 2 GiB beside engines on CPU and 16 GiB on CUDA; it is said at the start.",
    )
    chunk_size_tokens: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Tokens in a chunk, 1 to 65536: what is stored and found as one. A multiple of the block size of "
        "every engine; smaller chunks reuse shorter prefixes and cost more calls.",
    )
    eviction_policy: PolicyName = Field(default="lru", description=_as_flag("eviction_policy"))
    host: LoopbackHost = Field(
        default="127.0.0.1",
        description="Loopback address that the servers listen on. An engine uses the server of its own host: KV is "
        "shared through memory.",
    )
    port: int = Field(
        default=6555,
        ge=1,
        le=65535,
        description="Port for the engines of the first server on a host, 1 to 65535; the next gets one more.",
    )
    http_port: int = Field(
        default=8090,
        ge=1,
        le=65535,
        description="Port for people and the router (status, metrics) of the first server on a host, 1 to 65535; the "
        "next gets one more.",
    )
    quota_bytes: Annotated[dict[str, QuotaBytes], AfterValidator(_named_once)] = Field(
        default_factory=dict,
        description="Tenant (the cache_salt of its requests; default: those without) to the bytes that it may occupy "
        "in each server, 1 MB to 16384 GB; past it, its own oldest chunks go.",
    )
    default_quota_bytes: Bytes | None = Field(
        default=None,
        ge=SIZE_MIN_BYTES,
        le=SIZE_MAX_BYTES,
        description="The same in bytes, 1 MB to 16384 GB, for each tenant that quota_bytes does not name (default: no "
        "quota).",
    )
    l2: TierUrls = Field(
        default_factory=list,
        max_length=8,
        description=_as_flag("l2").removesuffix(" May be given again and again (default: none).")
        + " Below the folder of a disk tier each server has one of its own (default: none).",
    )
    onboard_max_s: float = Field(default=5.0, gt=0, le=600, description=_as_flag("onboard_max_s"))
    peers: bool = Field(
        default=False,
        description="Let the servers share what they hold: a prompt first seen by prefill is found by decode, and the "
        "other way round. A coordinator is started, unless coordinator_url names one.",
    )
    peer_port: int = Field(
        default=6755,
        ge=1,
        le=65535,
        description="Port for the other servers of the first server on a host, 1 to 65535; the next gets one more. "
        "Used with peers.",
    )
    peer_transport: Literal["auto", "nixl", "tcp"] = Field(
        default="auto", description=_as_flag("p2p_transport").replace("cache servers", "servers")
    )
    coordinator_url: Address | None = Field(
        default=None,
        description="Address of a coordinator that is started elsewhere, as HOST:PORT or with http:// in front "
        "(default: one is started on the host of the first server).",
    )
    coordinator_port: int = Field(
        default=6655, ge=1, le=65535, description="Port of the coordinator for the servers, 1 to 65535."
    )
    coordinator_http_port: int = Field(
        default=8190,
        ge=1,
        le=65535,
        description="Port of the coordinator for people (status, metrics), 1 to 65535, at the address in host.",
    )
    cluster_secret_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the secret that all servers and their coordinator share, at least 32 characters, on "
        "every host; needed where they are on several hosts (default: cluster.secret in runtime_dir, made if absent).",
    )
    runtime_dir: str | None = Field(default=None, min_length=1, description=_as_flag("runtime_dir"))

    @property
    def tiers(self) -> list[TierSpec]:
        """Those of ``l2``, the fastest first."""
        return [parse_tier(text) for text in self.l2]
