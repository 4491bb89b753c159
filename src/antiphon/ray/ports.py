"""Ports for the processes of replicas: found by binding them, and claimed, so that no other replica takes them.

A claim is an abstract unix socket that carries the port's number: it belongs to this machine's network, as the port
does, and ends with the process that holds it. Programs that know nothing of claims are found by the bind.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

from antiphon.config.hosts import is_port_taken
from antiphon.core.errors import StartError

TRIES_MAX = 2048
"""Ports looked at, from the first on: more engines than a machine has."""
LAST_PORT = 65535


class PortClaims:
    """The ports that one replica has claimed. Close it, or let the process end, to give them up."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    @property
    def ports(self) -> list[int]:
        """What is claimed, in the order of the claims."""
        return list(self._held)

    def take(self, address: str, first: int, count: int = 1) -> int:
        """The first of ``count`` free ports in a row at ``address``, from ``first`` on; they are claimed.

        Raises:
            StartError: there is none.
        """
        assert count >= 1
        for port in range(first, min(first + TRIES_MAX, LAST_PORT + 2 - count)):
            row = range(port, port + count)
            if self._claim(row):
                if not any(is_port_taken(address, each) for each in row):
                    return port
                self._drop(row)
        raise StartError(
            f"no {count} free ports in a row at {address} from {first} on", remedy="name another first port"
        )

    def close(self) -> None:
        """Give up every port."""
        self._drop(list(self._held))

    def _claim(self, ports: range) -> bool:
        """Claim all of ``ports``, or none."""
        made: list[int] = []
        for port in ports:
            if port in self._held:
                break
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0antiphon-port-{port}")
            except OSError:
                claim.close()
                break
            self._held[port] = claim
            made.append(port)
        if len(made) < len(ports):
            self._drop(made)
            return False
        return True

    def _drop(self, ports: range | list[int]) -> None:
        for port in ports:
            claim = self._held.pop(port, None)
            if claim is not None:
                claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
