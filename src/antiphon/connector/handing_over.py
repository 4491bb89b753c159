"""Handing KV over through cache servers, as the scheduler side sees it: what a prefill engine says of what it stores.

The key names what is stored or being stored of a prompt, so that the decode engine's server can wait for it; nothing is
kept for it here. The engine's blocks are held while their stores run, as always, and no longer.
"""

from __future__ import annotations

from typing import Any, Final

from antiphon.client.session import Session
from antiphon.connector.requests import TrackedRequest
from antiphon.protocol.cache_handoff import HandoffKey, is_asked_for

HANDED_OVER_TIMEOUT_S: Final = 0.5
"""Without an answer to the lookup of what was handed over: the whole prompt would be computed a second time."""


def answer_timeout_s(tracked: TrackedRequest, timeout_s: float) -> float:
    """How long the first answer to a request's lookup is waited for.

    Args:
        timeout_s: where nothing was handed over.
    """
    return timeout_s if tracked.handed_over is None else max(timeout_s, HANDED_OVER_TIMEOUT_S)


def handoff_params(tracked: TrackedRequest, session: Session | None, chunk_size_tokens: int) -> dict[str, Any] | None:
    """What a prefill that has ended answers in ``kv_transfer_params``.

    Args:
        session: with the server that the chunks are offered to.

    Returns:
        None where it was not asked for, or no chunk of the prompt is offered: the decode engine computes it then.
    """
    if not is_asked_for(tracked.request.kv_transfer_params) or session is None or tracked.identity is None:
        return None
    assert tracked.chain is not None
    num_chunks = min(tracked.num_stored_chunks, tracked.request.num_prompt_tokens // chunk_size_tokens)
    if num_chunks == 0 or num_chunks > len(tracked.chain.keys):
        return None
    where = (session.instance, session.incarnation, session.peer_address)
    what = (tracked.identity.namespace, tracked.chain.keys[num_chunks - 1], num_chunks * chunk_size_tokens)
    return HandoffKey(*where, *what).as_params()
