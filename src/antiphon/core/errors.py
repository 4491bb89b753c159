"""The error tree: every error that Antiphon raises on purpose.

    AntiphonError
    ├── ConfigError        the spec or a flag cannot work; nothing was started
    ├── StartError         a process did not become ready
    ├── ProtocolError      a peer or a client sent something malformed
    │   └── RequestRefused     a client's request is refused, with the HTTP status to send
    ├── CacheError         a call to the cache is refused; the caller goes on without reuse
    │   ├── CapacityExceeded   no room now: the arena, or the caller's share of it, is held by others
    │   ├── QuotaExceeded      the tenant's quota is full of what cannot be evicted
    │   ├── LayoutMismatch     the call and what is registered differ in meaning: layout, model or tenant
    │   ├── ConnectionUnknown  the connection is not attached
    │   ├── ChunkUnknown       there is no such chunk in memory, or no such pin
    │   ├── ChunksPinned       what would go is pinned
    │   ├── LeaseUnknown       there is no such lease, or it has ended
    │   ├── NotOwner           the lease belongs to another request or engine
    │   ├── StaleHandle        the region was given to something else, or the writer holds no reservation on it
    │   ├── VersionMismatch    client and server speak different versions of the protocol
    │   ├── NotLocal           the call needs the unix socket of the host
    │   ├── CacheUnavailable   no connection to a cache server, or it ended before the answer
    │   └── CallTimeout        the cache server did not answer in time
    ├── TierError          a call to a tier behind the arena failed; the caller goes on as after a miss
    │   ├── TierUnavailable    it is out of service: no connection, refused, or closed
    │   ├── TierTimeout        it did not answer by the deadline
    │   ├── TierFull           it has no room for a chunk
    │   └── TierCorrupt        a record was damaged, or means something else; it was removed
    ├── PeerError          a call to a peer or to the coordinator failed; the caller goes on as after a miss
    │   ├── PeerRefused        one of the two sides has not shown the cluster secret, or speaks another version
    │   ├── PeerUnavailable    no connection, or it ended before the answer
    │   └── PeerTimeout        no answer by the deadline
    └── UpstreamError      an engine failed while it served a request
        ├── ConnectFailed      no connection was made: no byte of the request was written
        │   ├── ConnectTimeout     nothing answered at its address in time
        │   └── OwnLimit           because of a limit of this process, which says nothing about the engine
        ├── UpstreamLost       the connection ended before the response was complete
        ├── UpstreamTimeout    a stage deadline passed
        └── UpstreamGarbage    the engine answered with something that cannot be used

A message says what is wrong; ``remedy`` says what to do; ``field`` names the spec field, where there is one. Bugs are
assertions, not members of this tree.
"""

from __future__ import annotations


class AntiphonError(Exception):
    """Base of the tree.

    Args:
        message: what is wrong, one sentence, no trailing newline.
        field: dotted path of the spec field concerned (``pools.prefill.port``), where there is one.
        remedy: what the reader should do about it.
    """

    def __init__(self, message: str, *, field: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.remedy = remedy

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        fix = f" ({self.remedy})" if self.remedy else ""
        return f"{where}{self.message}{fix}"


class ConfigError(AntiphonError):
    """The spec or a flag cannot work. Raised before anything is started."""


class StartError(AntiphonError):
    """A process ended, or passed its deadline, before it was ready."""


class ProtocolError(AntiphonError):
    """A peer or a client sent something malformed."""


class RequestRefused(ProtocolError):
    """A client's request is refused.

    Args:
        message: what the client reads; never an internal address.
        status: the HTTP status to send, 400 to 599.
        kind: OpenAI error ``type``.
        code: short machine-readable code.
        param: the request field concerned, where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        assert 400 <= status <= 599, status
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param


class CacheError(AntiphonError):
    """A call to the cache is refused. Nothing was changed by it; the caller goes on without reuse."""


class CapacityExceeded(CacheError):
    """No room now: the arena, or the caller's share of it, is held by leases, reservations and quarantine."""


class QuotaExceeded(CacheError):
    """The tenant's quota is full of what cannot be evicted."""


class LayoutMismatch(CacheError):
    """The call and what is registered differ in meaning: layout, model or tenant."""


class ConnectionUnknown(CacheError):
    """The connection is not attached."""


class ChunkUnknown(CacheError):
    """There is no such chunk in memory, or no such pin."""


class ChunksPinned(CacheError):
    """What would go is pinned."""


class LeaseUnknown(CacheError):
    """There is no such lease, or it has ended."""


class NotOwner(CacheError):
    """The lease belongs to another request or engine."""


class StaleHandle(CacheError):
    """The region was given to something else, or the writer holds no reservation on it."""


class VersionMismatch(CacheError):
    """Client and server speak different versions of the protocol."""


class NotLocal(CacheError):
    """The call needs the unix socket of the host, which passes the arena."""


class CacheUnavailable(CacheError):
    """There is no connection to a cache server, or it ended before the answer."""


class CallTimeout(CacheError):
    """The cache server did not answer in time."""


class UpstreamError(AntiphonError):
    """An engine failed while it served a request. ``retryable`` says whether trying another engine is safe."""

    retryable = False


class ConnectFailed(UpstreamError):
    """No connection was made, so no byte of the request was written."""

    retryable = True


class ConnectTimeout(ConnectFailed):
    """Nothing answered at the engine's address in time."""


class OwnLimit(ConnectFailed):
    """No connection was made because of a limit of this process or machine: it says nothing about the engine."""

    retryable = False


class UpstreamLost(UpstreamError):
    """The connection ended before the response was complete."""


class UpstreamTimeout(UpstreamError):
    """A stage deadline passed."""


class UpstreamGarbage(UpstreamError):
    """The engine answered with something that cannot be used."""


class TierError(AntiphonError):
    """A call to a tier behind the arena failed. The caller goes on as after a miss."""


class TierUnavailable(TierError):
    """The tier is out of service: no connection, access refused, or closed."""


class TierTimeout(TierError):
    """The tier did not answer by the deadline. Whether it did what it was asked is not known."""


class TierFull(TierError):
    """The tier has no room for a chunk."""


class TierCorrupt(TierError):
    """A record was damaged, or means something else than what was asked for. It was removed."""


class PeerError(AntiphonError):
    """A call to a peer or to the coordinator failed. The caller goes on as after a miss."""


class PeerRefused(PeerError):
    """One of the two sides has not shown the cluster secret, or speaks another version."""


class PeerUnavailable(PeerError):
    """There is no connection, or it ended before the answer."""


class PeerTimeout(PeerError):
    """No answer came by the deadline."""
