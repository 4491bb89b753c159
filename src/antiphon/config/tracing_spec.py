"""Where spans and metrics go: the ``tracing:`` section of the spec, and the flags of each process that sends some.

The flags are those of the field's cache servers (``--enable-tracing --otlp-endpoint http://localhost:4317``). Imports
pydantic only.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from antiphon.config.model import SpecModel

DEFAULT_ENDPOINT: Final = "http://localhost:4317"
GRPC_PORT: Final = 4317
HTTP_PORT: Final = 4318
_SIGNALS: Final = ("v1/traces", "v1/metrics")
_SCHEMES: Final = ("http", "https", "grpc")


class OtlpUrls(NamedTuple):
    """A collector, as its exporters take it: the protocol, and the address for spans and for metrics."""

    protocol: Literal["grpc", "http"]
    traces: str
    metrics: str


def otlp_urls(endpoint: str, protocol: Literal["auto", "grpc", "http"] = "auto") -> OtlpUrls:
    """What an endpoint means.

    Args:
        endpoint: ``http://HOST:PORT``, ``https://``, ``grpc://``, or ``HOST:PORT``. Over HTTP a path may follow, which
            the paths of the signals are added to, unless it is one of them.
        protocol: auto: HTTP where the port is 4318 or there is a path, else gRPC.

    Raises:
        ValueError: it is no such address; credentials that are in it are not repeated.
    """
    _without_secrets(endpoint)
    wrong = f"{endpoint[:200]!r} is not the address of a collector: write http://HOST:4317 (gRPC) or http://HOST:4318"
    text = endpoint if "://" in endpoint else f"http://{endpoint}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(wrong) from None
    is_clean = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme not in _SCHEMES or not host or not is_clean:
        raise ValueError(wrong)
    path = parts.path.strip("/")
    if protocol == "auto":
        is_http = parts.scheme != "grpc" and (port == HTTP_PORT or bool(path))
    else:
        is_http = protocol == "http"
    if is_http and parts.scheme == "grpc":
        raise ValueError(f"{endpoint[:200]!r} says grpc, and the protocol http: give one of them")
    if not is_http and path:
        raise ValueError(f"{endpoint[:200]!r} has a path, and gRPC has none: leave it out, or give the protocol http")
    name = f"[{host}]" if ":" in host else host
    scheme = "https" if parts.scheme == "https" else "http"
    if port is None and not (is_http and (path or scheme == "https")):  # what is hosted is at the scheme's own port
        port = HTTP_PORT if is_http else GRPC_PORT
    base = f"{scheme}://{name}" if port is None else f"{scheme}://{name}:{port}"
    if not is_http:
        return OtlpUrls("grpc", base, base)
    for signal in _SIGNALS:
        path = path.removesuffix(signal).rstrip("/")
    if path:
        base = f"{base}/{path}"
    traces, metrics = (f"{base}/{signal}" for signal in _SIGNALS)
    return OtlpUrls("http", traces, metrics)


def _without_secrets(endpoint: object) -> object:
    """An address is shown to others: what may be secret in one is refused, and not repeated."""
    if isinstance(endpoint, str) and any(mark in endpoint for mark in "@?#"):
        raise ValueError(
            "the address of a collector has no user, password or query: write them as headers into "
            "OTEL_EXPORTER_OTLP_HEADERS, and http://HOST:4317 here"
        )
    return endpoint


def _endpoint(text: str) -> str:
    """The protocol may stand elsewhere: any that fits is fine here."""
    try:
        otlp_urls(text)
    except ValueError:
        otlp_urls(text, "http")
    return text


def _fits(protocol: Literal["auto", "grpc", "http"], info: ValidationInfo) -> Literal["auto", "grpc", "http"]:
    endpoint = info.data.get("otlp_endpoint")  # absent where it is wrong itself
    if isinstance(endpoint, str):
        otlp_urls(endpoint, protocol)
    return protocol


OtlpEndpoint = Annotated[str, BeforeValidator(_without_secrets), AfterValidator(_endpoint)]
OtlpProtocol = Annotated[Literal["auto", "grpc", "http"], AfterValidator(_fits)]
"""Declared after the endpoint, which it must fit."""

_ENDPOINT_TEXT = (
    "Address of the OpenTelemetry collector: http://HOST:4317 for gRPC; http://HOST:4318, or one with a path, for HTTP "
    "with protocol buffers; https:// for either."
)
_PROTOCOL_TEXT = "What a collector at another port speaks; auto: HTTP at port 4318 or with a path, else gRPC."
_SHARE_TEXT = (
    "Share of the requests without a traceparent of their own that are traced, 0 to 1. One that brings a traceparent "
    "is traced as that says."
)
_INTERVAL_TEXT = "How often metrics are sent, in seconds, 0 to 3600; 0: never, spans alone."


def enable_tracing_field() -> Any:
    """The flag ``--enable-tracing``."""
    return Field(
        default=False,
        description="Send spans of requests, and this process's metrics, to an OpenTelemetry collector. One that does "
        "not answer costs nothing but these.",
    )


def otlp_endpoint_field() -> Any:
    """The flag ``--otlp-endpoint``."""
    return Field(default=DEFAULT_ENDPOINT, min_length=1, max_length=2000, description=_ENDPOINT_TEXT)


def otlp_protocol_field() -> Any:
    """The flag ``--otlp-protocol``."""
    return Field(default="auto", description=_PROTOCOL_TEXT)


def otlp_metrics_interval_field() -> Any:
    """The flag ``--otlp-metrics-interval-s``."""
    return Field(default=15.0, ge=0, le=3600, description=_INTERVAL_TEXT)


def trace_sample_share_field() -> Any:
    """The flag ``--trace-sample-share``."""
    return Field(default=1.0, ge=0, le=1, description=_SHARE_TEXT)


class TracedSpec(Protocol):
    """The spec of a process that has these flags."""

    @property
    def enable_tracing(self) -> bool: ...
    @property
    def otlp_endpoint(self) -> str: ...
    @property
    def otlp_protocol(self) -> Literal["auto", "grpc", "http"]: ...


def otlp_of(spec: TracedSpec) -> OtlpUrls | None:
    """Where the process sends to; None where it sends nothing."""
    return otlp_urls(spec.otlp_endpoint, spec.otlp_protocol) if spec.enable_tracing else None


class TracingSpec(SpecModel):
    """The ``tracing:`` section: spans and metrics of every process of the deployment, vLLM's among them."""

    enabled: bool = Field(
        default=False,
        description="Send spans of requests, and metrics, of the router, the cache servers and the coordinator to an "
        "OpenTelemetry collector, and let vLLM send its own spans there (--otlp-traces-endpoint).",
    )
    otlp_endpoint: OtlpEndpoint = otlp_endpoint_field()
    otlp_protocol: OtlpProtocol = otlp_protocol_field()
    sample_share: float = trace_sample_share_field()
    metrics_interval_s: float = otlp_metrics_interval_field()

    @property
    def urls(self) -> OtlpUrls:
        """Of the collector."""
        return otlp_urls(self.otlp_endpoint, self.otlp_protocol)

    def flags(self) -> tuple[str, ...]:
        """What a cache server or a coordinator is told."""
        if not self.enabled:
            return ()
        flags = ["--enable-tracing", "--otlp-endpoint", self.otlp_endpoint]
        if self.otlp_protocol != "auto":
            flags += ["--otlp-protocol", self.otlp_protocol]
        if self.metrics_interval_s != TracingSpec.model_fields["metrics_interval_s"].default:
            flags += ["--otlp-metrics-interval-s", repr(self.metrics_interval_s)]
        return tuple(flags)

    def router_knobs(self) -> dict[str, Any]:
        """The same for a router, by field."""
        if not self.enabled:
            return {}
        return {
            "enable_tracing": True,
            "otlp_endpoint": self.otlp_endpoint,
            "otlp_protocol": self.otlp_protocol,
            "trace_sample_share": self.sample_share,
            "otlp_metrics_interval_s": self.metrics_interval_s,
        }
