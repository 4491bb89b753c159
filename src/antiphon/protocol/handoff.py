"""vLLM's hand-over fields, for each of its APIs: what is asked of the prefill engine.

``kv_transfer_params`` of the answer is passed on unread, as the bytes that arrived: its keys differ between vLLM
versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from antiphon.protocol.body import Body, Buffer, member, scan
from antiphon.protocol.cache_handoff import ASKED

PREFILL_PARAMS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""What a prefill request carries in ``kv_transfer_params`` (vLLM, NixlConnector)."""

PARAMS_OF: Final[Mapping[str, bytes]] = {"nixl": PREFILL_PARAMS, "cache": ASKED}
"""The same, by how KV is handed over: the engine pulls from the other, or its cache server does."""

_Fields = Mapping[str, bytes]


class Handoff:
    """How the requests of one API become a prefill.

    Args:
        always: what is asked of the prefill engine, by key, as raw JSON.
        if_present: the same, where the client sent the key.
        if_streamed: the same, where it also asked for a stream.
        to_drain: the same, in a decode request whose only use is to pull the KV.
    """

    def __init__(
        self,
        always: _Fields,
        if_present: _Fields | None = None,
        if_streamed: _Fields | None = None,
        to_drain: _Fields | None = None,
    ) -> None:
        self._always = {**always, "kv_transfer_params": PREFILL_PARAMS}
        members = {key: member(key, value) for key, value in self._always.items()}
        self._members = {
            params: {**members, "kv_transfer_params": member("kv_transfer_params", params)}
            for params in PARAMS_OF.values()
        }
        self._if_present = if_present or {}
        self._if_streamed = if_streamed or {}
        self._to_drain = to_drain or {}
        self._not_plain = frozenset((*self._if_present, *self._if_streamed))
        self.replaced = frozenset((*self._always, *self._not_plain, *self._to_drain, "cache_salt"))
        """Every top-level key of a body that a request to an engine may replace."""

    def prefill_fields(self, body: Body) -> Mapping[str, bytes]:
        """The fields that turn a client's request into a prefill: one token, one sequence, a whole answer, and a
        handle."""
        if self._not_plain.isdisjoint(body.values):
            return self._always
        fields = {key: value for key, value in self._if_present.items() if key in body.values}
        if body.get("stream") == b"true":
            fields.update((key, value) for key, value in self._if_streamed.items() if key in body.values)
        return {**fields, **self._always}

    def prefill_body(self, body: Body, params: bytes = PREFILL_PARAMS) -> list[Buffer]:
        """The client's request as a prefill: see :meth:`prefill_fields`.

        Args:
            params: one of ``PARAMS_OF``.
        """
        fields = self.prefill_fields(body)
        if params is not PREFILL_PARAMS:
            fields = {**fields, "kv_transfer_params": params}
        return body.splice(fields, self._members[params])

    def drain_fields(self, body: Body, params: bytes) -> dict[str, bytes]:
        """The fields of a decode request whose only use is to pull the KV, since the client has left."""
        fields = {key: value for key, value in self._to_drain.items() if key in body.values}
        return {**fields, **self.prefill_fields(body), "kv_transfer_params": params}


class NestedHandoff(Handoff):
    """The same, where the limits stand in an object within the body.

    Args:
        key: of that object.
        inner: what is asked in it.
        inner_if_present: the same, where the client sent the key.
        rest: as for :class:`Handoff`, at the top of the body.
    """

    def __init__(self, key: str, inner: _Fields, inner_if_present: _Fields, rest: tuple[_Fields, _Fields]) -> None:
        Handoff.__init__(self, rest[0], {key: b""}, rest[1])
        self._key = key
        self._inner = inner
        self._inner_if_present = inner_if_present

    def prefill_fields(self, body: Body) -> Mapping[str, bytes]:
        """See :meth:`Handoff.prefill_fields`; an object that is none is left for the engine to refuse."""
        fields = dict(Handoff.prefill_fields(self, body))
        nested = nested_body(body, self._key)
        if nested is None:
            fields.pop(self._key, None)
        else:
            inner = {key: value for key, value in self._inner_if_present.items() if key in nested.values}
            fields[self._key] = b"".join(nested.splice({**inner, **self._inner}))
        return fields


def nested_body(body: Body, key: str) -> Body | None:
    """The object that is the value of ``key``, as it was sent; None where there is none.

    Raises:
        ProtocolError: it has too many keys.
    """
    text = body.sent(key)
    return scan(text) if text is not None and text.startswith(b"{") else None


# min_tokens keeps an end-of-sequence token from ending the prefill in a way that frees the blocks at once, on engines
# that hand over only what ended by its length. vLLM refuses stream_options without a stream, before it computes
# anything: only those of a stream are taken away.
COMPLETION = Handoff(
    {"max_tokens": b"1", "min_tokens": b"1", "stream": b"false"},
    {"max_completion_tokens": b"1", "n": b"1"},
    {"stream_options": b"null"},
)
"""Completions and chats."""

RESPONSE = Handoff({"max_output_tokens": b"1", "stream": b"false", "store": b"false"})
"""Responses: the prefill engine keeps none."""

MESSAGE = Handoff({"max_tokens": b"1", "stream": b"false"}, to_drain={"thinking": b"null"})
"""Messages. vLLM holds a thinking budget against ``max_tokens``, except in a prefill: a request that only pulls has
none."""

GENERATE = NestedHandoff(
    "sampling_params",
    {"max_tokens": b"1", "min_tokens": b"1"},
    {"n": b"1"},
    ({"stream": b"false"}, {"stream_options": b"null"}),
)
"""Tokens in, tokens out: the limits stand in ``sampling_params``."""


def decode_body(body: Body, params: bytes) -> list[Buffer]:
    """The client's request to a decode engine, with the handle that the prefill engine answered."""
    return body.splice({"kv_transfer_params": params}, {"kv_transfer_params": b'"kv_transfer_params":' + params})
