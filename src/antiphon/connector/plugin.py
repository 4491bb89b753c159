"""The entry point of the group ``vllm.general_plugins``: vLLM calls it in each of its processes, before the engine
exists.

Each part decides from the environment whether it is in force, and is harmless when it is called again.
"""

from __future__ import annotations

from antiphon.connector import compat, nixl_progress, waiting


def install() -> None:
    """Make the connector known by its name and its log visible; put in force what the environment asks for."""
    compat.register_connector_once("AntiphonConnector", "antiphon.connector.vllm_connector", "AntiphonConnector")
    compat.join_logs()
    nixl_progress.install()
    waiting.install()
