"""The simulated engine's part in a hand-over through cache servers: it stores and loads chunks of its 32-byte blocks.

It does what the connector does inside vLLM, through the same client and against the same server: reserve, copy, commit;
look up, copy, release; report. A chunk is the bytes of its blocks, so that a wrong one changes the text. Calls wait, in
a bounded pool of threads; what fails is a miss.

Always true: a lease is given back once its copy has ended; the answer of a prefill leaves before its chunks are stored,
as with a real engine, so that a reader has to wait for them.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from antiphon.client.client import CacheClient
from antiphon.client.options import ClientOptions
from antiphon.client.pending import Pending
from antiphon.client.session import Session
from antiphon.core.chunks import chunk_keys
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import AntiphonError
from antiphon.core.namespace import NamespaceDigest
from antiphon.core.tenants import tenant_named
from antiphon.engine.simulated.kv import BLOCK_BYTES
from antiphon.engine.simulated.sequence import Sequence as Request
from antiphon.protocol import cache as calls
from antiphon.protocol.cache_handoff import HandoffKey

THREADS: Final = 8
ONBOARD_MAX_S: Final = 600.0
"""The server's own limit is shorter."""
_ID_END: Final = 1 << 31
"""Real vocabularies are far smaller: cache keys have no room for the ids that hold a text's bytes (``tokenizer``)."""
ANSWER_SLACK_S: Final = 0.5
ONBOARD_SLACK_S: Final = 1.0
"""Beyond the time that the server has named."""


@dataclass(frozen=True)
class CacheOptions:
    """Where the cache server is.

    Args:
        port: of its calls, on loopback.
        chunk_size_tokens: of the server; whole blocks.
    """

    port: int
    chunk_size_tokens: int = 256


