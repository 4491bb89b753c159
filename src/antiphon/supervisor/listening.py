"""The TCP sockets that listen, and whose they are, as ``/proc`` tells. Other users' processes are not seen."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def socket_inodes(pid: int) -> Iterator[str]:
    """The sockets that a process holds, by inode; none of a process that is gone or somebody else's."""
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    yield target[8:-1]


def listening_sockets() -> Iterator[tuple[str, tuple[str, int]]]:
    """Inode, address and port of every TCP socket of this host that listens."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    address, _, port = fields[1].partition(":")
                    yield fields[9], (_address(address), int(port, 16))


def _address(words: str) -> str:
    """As the kernel prints it: 32-bit words, each in the byte order of this machine."""
    raw = bytes.fromhex(words)
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    found = ipaddress.ip_address(raw)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
