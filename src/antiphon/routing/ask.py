"""What a choice of an engine may go by, of one request.

A request that no policy of the fleet wants to know anything about has no ``Ask`` at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.routing.endpoint import Endpoint


class Prompt:
    """The prompt of one request, and how long it is.

    Owns the digests of its prefixes once something has asked for them (``prefix_index``), so that they are computed
    once for all choices of a request. Its other attributes are not changed once they are known; ``num_tokens`` and
    ``token_ids`` may come later than the rest. It does not look into ``data``.

    Args:
        scope: a digest of everything but the prompt that makes KV unequal: the model, the tenant's salt, the text of
            tools. Prompts of different scopes share nothing, whatever their bytes.
        data: the bytes of the prompt or of the list of messages, as the client sent them.
        num_tokens: estimated (``token_estimate``), or counted where ``token_ids`` is given.
        token_ids: from the engine's tokenizer; None where it was not asked, or took too long.
    """

    scope: bytes
    data: bytes
    num_tokens: int
    token_ids: Sequence[int] | None
    hashes: list[int] | None
    """``prefix_index.prefix_hashes`` of it; None until they are computed."""

    def __init__(self, scope: bytes, data: bytes, num_tokens: int = 0, token_ids: Sequence[int] | None = None) -> None:
        self.scope = scope
        self.data = data
        self.num_tokens = num_tokens
        self.token_ids = token_ids
        self.hashes = None


class Ask:
    """What the choices for one request go by, and what the last one found.

    Args:
        key: for ``consistent_hash`` (``pickers.affinity_key``); None where there is none or no policy wants it.
        prompt: None where there is none or no policy wants it.
        preferred: the decode engine that is to have the request if it can, None where any will do.
    """

    key: int | None
    prompt: Prompt | None
    preferred: Endpoint | None
    num_matched_tokens: int
    """Set by each pick: tokens of the prompt that the chosen engine is expected to hold."""
    noted: dict[Endpoint, int] | None
    """Engines that prefix_aware has picked for this request, and the tokens each was expected to hold before that: a
    pick that came to nothing is no reason to expect more."""

    def __init__(self, key: int | None = None, prompt: Prompt | None = None, preferred: Endpoint | None = None) -> None:
        self.key = key
        self.prompt = prompt
        self.preferred = preferred
        self.shunned: tuple[Endpoint, ...] = ()
        """Prefill engines that are passed over while another is ready."""
        self.num_matched_tokens = 0
        self.noted = None
