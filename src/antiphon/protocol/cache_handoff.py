"""The key by which KV is handed over through cache servers: what a prefill engine says of what it has stored.

It goes from the prefill engine's connector through ``kv_transfer_params`` to the decode engine's, unread in between,
and from there to the decode engine's cache server with the lookup. In ``kv_transfer_params`` it stands under ``PARAM``:
a prefill engine is asked for it by ``ASKED``, and answers with an object.

Always true: a key that was read names at least one token, and has digests of 32 bytes. It is a hint and no permission:
who follows it must show the cluster secret, and what is read is checked by namespace and digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

PARAM: Final = "antiphon_handoff"
ASKED: Final = b'{"antiphon_handoff":true}'
"""``kv_transfer_params`` of a prefill request whose KV is to be handed over through cache servers."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Address = Annotated[str, msgspec.Meta(max_length=300)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class HandoffKey(msgspec.Struct, frozen=True, array_like=True):
    """What was stored of one prompt, and where.

    Args:
        server: instance name of the cache server.
        incarnation: of the life of the server.
        address: where other cache servers reach it, ``HOST:PORT``; empty where it has no peers.
        namespace: digest of the prompt's namespace.
        last_key: key of the last chunk, into which all before it are chained.
        num_tokens: of the chunks up to that one.
    """

    server: _Name
    incarnation: _Name
    address: _Address
    namespace: _Digest
    last_key: _Digest
    num_tokens: _Tokens

    def as_params(self) -> dict[str, Any]:
        """As a prefill engine answers it in ``kv_transfer_params``."""
        return {
            PARAM: {
                "server": self.server,
                "incarnation": self.incarnation,
                "address": self.address,
                "namespace": self.namespace.hex(),
                "last_key": self.last_key.hex(),
                "num_tokens": self.num_tokens,
            }
        }


def is_asked_for(params: Mapping[str, Any] | None) -> bool:
    """Whether a prefill request asks for the key."""
    return params is not None and params.get(PARAM) is True


def read_key(params: Mapping[str, Any] | None) -> HandoffKey | None:
    """The key in ``kv_transfer_params``; None where there is none that can be understood."""
    value = None if params is None else params.get(PARAM)
    if not isinstance(value, Mapping):
        return None
    try:
        digests = [bytes.fromhex(value["namespace"]), bytes.fromhex(value["last_key"])]
        names = [value["server"], value["incarnation"], value["address"]]
        return msgspec.convert((*names, *digests, value["num_tokens"]), HandoffKey)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError):
        return None
