"""What the coordinator is told of this server's chunks: first all of them, in pages, then their changes in order.

Owns where it is in that. One message is under way at a time; its answer comes before the next one. It does no input or
output, so that a simulation can drive it.
"""

from __future__ import annotations

from antiphon.cache.lending import Shelf
from antiphon.protocol.peers import EVENTS_PER_CALL_MAX, KEYS_PER_CALL_MAX, Events, Listing


class Feed:
    """The state of one session with the coordinator; new for each.

    Args:
        shelf: what this server can lend.
        page_keys: keys of a page.
        page_changes: changes of a message.
    """

    def __init__(
        self, shelf: Shelf, page_keys: int = KEYS_PER_CALL_MAX, page_changes: int = EVENTS_PER_CALL_MAX
    ) -> None:
        self._shelf = shelf
        self._page_keys = page_keys
        self._page_changes = page_changes
        self._sequence = 0
        self._listing: list[bytes] = []
        self._listed = 0
        self.num_listings = 0
        self.restart()

    def restart(self) -> None:
        """All must be told again: at the start, and where the coordinator or this side has lost something."""
        self._shelf.follow()
        self._listing = list(self._shelf.chunks)
        self._listed = 0
        self._sequence = self._shelf.next_sequence
        self._is_listing = True
        self.num_listings += 1

    def next(self) -> Listing | Events | None:
        """What is to be told now; None where the coordinator knows all. It counts as told once it is returned."""
        if self._is_listing:
            return self._page()
        self._shelf.follow()
        if self._sequence == self._shelf.next_sequence:
            return None
        changes = self._shelf.changes_since(self._sequence, self._page_changes)
        if changes is None:
            self.restart()
            return self._page()
        first = self._sequence
        self._sequence += len(changes)
        return Events(first, len(changes), tuple(changes))

    def _page(self) -> Listing:
        first = self._listed
        keys = self._listing[first : first + self._page_keys]
        self._listed += len(keys)
        is_last = self._listed >= len(self._listing)
        sequence = self._sequence
        if is_last:
            self._is_listing = False
            self._listing = []
        return Listing(first == 0, is_last, sequence, b"".join(keys))
