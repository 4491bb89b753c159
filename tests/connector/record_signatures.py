"""Records what a version of vLLM calls in a connector, and what a connector may read of vLLM's objects.

    python -m tests.connector.record_signatures VLLM tests/connector/signatures/0.32.json

``VLLM`` is a wheel, or a folder that holds the package ``vllm``. Sources are parsed, never imported, so that a version
that cannot run here can be recorded. Recorded are:

- ``hooks``: public methods of ``KVConnectorBase_V1`` and ``SupportsHMA``: parameters, kind, whether abstract;
- ``base_attributes``: attributes that the base class sets on itself, which a connector must not take for its own;
- ``calls``: how vLLM calls each hook, from ``MultiConnector`` and elsewhere: number of arguments, keywords;
- ``factory``: the methods of ``KVConnectorFactory``, and how it makes a connector;
- ``fields``: attributes of the objects that a connector reads.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
BASE_FILE = f"{CONNECTORS}/v1/base.py"
MULTI_FILE = f"{CONNECTORS}/v1/multi_connector.py"
FACTORY_FILE = f"{CONNECTORS}/factory.py"
BASE_CLASSES = ("KVConnectorBase_V1", "SupportsHMA")
FIELDS = {
    "vllm/v1/core/sched/output.py": ("SchedulerOutput", "NewRequestData", "CachedRequestData"),
    "vllm/v1/outputs.py": ("KVConnectorOutput",),
    "vllm/v1/request.py": ("Request", "RequestStatus"),
    "vllm/v1/kv_cache_interface.py": (
        *("KVCacheConfig", "KVCacheGroupSpec", "KVCacheSpec", "AttentionSpec", "FullAttentionSpec"),
        "MLAAttentionSpec",
    ),
    "vllm/config/kv_transfer.py": ("KVTransferConfig",),
    "vllm/lora/request.py": ("LoRARequest",),
    "vllm/multimodal/inputs.py": ("MultiModalFeatureSpec", "PlaceholderRange"),
    "vllm/sampling_params.py": ("SamplingParams",),
}
CALLERS = re.compile(r"^(self\.)?_?(kv_)?connector(_cls)?$|^c$|^_connectors$|^get_kv_transfer_group$|^cast$")
"""Names through which vLLM calls a connector; its other kinds of connectors have other names."""

Json = dict[str, Any]


class Sources:
    """The Python files of a wheel or a folder."""

    def __init__(self, place: Path) -> None:
        self._zip = zipfile.ZipFile(place) if place.is_file() else None
        self._root = place

    def names(self) -> list[str]:
        if self._zip is not None:
            return sorted(name for name in self._zip.namelist() if name.startswith("vllm/") and name.endswith(".py"))
        return sorted(path.relative_to(self._root).as_posix() for path in (self._root / "vllm").rglob("*.py"))

    def text(self, name: str) -> str:
        return self._zip.read(name).decode() if self._zip is not None else (self._root / name).read_text()

    def version(self) -> str:
        if self._zip is not None:
            (found,) = {name.split("/")[0] for name in self._zip.namelist() if ".dist-info/" in name}
        else:
            (found,) = {path.name for path in self._root.glob("vllm*.dist-info") if "router" not in path.name}
        return found.removesuffix(".dist-info").partition("-")[2]


def classes(text: str) -> dict[str, ast.ClassDef]:
    """The classes of a file, by name."""
    return {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}


def signature_of(function: ast.FunctionDef) -> Json:
    """A method as data: kind, whether it is abstract, and its parameters without ``self`` and ``cls``."""
    decorators = {ast.unparse(item) for item in function.decorator_list}
    kind = next((name for name in ("classmethod", "staticmethod", "property") if name in decorators), "method")
    spec = function.args
    named = [*spec.posonlyargs, *spec.args]
    first_default = len(named) - len(spec.defaults)
    parameters = [
        {"name": item.arg, "kind": "named", "is_optional": index >= first_default} for index, item in enumerate(named)
    ]
    parameters = parameters if kind == "staticmethod" else parameters[1:]
    if spec.vararg is not None:
        parameters.append({"name": spec.vararg.arg, "kind": "args", "is_optional": True})
    for item, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        parameters.append({"name": item.arg, "kind": "keyword", "is_optional": default is not None})
    if spec.kwarg is not None:
        parameters.append({"name": spec.kwarg.arg, "kind": "kwargs", "is_optional": True})
    return {"kind": kind, "is_abstract": "abstractmethod" in decorators, "parameters": parameters}


def methods_of(node: ast.ClassDef) -> dict[str, Json]:
    """Every method of a class, by name."""
    return {item.name: signature_of(item) for item in node.body if isinstance(item, ast.FunctionDef)}


def own_attributes(node: ast.ClassDef) -> list[str]:
    """What the methods of a class assign to ``self``."""
    return sorted(
        {
            item.attr
            for item in ast.walk(node)
            if isinstance(item, ast.Attribute)
            and isinstance(item.ctx, ast.Store)
            and isinstance(item.value, ast.Name)
            and item.value.id == "self"
        }
    )


def fields_of(node: ast.ClassDef) -> list[str]:
    """Fields, properties and attributes of a class."""
    annotated = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    assigned = {
        target.id
        for item in node.body
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Name)
    }
    properties = {
        item.name
        for item in node.body
        if isinstance(item, ast.FunctionDef)
        and any(ast.unparse(decorator).endswith("property") for decorator in item.decorator_list)
    }
    return sorted(annotated | assigned | properties | set(own_attributes(node)))


def _receiver(node: ast.expr) -> str:
    """The last name of what a method is called on: ``connector`` of ``self.connector``, ``cast`` of ``cast(T, c)``."""
    if isinstance(node, ast.Call):
        return _receiver(node.func)
    if isinstance(node, ast.Subscript):
        return _receiver(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def calls_of(text: str, hooks: set[str]) -> Iterator[tuple[str, Json]]:
    """(hook, how it is called) for every call of a hook in a file."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in hooks):
            continue
        if not CALLERS.match(_receiver(node.func.value)):
            continue
        yield (
            node.func.attr,
            {
                "line": node.lineno,
                "num_positional": sum(not isinstance(item, ast.Starred) for item in node.args),
                "has_args": any(isinstance(item, ast.Starred) for item in node.args),
                "keywords": [item.arg for item in node.keywords if item.arg is not None],
                "has_kwargs": any(item.arg is None for item in node.keywords),
            },
        )


