"""Imports ``vllm_connector`` without vLLM: its base classes are replaced by plain ones with the same calls."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CONNECTOR = "antiphon.connector.vllm_connector"


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    pass


class SupportsHMA:
    pass


class KVConnectorBase_V1:  # noqa: N801 - vLLM's name
    """As vLLM's, as far as its metadata goes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata: KVConnectorMetadata | None = None

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None
        return self._connector_metadata


def _modules() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    names = BASE.split(".")
    for end in range(1, len(names) + 1):
        found[".".join(names[:end])] = ModuleType(".".join(names[:end]))
    for part in (KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, KVConnectorWorkerMetadata, SupportsHMA):
        setattr(found[BASE], part.__name__, part)
    return found


@contextmanager
def connector_module() -> Iterator[ModuleType]:
    """The module of the connector on stubs; what was imported before is put back at the end."""
    stubs = _modules()
    former = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "vllm"}
    former_connector = sys.modules.pop(CONNECTOR, None)
    package = importlib.import_module("antiphon.connector")
    former_attribute = getattr(package, "vllm_connector", None)
    sys.modules.update(stubs)
    log = logging.getLogger("antiphon.connector")
    was_disabled, log.disabled = log.disabled, True  # the stubs have no factory, of which it warns
    try:
        module = importlib.import_module(CONNECTOR)
        log.disabled = was_disabled
        yield module
    finally:
        log.disabled = was_disabled
        for name in (*stubs, CONNECTOR):
            sys.modules.pop(name, None)
        sys.modules.update(former)
        if former_connector is not None:
            sys.modules[CONNECTOR] = former_connector
        if former_attribute is None:
            vars(package).pop("vllm_connector", None)
        else:
            vars(package)["vllm_connector"] = former_attribute
