"""The connection to a cache server: calls, the mapped arena, reconnection.

``CacheClient`` keeps one connection alive from a thread of its own; ``Session`` is one life of it; ``Pending`` is a
call that was sent. A server that is away costs its callers a typed error and nothing else.
"""

from antiphon.client.client import CacheClient
from antiphon.client.options import ClientOptions, ClientState
from antiphon.client.pending import Pending
from antiphon.client.session import Session

__all__ = ["CacheClient", "ClientOptions", "ClientState", "Pending", "Session"]
