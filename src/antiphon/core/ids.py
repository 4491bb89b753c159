"""Names that tell one life of a process from the next.

An **incarnation** is random and new at each start. Any handle that crosses a process carries the process's name and its
incarnation, so that a handle of an earlier life is refused rather than guessed at.
"""

from __future__ import annotations

import secrets

INCARNATION_PLACEHOLDER = "@INCARNATION@"


def new_incarnation() -> str:
    """A new incarnation: 12 lower-case hex digits (48 random bits)."""
    return secrets.token_hex(6)
