"""A local Ray with Serve in a process of its own, driven line by line: started by ``ray_cluster.py``.

Each line of standard input is a JSON object ``{"call": NAME, "args": {...}}``; the answer is one line
``{"result": ...}`` or ``{"error": TEXT}``. NAME is a function of this module, or ``module:function``. Everything ends
with the end of standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve

from antiphon.ray import LLMConfig, build_pd_openai_app


def run(pd_config: dict[str, Any], name: str, route_prefix: str = "/") -> None:
    """``serve.run`` of the application that the builder makes of LLMConfigs, as a Python program has them."""
    values = dict(pd_config)
    for each in ("prefill_config", "decode_config"):
        values[each] = LLMConfig(**values[each])
    serve.run(build_pd_openai_app(values), name=name, route_prefix=route_prefix)


def deploy(path: str) -> None:
    """As ``serve run FILE``, which deploys what a Serve config file says; :func:`application` says when it runs."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(Path(path).read_text()))
    client: Any = _get_global_client()
    client.deploy_apps(schema)


def delete(name: str) -> None:
    """Delete an application and wait until it is gone."""
    serve.delete(name)


def replicas(app: str) -> dict[str, list[dict[str, Any]]]:
    """By deployment: id, state, pid and metadata of each replica."""
    details = serve.status()
    found: dict[str, list[dict[str, Any]]] = {}
    for name in details.applications[app].deployments if app in details.applications else {}:
        handle: Any = serve.get_deployment_handle(name, app)
        if name != "ingress":
            method = "where" if name == "router" else "info"
            try:
                found[name] = handle.broadcast(method).results(timeout_s=5)
            except Exception as error:  # supervised: a replica may be dying while it is asked
                found[name] = [{"error": repr(error)}]
    return found


def states(app: str) -> dict[str, dict[str, Any]]:
    """By deployment: its status, and how many replicas are in each state."""
    application = serve.status().applications.get(app)
    if application is None:
        return {}
    return {
        name: {"status": str(each.status.value), "replicas": {str(k.value): v for k, v in each.replica_states.items()}}
        for name, each in application.deployments.items()
    }


def application(app: str) -> dict[str, str]:
    """Its status and what Serve says about it and its deployments; of one that there is not, ``NONE``."""
    found = serve.status().applications.get(app)
    if found is None:
        return {"status": "NONE", "message": ""}
    messages = [found.message, *(f"{name}: {each.message}" for name, each in found.deployments.items() if each.message)]
    return {"status": str(found.status.value), "message": "\n".join(messages)}


def engines(app: str) -> dict[str, Any]:
    """What the router's replica knows."""
    handle: Any = serve.get_deployment_handle("router", app)
    found: dict[str, Any] = handle.engines.remote().result(timeout_s=10)
    return found


def gcs_address() -> str:
    """Where another node joins this Ray."""
    return str(ray.get_runtime_context().gcs_address)


def _function(name: str) -> Callable[..., Any]:
    module, colon, function = name.rpartition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function) if colon else globals()[name]
    return found


def main() -> int:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is the log
    ray.init(
        num_cpus=options["num_cpus"],
        num_gpus=options["num_gpus"],
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _temp_dir=options["temp_dir"],
        _node_ip_address=options["address"],
        resources=options["resources"],
    )
    serve.start(http_options={"host": "127.0.0.1", "port": options["http_port"]})
    answers.write('{"result": "ready"}\n')
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"result": _function(asked["call"])(**asked["args"])}
        except Exception:  # supervised: the test that asked is told
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    serve.shutdown()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
