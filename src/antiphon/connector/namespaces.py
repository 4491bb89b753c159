"""What the KV of a request means: the model's identity, and what the request adds to it.

Always true: two requests with the same namespace, tokens and items have the same KV. An adapter is named by its
content, read once when it is first seen. If its files are replaced while vLLM has it loaded, its name stays, as it does
in vLLM's own cache.
"""

from __future__ import annotations

from collections import OrderedDict

from antiphon.connector import compat
from antiphon.connector.requests import RequestIdentity
from antiphon.connector.weights import Source, weights_revision
from antiphon.core.chunks import MultimodalItem
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import ConfigError
from antiphon.core.namespace import LoraIdentity, ModelIdentity, Namespace, NamespaceDigest
from antiphon.core.tenants import tenant_of

NAMESPACES_MAX = 4096
"""Namespaces kept: one for each adapter and salt in use; past it the one used longest ago is made again."""
ADAPTERS_MAX = 4096


class Identifier:
    """What the KV of each request means.

    Args:
        model: identity of the engine's model.
        layout: the form of a chunk.
        chunk_size_tokens: tokens of a chunk.
    """

    def __init__(self, model: ModelIdentity, layout: ChunkLayout, chunk_size_tokens: int) -> None:
        self.model = model
        self.layout = layout
        self.chunk_size_tokens = chunk_size_tokens
        self._namespaces: OrderedDict[tuple[LoraIdentity | None, str], NamespaceDigest] = OrderedDict()
        self._adapters: OrderedDict[tuple[int, str, str], LoraIdentity | str] = OrderedDict()

    def identify(self, request: compat.RequestFields) -> RequestIdentity | str:
        """The namespace, tenant and multimodal items of a request, or the reason why it goes without reuse.

        It reads an adapter's files when it sees the adapter for the first time, as vLLM does in the same loop.
        """
        reason = compat.bypass_reason(request)
        if reason is not None:
            return reason
        lora = None if request.lora_request is None else self._adapter(request.lora_request)
        if isinstance(lora, str):
            return lora
        salt = request.cache_salt or ""
        return RequestIdentity(self._namespace(lora, salt), tenant_of(salt), multimodal_items(request))

    def namespace_of(self, lora: LoraIdentity | None, cache_salt: str) -> Namespace:
        """The fields of a namespace."""
        return Namespace(
            model=self.model,
            chunk_size_tokens=self.chunk_size_tokens,
            layout_fingerprint=self.layout.fingerprint,
            lora=lora,
            cache_salt=cache_salt,
        )

    def _namespace(self, lora: LoraIdentity | None, cache_salt: str) -> NamespaceDigest:
        key = (lora, cache_salt)
        digest = self._namespaces.get(key)
        if digest is None:
            digest = self._namespaces[key] = self.namespace_of(lora, cache_salt).digest()
            if len(self._namespaces) > NAMESPACES_MAX:
                self._namespaces.popitem(last=False)
        else:
            self._namespaces.move_to_end(key)
        return digest

    def _adapter(self, adapter: compat.Adapter) -> LoraIdentity | str:
        key = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        known = self._adapters.get(key)
        if known is None:
            try:
                known = LoraIdentity(adapter.lora_name, weights_revision(Source(adapter.lora_path)))
            except ConfigError as error:
                known = f"the adapter {adapter.lora_name!r} cannot be told from others: {error}"
            self._adapters[key] = known
            if len(self._adapters) > ADAPTERS_MAX:
                self._adapters.popitem(last=False)
        return known


def multimodal_items(request: compat.RequestFields) -> tuple[MultimodalItem, ...]:
    """The request's images, sounds and videos, by vLLM's hash and place."""
    return tuple(
        MultimodalItem(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    )
