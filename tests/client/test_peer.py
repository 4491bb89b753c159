"""Whose socket a client writes KV through: its own user's or root's, whoever it is itself."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, cast

import pytest

from antiphon.client.handshake import Refused, _check_peer

OWN, OTHER = 1000, 1001


class Listener:
    """The end of a socket whose other side is a user's."""

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 1, self.uid, 1)[:size]


@pytest.mark.parametrize(
    ("own", "peer", "is_trusted"),
    [(OWN, OWN, True), (OWN, 0, True), (OWN, OTHER, False), (0, 0, True), (0, OTHER, False)],
)
def test_the_listener_is_of_the_same_user_or_root(
    monkeypatch: pytest.MonkeyPatch, own: int, peer: int, is_trusted: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: own)
    sock = cast("Any", Listener(peer))
    if is_trusted:
        _check_peer(sock)
    else:
        with pytest.raises(Refused, match=f"belongs to user {peer}"):
            _check_peer(sock)
