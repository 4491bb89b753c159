"""What the cache servers hold, by the keys of their chunks, and for which engines.

A key commits to its namespace and to every token before it (``core.chunks``), so that a set of keys is all that a
server's content needs. The namespace of a request cannot be computed here: it has the weights and the layout in it. It
is learnt from the reports of engines, which name it for each request they are done with, and holds for all requests of
equal scope (``scope_of``) at the engines of that server. What was never reported is not held, as far as this index
knows.

Always true (``validate``):

- A server that is not up, or whose content was forgotten and not told again, holds nothing.
- Nothing is held beyond the first chunk of a prompt that is missing, and no tail shorter than a chunk.
- Each server has at most ``chunks_max`` keys: what is stored beyond is left out and counted, and reads as not held.

An answer is a hint: it is as old as the last event, and an engine that finds less computes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from antiphon.core.chunks import ChunkChain
from antiphon.core.namespace import DIGEST_BYTES, NamespaceDigest

CHUNKS_MAX: Final = 262_144
"""Keys of one server, some 100 bytes each: 67 million tokens in chunks of 256, which are 8 TiB of an 8B model's KV."""

SCOPES_MAX: Final = 16_384
"""Scopes (models times tenants) whose namespaces are known. Past it the one learnt longest ago is forgotten."""

ENGINES_MAX: Final = 2_048
"""Engines whose server is known, as many as both pools may have."""

NAMESPACES_MAX: Final = 4
"""Namespaces of one scope at one server: more than one where its engines differ in layout or were given new weights."""

SERVERS_MAX: Final = 1_024

SCOPE_BYTES: Final = 16


def scope_of(model: bytes, salt: bytes) -> bytes:
    """A digest of what makes the namespaces of two requests at one engine differ.

    Args:
        model: as the request names it, the name of an adapter too.
        salt: its ``cache_salt``; empty without one.
    """
    return blake2b(b"%d %b%b" % (len(model), model, salt), digest_size=SCOPE_BYTES).digest()


class _Server:
    """The content of one server."""

    def __init__(self, chunk_size_tokens: int) -> None:
        self.chunk_size_tokens = chunk_size_tokens
        self.keys: set[bytes] = set()
        self.is_up = True
        self.num_left_out = 0


