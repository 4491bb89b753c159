"""Which decode engine has pulled from which prefill engine: the pairs whose handshake is done.

The first transfer between two engines needs a handshake, which takes seconds. A pair is cold again when either engine
restarts.
"""

from __future__ import annotations

from collections.abc import Iterable

from antiphon.routing.endpoint import Endpoint


class WarmPairs:
    """The warm pairs of two pools."""

    def __init__(self) -> None:
        self._partners: dict[Endpoint, dict[Endpoint, tuple[int, int]]] = {}

    def warm(self, prefill: Endpoint, decode: Endpoint) -> None:
        """``decode`` has pulled from ``prefill`` in their present lives."""
        self._partners.setdefault(prefill, {})[decode] = (prefill.life, decode.life)

    def is_warm(self, prefill: Endpoint, decode: Endpoint) -> bool:
        """Whether the pair is warm."""
        return self._partners.get(prefill, {}).get(decode) == (prefill.life, decode.life)

    def cold(self, prefills: Iterable[Endpoint], decodes: Iterable[Endpoint]) -> list[tuple[Endpoint, Endpoint]]:
        """The pairs that are not warm: what to warm before an endpoint is opened. An engine is no pair with itself."""
        others = list(decodes)
        return [
            (prefill, decode)
            for prefill in prefills
            for decode in others
            if prefill.address != decode.address and not self.is_warm(prefill, decode)
        ]

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint is gone."""
        self._partners.pop(endpoint, None)
        for partners in self._partners.values():
            partners.pop(endpoint, None)

    def validate(self, prefills: Iterable[Endpoint], decodes: Iterable[Endpoint]) -> None:
        """Assert that only endpoints of the pools are known."""
        assert self._partners.keys() <= set(prefills)
        known = set(decodes)
        for partners in self._partners.values():
            assert partners.keys() <= known
