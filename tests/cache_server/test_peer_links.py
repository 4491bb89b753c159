"""What is known of a peer's NIXL agent: asked once in a life, and again only while the agent may be starting."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.cache_server import peer_links
from antiphon.cache_server.peer_links import PeerLinks
from antiphon.cache_server.peer_serving import PeerSelf
from antiphon.core.errors import PeerTimeout
from antiphon.protocol import peers as wire
from antiphon.transport.nixl_agent import START_TIMEOUT_S

HOLDER = wire.Holder("one", "i", "host:1")


class Link:
    """A connection to a peer whose agent has ``metadata``."""

    def __init__(self) -> None:
        self.metadata: bytes | None = None
        self.error: PeerTimeout | None = None
        self.num_asked = 0

    def call(self, body: Any, timeout_s: float) -> wire.Message:
        assert isinstance(body, wire.AskNixl)
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return wire.NixlInfo(self.metadata, 4096, 64)


class World:
    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.links = PeerLinks(PeerSelf("me", "i", b""), lambda: self.now_s)
        self.agent: Any = object()
        self.links.agent = self.agent
        self.link: Any = Link()

    def lend(self, holder: wire.Holder = HOLDER) -> int:
        """After a call for loans: how often the peer has been asked then."""
        self.links.learn_memory(holder, self.link, 1.0)
        return int(self.link.num_asked)


@pytest.fixture
def world() -> World:
    return World()


def test_a_peer_with_an_agent_is_asked_once_in_a_life(world: World) -> None:
    world.link.metadata = b"m"
    assert [world.lend() for _ in range(3)] == [1, 1, 1]
    memory = world.links.memory_of(HOLDER)
    assert memory is not None
    assert (memory.name, memory.metadata, memory.address) == ("one/i", b"m", 4096)
    assert world.lend(wire.Holder("one", "next", "host:1")) == 2


def test_a_peer_without_an_agent_is_not_asked_with_each_call(world: World) -> None:
    assert [world.lend() for _ in range(100)] == [1] * 100
    for _ in range(1_000):
        world.now_s += 0.5
        world.lend()
    assert world.link.num_asked <= 10
    num_asked = world.link.num_asked
    world.now_s += 1e6
    assert world.lend() == num_asked, "an agent that did not start by now never does"


def test_an_agent_that_starts_late_is_found(world: World) -> None:
    began_s = world.now_s
    while world.now_s - began_s < START_TIMEOUT_S:
        world.lend()
        world.now_s += 0.5
    world.link.metadata = b"m"
    world.now_s += START_TIMEOUT_S
    world.lend()
    assert world.links.memory_of(HOLDER) is not None


def test_a_peer_that_did_not_say_is_asked_again_a_moment_later(world: World) -> None:
    world.link.error = PeerTimeout("late")
    with pytest.raises(PeerTimeout):
        world.lend()
    world.link.error, world.link.metadata = None, b"m"
    world.now_s += peer_links.NIXL_AGAIN_S
    assert world.lend() == 2
    assert world.links.memory_of(HOLDER) is not None


def test_who_has_no_agent_itself_asks_nobody(world: World) -> None:
    world.links.agent = None
    assert world.lend() == 0


def test_what_is_known_of_peers_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "PEERS_MAX", 3)
    for number in range(9):
        world.lend(wire.Holder(f"peer {number}", "i", "host:1"))
    assert len(world.links._peers) == 3