def record(sources: Sources) -> Json:
    """The record of one version."""
    base = classes(sources.text(BASE_FILE))
    found = {name: signature for owner in BASE_CLASSES for name, signature in methods_of(base[owner]).items()}
    hooks = {name: signature for name, signature in found.items() if not name.startswith("_")}
    calls: dict[str, list[Json]] = {name: [] for name in hooks}
    for file in sources.names():
        is_other_connector = file.startswith(f"{CONNECTORS}/v1/") and file not in (MULTI_FILE, BASE_FILE)
        text = sources.text(file)
        if is_other_connector or "connector" not in text:
            continue
        for name, call in calls_of(text, set(hooks)):
            calls[name].append({"file": file, **call})
    factory = classes(sources.text(FACTORY_FILE))["KVConnectorFactory"]
    made = [
        node for node in ast.walk(factory) if isinstance(node, ast.Call) and _receiver(node.func) == "connector_cls"
    ]
    fields = {name: fields_of(classes(sources.text(file))[name]) for file, names in FIELDS.items() for name in names}
    return {
        "version": sources.version(),
        "constructor": found["__init__"],
        "constructor_calls": [len(node.args) for node in made],
        "hooks": hooks,
        "base_attributes": sorted({name for owner in BASE_CLASSES for name in own_attributes(base[owner])}),
        "base_private": sorted(name for name in found if name.startswith("_") and not name.startswith("__")),
        "calls": calls,
        "factory": methods_of(factory),
        "fields": fields,
    }


def main() -> None:
    place, target = map(Path, sys.argv[1:3])
    target.write_text(json.dumps(record(Sources(place)), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
