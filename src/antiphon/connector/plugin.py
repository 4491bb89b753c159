"""The entry point of the group ``vllm.general_plugins``: vLLM calls it in each of its processes, before the engine
exists.

Each part decides from the environment whether it is in force, and is harmless when it is called again.
"""

from __future__ import annotations

from antiphon.connector import nixl_progress, waiting


def install() -> None:
    """Put every part in force that the environment asks for."""
    nixl_progress.install()
    waiting.install()
