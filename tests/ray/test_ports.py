"""Ports for replicas: free ones, in rows, and never given twice on a machine."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from antiphon.core.errors import StartError
from antiphon.ray.ports import LAST_PORT, PortClaims
from tests.router.stack import quiet_ports

HOST = "127.0.0.1"


def test_two_replicas_are_given_different_ports() -> None:
    first = quiet_ports(6)
    with PortClaims() as one, PortClaims() as other:
        assert [one.take(HOST, first), other.take(HOST, first), one.take(HOST, first)] == [first, first + 1, first + 2]
        assert one.ports == [first, first + 2]
    with PortClaims() as third:
        assert third.take(HOST, first) == first


def test_a_row_is_free_as_a_whole() -> None:
    first = quiet_ports(6)
    with socket.socket() as taken, PortClaims() as claims, PortClaims() as other:
        taken.bind((HOST, first + 1))
        taken.listen()
        assert claims.take(HOST, first, 3) == first + 2
        assert other.take(HOST, first) == first, "what did not make a row is not kept"


def test_past_the_last_port_there_is_none(free_ports: Callable[[int], list[int]]) -> None:
    with PortClaims() as claims, pytest.raises(StartError, match="no 2 free ports in a row"):
        claims.take(HOST, LAST_PORT, 2)
