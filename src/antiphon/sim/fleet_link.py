"""The link model of a simulated fleet: one network card an engine, shared by the transfers that use it.

A transfer gets the smaller of the two equal shares, of the sender's card and of the receiver's; what one of them cannot
use is not given to others, so that the model errs on the side of slow transfers. A transfer begins with a fixed latency
in which it takes no share.

Always true: the rates of the transfers of a card add up to at most its bandwidth, and the bytes that have come are
those that were sent. It does not model switches, congestion between cards, or loss.
"""

from __future__ import annotations

from collections.abc import Callable

from antiphon.sim.timeline import Timeline

_DONE_BYTES = 0.5
"""Less is nothing: what rounding has left."""


class Card:
    """The network card of one engine, in one direction."""

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.transfers: dict[int, Transfer] = {}
        self.num_bytes = 0.0


class Transfer:
    """KV on its way."""

    def __init__(self, number: int, cards: tuple[Card, Card], num_bytes: float, on_done: Callable[[], None]) -> None:
        self.number = number
        self.cards = cards
        self.num_left = num_bytes
        self.on_done = on_done
        self.rate = 0.0
        self.since_s = 0.0
        self.num_changes = 0


class Links:
    """All cards and transfers.

    Args:
        latency_s: of each transfer, before its first byte.
    """

    def __init__(self, timeline: Timeline, latency_s: float) -> None:
        self._timeline = timeline
        self._latency_s = latency_s
        self._num_transfers = 0

    def send(self, source: Card, target: Card, num_bytes: float, on_done: Callable[[], None]) -> None:
        """Move bytes; ``on_done`` is called when the last one is there."""
        self._num_transfers += 1
        transfer = Transfer(self._num_transfers, (source, target), num_bytes, on_done)
        self._timeline.after(self._latency_s, lambda: self._begin(transfer))

    def _begin(self, transfer: Transfer) -> None:
        transfer.since_s = self._timeline.now_s
        for card in transfer.cards:
            card.num_bytes += transfer.num_left
            card.transfers[transfer.number] = transfer
        self._share(transfer.cards)

    def _share(self, cards: tuple[Card, Card]) -> None:
        """The transfers of these cards go on with their new shares."""
        for transfer in {**cards[0].transfers, **cards[1].transfers}.values():
            rate = min(card.bytes_per_s / len(card.transfers) for card in transfer.cards)
            if rate != transfer.rate:
                self._set_rate(transfer, rate)

    def _set_rate(self, transfer: Transfer, rate: float) -> None:
        now_s = self._timeline.now_s
        transfer.num_left -= (now_s - transfer.since_s) * transfer.rate
        transfer.since_s, transfer.rate = now_s, rate
        transfer.num_changes += 1
        change = transfer.num_changes
        self._timeline.after(max(0.0, transfer.num_left) / rate, lambda: self._end(transfer, change))

    def _end(self, transfer: Transfer, change: int) -> None:
        if change != transfer.num_changes:
            return  # its rate has changed since
        left = transfer.num_left - (self._timeline.now_s - transfer.since_s) * transfer.rate
        assert abs(left) < max(_DONE_BYTES, 1e-9 * transfer.rate), "a transfer ends with bytes left"
        transfer.num_changes += 1
        for card in transfer.cards:
            del card.transfers[transfer.number]
        self._share(transfer.cards)
        transfer.on_done()


def validate(card: Card) -> None:
    """Assert the invariants of a card."""
    assert sum(transfer.rate for transfer in card.transfers.values()) <= card.bytes_per_s * (1 + 1e-9)
    for transfer in card.transfers.values():
        assert card in transfer.cards and transfer.num_left > -_DONE_BYTES
