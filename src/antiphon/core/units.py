"""Sizes in bytes and the arithmetic of alignment. Values only; text such as ``2GiB`` is read by ``config``."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def align_up(size_bytes: int, alignment_bytes: int) -> int:
    """The smallest multiple of ``alignment_bytes`` that is at least ``size_bytes``."""
    assert size_bytes >= 0, size_bytes
    assert alignment_bytes > 0, alignment_bytes
    return -(-size_bytes // alignment_bytes) * alignment_bytes
