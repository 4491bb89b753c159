"""Asks the decode engines how much of their KV memory is free, for the admission of cold prompts.

Owns one connection to each decode engine, so that no request waits for an answer, and one task that asks in rounds, a
few engines at a time. What an engine does not say, in time or at all, is not known: then its admission goes by rates
alone. Decides nothing.

Invariant: what is told of an engine was read in the life that it is in.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from antiphon.core.errors import UpstreamError
from antiphon.routing.admission import ColdAdmission
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.fleet import Fleet
from antiphon.transport.http.client import HttpPool, request_head
from antiphon.transport.http.message import Fields
from antiphon.transport.loop import heed_cancel

log = logging.getLogger("antiphon.router")

_USAGE: Final = re.compile(rb"^vllm:kv_cache_usage_perc\{(.*)\} (\S+)", re.MULTILINE)
_INFO: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class FreeKvOptions:
    """How engines are asked.

    Args:
        interval_s: between two rounds, about: every one is a fifth longer or shorter by chance, so that routers of one
            fleet do not ask together.
        timeout_s: an engine has this long; its page is made beside its requests.
        connect_timeout_s: for a connection.
        asked_max: engines that are asked at once.
        page_max_bytes: a larger page is not read.
    """

    interval_s: float = 1.5
    timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
    asked_max: int = 4
    page_max_bytes: int = 4 << 20


class FreeKv:
    """The questions of one router.

    Args:
        fleet: whose decode engines are asked.
        cold: is told.
        kv_bytes_per_token: of the model, over all layers and ranks.
        fields: the header fields that engines are shown.
        options: bounds.
    """

    def __init__(
        self,
        fleet: Fleet,
        cold: ColdAdmission,
        kv_bytes_per_token: int,
        fields: Fields,
        options: FreeKvOptions | None = None,
    ) -> None:
        assert kv_bytes_per_token > 0
        self._fleet = fleet
        self._cold = cold
        self._token_bytes = kv_bytes_per_token
        self._fields = fields
        self._options = options or FreeKvOptions()
        self._lines: dict[Endpoint, HttpPool] = {}
        self._task: asyncio.Task[None] | None = None
        fleet.decode.when_gone(self._forget)

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self._ask_on())

    async def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    async def ask_all(self) -> None:
        """One round: every decode engine that can be used, some at a time."""
        endpoints = list(self._fleet.decode.ready)
        random.shuffle(endpoints)
        rest = iter(endpoints)

        async def ask_some() -> None:
            for endpoint in rest:
                await self._ask(endpoint)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._options.asked_max, len(endpoints))):
                group.create_task(ask_some())

    async def _ask_on(self) -> None:
        while True:
            try:
                await self.ask_all()
            except Exception:  # supervised: a bug here must not leave the last answers standing for ever
                log.exception("asking engines for their free KV failed")
            heed_cancel()
            await asyncio.sleep(self._options.interval_s * random.uniform(0.8, 1.2))

    async def _ask(self, endpoint: Endpoint) -> None:
        if endpoint not in self._fleet.decode.ready:
            return  # not any more
        life = endpoint.life
        tokens = await self._free_tokens(endpoint)
        if endpoint.life == life and endpoint in self._fleet.decode.ready:
            self._cold.free_kv(endpoint, None if tokens is None else tokens * self._token_bytes)

    async def _free_tokens(self, endpoint: Endpoint) -> int | None:
        line = self._line(endpoint)
        head = request_head("GET", "/metrics", line.authority, [(b"accept", b"*/*"), *self._fields], length=None)
        options = self._options
        try:
            response = await line.fetch([head], timeout_s=options.timeout_s, body_max_bytes=options.page_max_bytes)
        except UpstreamError as error:
            log.debug("decode engine %s does not say how much KV is free: %s", endpoint.address, error.message)
            return None
        return free_tokens(response.body) if response.status == 200 else None

    def _line(self, endpoint: Endpoint) -> HttpPool:
        line = self._lines.get(endpoint)
        if line is None:
            parts = urlsplit(endpoint.url)
            assert parts.hostname is not None and parts.port is not None
            connect_s = self._options.connect_timeout_s
            line = HttpPool(parts.hostname, parts.port, connections_max=1, connect_timeout_s=connect_s)
            self._lines[endpoint] = line
        return line

    def _forget(self, endpoint: Endpoint) -> None:
        line = self._lines.pop(endpoint, None)
        if line is not None:
            line.close()


def free_tokens(page: bytes) -> int | None:
    """Tokens that fit into the free KV blocks of an engine, all its data-parallel ranks together; those that only keep
    what was computed for later requests are free. None: the page does not say.

    Args:
        page: the engine's ``/metrics``.
    """
    used = [(_labels(labels).get(b"engine", b""), _share(value)) for labels, value in _USAGE.findall(page)]
    infos = [_labels(labels) for labels in _INFO.findall(page)]
    if not used or not infos:
        return None
    rooms = {info.get(b"engine", b""): _room(info, len(used)) for info in infos}
    free = 0.0
    for rank, share in used:
        room = rooms.get(rank)
        if room is None or share is None:
            return None
        free += room * (1.0 - share)
    return int(free)


def _room(info: dict[bytes, bytes], num_ranks: int) -> int | None:
    """Tokens of KV that one rank has room for. vLLM gives a rank's in tokens, but all ranks' blocks together."""
    tokens = _count(info.get(b"kv_cache_size_tokens"))
    if tokens is not None:
        return tokens
    blocks, size = _count(info.get(b"num_gpu_blocks")), _count(info.get(b"block_size"))
    return blocks * size // num_ranks if blocks is not None and size is not None else None


def _labels(text: bytes) -> dict[bytes, bytes]:
    return dict(_LABEL.findall(text))


def _count(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 16 else None


def _share(text: bytes) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0.0 <= share <= 1.0 else None
