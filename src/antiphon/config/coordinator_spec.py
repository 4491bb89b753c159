"""The knobs of a coordinator, which are its command line: every one once, with its unit, range and reason."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from antiphon.config.cache_server_spec import LoopbackHost, default_runtime_dir
from antiphon.config.model import SpecModel
from antiphon.config.tracing_spec import (
    OtlpEndpoint,
    OtlpProtocol,
    enable_tracing_field,
    otlp_endpoint_field,
    otlp_metrics_interval_field,
    otlp_protocol_field,
)


class CoordinatorSpec(SpecModel):
    """The command line of ``antiphon coordinator``."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        max_length=253,
        description="Address for cache servers; one that is not loopback needs --cluster-secret-file.",
    )
    port: int = Field(
        default=6655,
        ge=0,
        le=65535,
        description="TCP port for cache servers, 0 to 65535; 0 takes a free one and logs it.",
    )
    http_host: LoopbackHost = Field(default="127.0.0.1", description="Loopback address for people and metrics.")
    http_port: int = Field(
        default=8190,
        ge=0,
        le=65535,
        description="TCP port for people and metrics, 0 to 65535; 0 takes a free one and logs it.",
    )
    cluster_secret_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the secret that all cache servers and their coordinator share, at least 32 characters "
        "(default, on loopback only: cluster.secret in --runtime-dir, made if absent).",
    )
    runtime_dir: str = Field(
        default_factory=default_runtime_dir,
        min_length=1,
        description="Folder of the secret that is made where none is given (default: $XDG_RUNTIME_DIR/antiphon, or "
        "/tmp/antiphon-UID).",
    )
    heartbeat_timeout_s: float = Field(
        default=3.0,
        ge=0.5,
        le=300.0,
        description="Seconds after which a cache server that was not heard of is no member, 0.5 to 300. A process that "
        "has ended is none at once.",
    )
    members_max: int = Field(default=1024, ge=1, le=65_536, description="Cache servers at once, 1 to 65536.")
    placements_max: int = Field(
        default=4_000_000,
        ge=1,
        le=1_000_000_000,
        description="Chunks of all members together that are remembered, some 200 bytes each; what comes past it is "
        "not shared.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged."
    )
    enable_tracing: bool = enable_tracing_field()
    otlp_endpoint: OtlpEndpoint = otlp_endpoint_field()
    otlp_protocol: OtlpProtocol = otlp_protocol_field()
    otlp_metrics_interval_s: float = otlp_metrics_interval_field()
