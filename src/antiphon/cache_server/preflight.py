"""Checked before anything is started: is there memory for the arena?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from antiphon.config.cache_server_spec import GB, CacheServerSpec
from antiphon.core.errors import ConfigError
from antiphon.core.memory import KEPT_FREE_BYTES, available_memory_bytes


def check_memory(spec: CacheServerSpec, instance: str, available_bytes: int | None = None) -> None:
    """Refuses an arena that does not fit.

    Memory of an earlier life of this server counts as free: engines still map it, and let it go when they see this one.

    Args:
        available_bytes: what is free; None asks the machine.

    Raises:
        ConfigError: it is larger than what is free.
    """
    if available_bytes is None:
        available_bytes = available_memory_bytes()
    usable_bytes = available_bytes + earlier_arenas_bytes(instance) - KEPT_FREE_BYTES
    if spec.l1_size_bytes > usable_bytes:
        most = max(0, int(usable_bytes / GB * 10) / 10)
        fix = f"give at most --l1-size-gb {most}, or free memory" if most else "free memory"
        raise ConfigError(
            f"{spec.l1_size_gb:g} GB are asked for; {available_bytes / GB:.1f} GB of memory are free, of which "
            f"{KEPT_FREE_BYTES / GB:.1f} GB are left to others",
            field="l1_size_gb",
            remedy=fix,
        )


def earlier_arenas_bytes(instance: str, proc: Path = Path("/proc")) -> int:
    """Bytes of this instance's arenas that are mapped by any process that can be looked at, each counted once."""
    sizes: dict[str, int] = {}
    for name, size_bytes in _mapped_arenas(instance, proc):
        sizes[name] = max(size_bytes, sizes.get(name, 0))
    return sum(sizes.values())


def _mapped_arenas(instance: str, proc: Path) -> Iterator[tuple[str, int]]:
    line = re.compile(rf"([0-9a-f]+)-([0-9a-f]+) .* (/memfd:antiphon:{re.escape(instance)}:[0-9a-f]+)(?: \(deleted\))?")
    for path in proc.glob("[0-9]*/maps"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue  # gone, or another user's
        if "/memfd:antiphon:" in text:
            for found in line.finditer(text):
                yield found[3], int(found[2], 16) - int(found[1], 16)
