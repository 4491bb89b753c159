"""What is used of Ray that is not its public interface, and what happens where it is not there.

Everything else of this room uses Ray's documented names. Written for Ray 2.60; another version that has moved a name
loses what that name is for, with a line in the log, and nothing else.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import ray
from ray import serve

log = logging.getLogger("ray.serve")
ANY_ADDRESSES = ("[::]", "0.0.0.0", "[::0]")
GRPC_SWITCHES = ("RAY_SERVE_USE_GRPC_BY_DEFAULT", "RAY_SERVE_PROXY_USE_GRPC", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
"""With any of them, Serve calls replicas over gRPC, at the address of their node."""
BUILD_TASK = "build_serve_application"
"""The task in which Serve builds an application of a file."""


def node_address() -> str:
    """The address by which Ray reaches this node."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def node_id() -> str:
    """Ray's name for this node."""
    return str(ray.get_runtime_context().get_node_id())


def gpus() -> tuple[str, ...]:
    """The GPUs that Ray has given this actor, as CUDA_VISIBLE_DEVICES names them; empty: it has asked for none."""
    return tuple(str(each) for each in ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def log_dir() -> Path:
    """Where the logs of this session of Ray are on this node, beside those of Serve."""
    try:
        from ray.serve._private.logging_utils import get_serve_logs_dir

        return Path(get_serve_logs_dir()).parent / "antiphon"
    except (ImportError, AttributeError, TypeError):
        return Path.home() / ".local" / "state" / "antiphon" / "ray"


def keep_replica_near(*, is_published: bool) -> None:
    """Let the gRPC server that Serve opens in every replica, at any address of its node, listen on one.

    That is the node's own address where Serve uses the server, or where the application is published; else loopback.
    Call it while the replica is being constructed: Serve opens the server afterwards.
    """
    uses_grpc = any(os.environ.get(name, "0") not in ("", "0") for name in GRPC_SWITCHES)
    address = node_address() if is_published or uses_grpc else "127.0.0.1"
    try:
        replica: Any = importlib.import_module("ray.serve._private.replica")
        original = replica.add_port_to_grpc_server
    except (ImportError, AttributeError):
        log.warning("antiphon: this version of Ray opens its gRPC servers elsewhere: they may listen at any address")
        return
    if hasattr(original, "antiphon_address"):
        return
    shown = f"[{address}]" if ":" in address else address

    def add_near(server: Any, where: str) -> Any:
        host, colon, port = where.rpartition(":")
        return original(server, f"{shown}{colon}{port}" if host in ANY_ADDRESSES else where)

    add_near.antiphon_address = address  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = add_near


def is_built_from_file() -> bool:
    """Whether Serve builds an application of a file (``serve deploy``) here, and not a program one of its own."""
    return ray.is_initialized() and ray.get_runtime_context().get_task_name() == BUILD_TASK


def with_version(deployment: Any, version: str) -> Any:
    """``deployment``, of which Serve keeps the replicas that run while its ``version`` and its actors' options stay.

    Serve itself takes every change of the arguments in a file for another version of all deployments, and replaces all
    replicas. Here the version is set when Serve sets its own; a Ray that does so in another way replaces them all.
    """
    try:
        config = deployment._deployment_config
        kind: Any = type(config)
        if "version" not in kind.model_fields:
            raise AttributeError("version")

        def set_field(self: Any, name: str, value: Any) -> None:
            kind.__setattr__(self, name, version if name == "version" else value)

        kept = type(kind.__name__, (kind,), {"__setattr__": set_field, "__module__": __name__})
        object.__setattr__(config, "__class__", kept)
    except (AttributeError, TypeError):
        log.warning("antiphon: this version of Ray keeps versions elsewhere: a deploy replaces every engine")
    return deployment


def replica_identity() -> tuple[str, str]:
    """The name of the application, and of this replica, unique in it."""
    context = serve.get_replica_context()
    return context.app_name, context.replica_tag


def end_process(code: int = 1) -> None:
    """End the process of this actor at once, for one that cannot go on."""
    for handler in (*log.handlers, *logging.getLogger().handlers):
        handler.flush()
    os._exit(code)
