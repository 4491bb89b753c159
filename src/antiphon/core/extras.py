"""How the optional parts of Antiphon are installed: the one place that says it.

It knows names and words only, and looks at no machine. The names are those of ``[project.optional-dependencies]``.
"""

from __future__ import annotations

from typing import Final

INSTALL_REMEDY: Final = "in the clone: make install, or pip install ."
"""What to do where a package is missing that everything needs."""
LOCKED_PARTS: Final = {"ray": "ray", "redis": "tiers", "s3": "tiers", "mooncake": "tiers"}
"""The part of ``make install`` (``requirements/PART.lock``) that has what an extra needs."""


def install_remedy(extra: str) -> str:
    """What to do where a package of ``extra`` is missing: both ways that work in a clone."""
    return f"in the clone: make install WITH=\"{LOCKED_PARTS[extra]}\", or pip install '.[{extra}]'"