class SimulatedCache:
    """The connection of one engine to its cache server.

    Args:
        options: of the server.
        engine_id: name and life of the engine.
        model_name: part of what its KV means.
        block_size_tokens: of the engine.
    """

    def __init__(self, options: CacheOptions, engine_id: str, model_name: str, block_size_tokens: int) -> None:
        assert options.chunk_size_tokens % block_size_tokens == 0, "a chunk is made of whole blocks"
        self._options = options
        self._model_name = model_name
        self._blocks_per_chunk = options.chunk_size_tokens // block_size_tokens
        self._chunk_bytes = self._blocks_per_chunk * BLOCK_BYTES
        self._engine, _, self._incarnation = engine_id.rpartition("-")
        self._client = CacheClient(
            ClientOptions(
                host="127.0.0.1",
                port=options.port,
                role="simulated",
                engine=self._engine or engine_id,
                incarnation=self._incarnation,
                model=model_name,
                layout=ChunkLayout(1, self._chunk_bytes, f"simulated-{block_size_tokens}"),
                chunk_size_tokens=options.chunk_size_tokens,
                slabs=(0,),
                needs_arena=True,
            )
        )
        self._threads = ThreadPoolExecutor(THREADS, "antiphon-simulated-cache")
        self.num_failed_stores = 0
        self._client.start()

    def close(self) -> None:
        """Ends the connection; what runs fails."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _namespace(self, request: Request) -> NamespaceDigest:
        said = f"antiphon simulated\0{self._model_name}\0{request.namespace}\0{self._options.chunk_size_tokens}"
        return NamespaceDigest(hashlib.sha256(said.encode("utf-8", "replace")).digest())

    def _keys(self, request: Request) -> list[bytes]:
        tokens = [token if token < _ID_END else zlib.crc32(token.to_bytes(8)) % _ID_END for token in request.prompt]
        return list(chunk_keys(self._namespace(request), tokens, self._options.chunk_size_tokens))

    # ---- prefill -----------------------------------------------------------------------------------------------------

    def handoff_params(self, request: Request) -> dict[str, Any] | None:
        """What a prefill answers; None where no chunk of it is stored."""
        session, keys = self._client.session, self._keys(request)
        if session is None or not keys:
            return None
        where = (session.instance, session.incarnation, session.peer_address)
        num_tokens = len(keys) * self._options.chunk_size_tokens
        return HandoffKey(*where, self._namespace(request), keys[-1], num_tokens).as_params()

    def store(self, request: Request, contents: list[bytes]) -> None:
        """Begins to store the full chunks of a prompt.

        Args:
            contents: of its full blocks, from the first on.
        """
        self._threads.submit(self._store, self._client.session, request, contents)

    def _store(self, session: Session | None, request: Request, contents: list[bytes]) -> None:
        keys = self._keys(request)
        if session is None or not keys or not session.hold():
            return
        try:
            names = (self._namespace(request), tenant_named(request.namespace))
            body = calls.Reserve(*names, None, b"".join(keys), request.traceparent)
            reserved = session.call(body)
            assert isinstance(reserved, calls.Reserved)
            for grant in reserved.grants:
                blocks = contents[grant.index * self._blocks_per_chunk : (grant.index + 1) * self._blocks_per_chunk]
                ctypes.memmove(session.address_of(grant.region), b"".join(blocks), self._chunk_bytes)
            if reserved.grants:
                session.call(calls.Commit(tuple(grant.region for grant in reserved.grants)))
        except AntiphonError:
            self.num_failed_stores += 1
        finally:
            session.unhold()

    # ---- decode ------------------------------------------------------------------------------------------------------

    async def load(self, request: Request, key: HandoffKey) -> list[bytes]:
        """The bytes of the blocks of what was handed over, from the first on, as far as they are found."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._load, request, key)

    def _load(self, request: Request, key: HandoffKey) -> list[bytes]:
        session, keys = self._client.session, self._keys(request)
        if session is None or not keys or not session.hold():
            return []
        try:
            namespace, tenant = self._namespace(request), tenant_named(request.namespace)
            waits, of_trace = (ONBOARD_MAX_S, 0.0), request.traceparent
            body = calls.Lookup(request.request_id, namespace, tenant, b"".join(keys), *waits, key, of_trace)
            found = _wait(session.submit(body))
            if found is None or found.lease is None:
                return []
            try:
                return [
                    ctypes.string_at(session.address_of(region) + block * BLOCK_BYTES, BLOCK_BYTES)
                    for region in found.regions
                    for block in range(self._blocks_per_chunk)
                ]
            finally:
                self._client.release(session.incarnation, request.request_id, found.lease)
        except AntiphonError:
            return []
        finally:
            session.unhold()

    def report(self, request: Request, *, is_aborted: bool) -> None:
        """Says where the tokens of a prompt came from."""
        session = self._client.session
        if session is None:
            return
        num_prompt, device, loaded = len(request.prompt), request.num_cached_tokens, request.num_pulled_tokens
        session.submit(
            calls.Report(
                request=request.request_id,
                engine=self._engine,
                incarnation=self._incarnation,
                num_prompt_tokens=num_prompt,
                device=device,
                l1=0,
                remote_prefill=loaded,
                computed=num_prompt - device - loaded,
                num_preemptions=0,
                finish="aborted" if is_aborted else "finished",
                namespace=self._namespace(request),
            )
        )


def _wait(pending: Pending) -> calls.Found | None:
    """The answer to a lookup, however long the server says that it takes; None where it does not come."""
    until_s = time.monotonic() + ANSWER_SLACK_S
    while not pending.wait(until_s - time.monotonic()):
        onboarding = pending.onboarding
        if onboarding is None or time.monotonic() >= onboarding[1] + onboarding[0].wait_s + ONBOARD_SLACK_S:
            pending.abandon()
            return None
        until_s = onboarding[1] + onboarding[0].wait_s + ONBOARD_SLACK_S
    found = pending.result()
    assert isinstance(found, calls.Found)
    return found