class ChunkIndex:
    """What each cache server holds.

    Servers go by any name, engines by theirs; the caller uses the admin address of the one and ``host:port`` of the
    other.

    Args:
        chunks_max: keys kept of one server.
    """

    def __init__(self, chunks_max: int = CHUNKS_MAX) -> None:
        assert chunks_max >= 0
        self._chunks_max = chunks_max
        self._servers: dict[str, _Server] = {}
        self._server_of: dict[str, str] = {}
        self._namespaces: dict[bytes, dict[str, list[bytes]]] = {}
        """By scope and server, the one learnt last at the end."""

    # -- what servers hold ------------------------------------------------------------------------------------------

    def begin(self, server: str, chunk_size_tokens: int) -> None:
        """The server's content is told from the start: what was known of it is forgotten."""
        assert chunk_size_tokens > 0
        assert server in self._servers or len(self._servers) < SERVERS_MAX, f"at most {SERVERS_MAX} servers"
        self._servers[server] = _Server(chunk_size_tokens)

    def forget(self, server: str) -> None:
        """The server's content is not known any more. Which engines are at it stays."""
        self._servers.pop(server, None)

    def set_up(self, server: str, is_up: bool) -> None:
        """Whether the server answers: one that does not holds nothing, and the same as before once it is back."""
        found = self._servers.get(server)
        if found is not None:
            found.is_up = is_up

    def stored(self, server: str, key: bytes) -> None:
        """A chunk is readable there. Says nothing of a server whose content has not begun."""
        found = self._servers.get(server)
        if found is None or key in found.keys:
            return
        if len(found.keys) < self._chunks_max:
            found.keys.add(key)
        else:
            found.num_left_out += 1

    def removed(self, server: str, key: bytes) -> None:
        """A chunk is gone there."""
        found = self._servers.get(server)
        if found is not None:
            found.keys.discard(key)

    def num_chunks(self, server: str) -> int:
        """Keys that are known of the server."""
        found = self._servers.get(server)
        return 0 if found is None else len(found.keys)

    def num_left_out(self, server: str) -> int:
        """Chunks stored there since its content began for which there was no room here."""
        found = self._servers.get(server)
        return 0 if found is None else found.num_left_out

    def has_room(self, server: str) -> bool:
        """Whether one more key would be kept."""
        return self.num_chunks(server) < self._chunks_max

    # -- who uses what ----------------------------------------------------------------------------------------------

    def learn(self, scope: bytes, engine: str, server: str, namespace: bytes) -> None:
        """The engine, whose cache server is ``server``, served a request of this scope under this namespace."""
        if len(namespace) != DIGEST_BYTES:
            return
        if engine in self._server_of or len(self._server_of) < ENGINES_MAX:
            self._server_of[engine] = server
        by_server = self._namespaces.pop(scope, None)
        if by_server is None:
            by_server = {}
            if len(self._namespaces) >= SCOPES_MAX:
                del self._namespaces[next(iter(self._namespaces))]
        self._namespaces[scope] = by_server
        known = by_server.get(server)
        if known is None:
            if len(by_server) < SERVERS_MAX:
                by_server[server] = [namespace]
        elif known[-1] != namespace:
            if namespace in known:
                known.remove(namespace)
            elif len(known) >= NAMESPACES_MAX:
                del known[0]
            known.append(namespace)

    def forget_engine(self, engine: str) -> None:
        """The engine is gone, or has begun a new life, which may be at another server."""
        self._server_of.pop(engine, None)

    def server_of(self, engine: str) -> str | None:
        """The engine's cache server, as it was last reported."""
        return self._server_of.get(engine)

    # -- questions --------------------------------------------------------------------------------------------------

    def num_tokens_held(self, server: str, namespace: bytes, token_ids: Sequence[int]) -> int:
        """Tokens of the prompt, from the first on, that the server holds under this namespace.

        Raises:
            ValueError: a number that is no token id.
        """
        held: dict[str, int] = {}
        self._match(namespace, [server], token_ids, held)
        return held.get(server, 0)

    def held_by_servers(self, scope: bytes, token_ids: Sequence[int]) -> dict[str, int]:
        """By server, how many tokens of the prompt it holds, from the first on; those that hold none are left out.

        The prompt is hashed once for each namespace, up to the first chunk that no server holds.

        Raises:
            ValueError: a number that is no token id.
        """
        held: dict[str, int] = {}
        by_server = self._namespaces.get(scope)
        if by_server is None:
            return held
        servers_of: dict[bytes, list[str]] = {}
        for server, namespaces in by_server.items():
            for namespace in namespaces:
                servers_of.setdefault(namespace, []).append(server)
        for namespace, servers in servers_of.items():
            self._match(namespace, servers, token_ids, held)
        return {server: num_tokens for server, num_tokens in held.items() if num_tokens}

    def held_by_engines(self, scope: bytes, token_ids: Sequence[int]) -> dict[str, int]:
        """By engine, how many tokens of the prompt its cache server holds; as ``held_by_servers``."""
        by_server = self.held_by_servers(scope, token_ids)
        if not by_server:
            return by_server
        return {engine: by_server[server] for engine, server in self._server_of.items() if server in by_server}

    def _match(self, namespace: bytes, servers: Sequence[str], token_ids: Sequence[int], held: dict[str, int]) -> None:
        """Raises ``held`` of each of ``servers`` to what it holds under this namespace."""
        left: list[tuple[str, _Server]] = []
        for name in servers:
            server = self._servers.get(name)
            if server is not None and server.is_up and server.keys:
                left.append((name, server))
        if not left:
            return
        size = left[0][1].chunk_size_tokens
        left = [each for each in left if each[1].chunk_size_tokens == size]  # it is part of the namespace
        chain = ChunkChain(NamespaceDigest(namespace), size)
        num_held = 0
        while left and num_held + size <= len(token_ids):
            key = chain.extend(token_ids[num_held : num_held + size])[0]
            going_on = [each for each in left if key in each[1].keys]
            if len(going_on) < len(left):
                for name, server in left:
                    if key not in server.keys:
                        held[name] = max(held.get(name, 0), num_held)
            left = going_on
            num_held += size
        for name, _ in left:
            held[name] = max(held.get(name, 0), num_held)

    def validate(self) -> None:
        """Assert the invariants; in proportion to all that is kept."""
        assert len(self._servers) <= SERVERS_MAX
        for server in self._servers.values():
            assert len(server.keys) <= self._chunks_max
            assert server.chunk_size_tokens > 0 and server.num_left_out >= 0
        assert len(self._server_of) <= ENGINES_MAX
        assert len(self._namespaces) <= SCOPES_MAX
        for by_server in self._namespaces.values():
            assert 0 < len(by_server) <= SERVERS_MAX
            for namespaces in by_server.values():
                assert 0 < len(namespaces) <= NAMESPACES_MAX and len(set(namespaces)) == len(namespaces)
