"""Engines that announce blocks, a plain model of what they hold, and a wire that loses, repeats and reorders."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_index import IndexOptions, KvIndex, StoredBlocks
from antiphon.routing.kv_stream import NO_REPLAY, Advice, KvStream, StreamOptions

SIZE = 4
PROMPTS = [[first * 100 + n for n in range(4 * SIZE + 1)] for first in range(3)]
"""Four full blocks and a token each; they share nothing."""


@dataclass
class Message:
    life: int
    sequence: int
    stamp_s: float
    events: list[object]


@dataclass
class PlainEngine:
    """What an engine holds, how often, and what it has said in this life."""

    life: int = 0
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    """(prompt, block) to the number of places."""
    said: list[Message] = field(default_factory=list)

    def name(self, prompt: int, block: int) -> int:
        """Means nothing, and is another one in each life."""
        return hash((self.life, prompt, block, "opaque"))

    def say(self, events: list[object], now_s: float) -> Message:
        message = Message(self.life, len(self.said), now_s, events)
        self.said.append(message)
        return message

    def store(self, prompt: int, first: int, last: int, now_s: float) -> Message:
        """Blocks first to last of a prompt; those before them must be held, or nothing is said of them."""
        first = next((block for block in range(first) if not self.held.get((prompt, block))), first)
        blocks = range(first, max(first, last) + 1)
        for block in blocks:
            self.held[prompt, block] = self.held.get((prompt, block), 0) + 1
        parent = self.name(prompt, first - 1) if first else None
        tokens = PROMPTS[prompt][first * SIZE : (blocks[-1] + 1) * SIZE]
        return self.say([StoredBlocks([self.name(prompt, block) for block in blocks], parent, tokens, SIZE)], now_s)

    def remove(self, prompt: int, block: int, now_s: float) -> Message | None:
        """One place of a block."""
        if not self.held.get((prompt, block)):
            return None
        self.held[prompt, block] -= 1
        return self.say([[self.name(prompt, block)]], now_s)

    def clear(self, now_s: float) -> Message:
        self.held.clear()
        return self.say(["clear"], now_s)

    def restart(self) -> None:
        self.life += 1
        self.held.clear()
        self.said.clear()

    def num_held(self, prompt: int) -> int:
        """Tokens of a prompt that are held from the beginning."""
        return SIZE * next(block for block in count() if block == 4 or not self.held.get((prompt, block)))


class Follower:
    """The stream and the index as the router drives them."""

    def __init__(self, options: StreamOptions, index_options: IndexOptions | None = None) -> None:
        self.endpoint = Endpoint("http://e:1", "prefill")
        self.index = KvIndex(index_options or IndexOptions())
        self.stream = KvStream(options)
        self.replay_from = NO_REPLAY

    def obey(self, advice: Advice) -> None:
        if advice.is_forget:
            self.index.forget_rank(self.endpoint, 0)
        for events in advice.batches:
            assert isinstance(events, list)
            for event in events:
                if isinstance(event, StoredBlocks):
                    self.index.store(self.endpoint, 0, event)
                elif isinstance(event, list):
                    self.index.remove(self.endpoint, 0, event, 0, "")
                else:
                    self.index.clear(self.endpoint, 0)
        if advice.replay_from != NO_REPLAY:
            self.replay_from = advice.replay_from
        self.stream.validate()
        self.index.validate()

    def hear(self, message: Message, now_s: float) -> None:
        self.obey(self.stream.take(message.sequence, message.stamp_s, message.events, now_s))

    def tick(self, now_s: float) -> None:
        self.obey(self.stream.tick(now_s))

    def replay(self, engine: PlainEngine, *, is_whole: bool = True) -> None:
        """The engine answers what was asked for, if anything was."""
        start, self.replay_from = self.replay_from, NO_REPLAY
        if start == NO_REPLAY:
            return
        for message in engine.said[start:] if is_whole else engine.said[start : start + 1]:
            self.obey(self.stream.take_replayed(message.sequence, message.stamp_s, message.events))
        self.obey(self.stream.end_replay(is_whole=is_whole))

    def claims(self) -> list[int]:
        return [self.index.match(prompt, [self.endpoint])[0] for prompt in PROMPTS]
