"""From a spec to the Serve config file that means it: the reverse of ``mapping.py``.

Invariant: what :func:`serve_file` writes, read and mapped, is the spec again, but for what Ray decides (hosts, devices,
restarts, folders), which is left out with a notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from antiphon.config.cache_spec import CacheSpec
from antiphon.config.masking import MASK, is_secret
from antiphon.config.problems import Notice
from antiphon.config.spec import POOLS, PoolSpec, Spec
from antiphon.ray import engine_kwargs as kwargs
from antiphon.ray.mapping import LEFT_TO_RAY
from antiphon.ray.serve_file import IMPORT_PATH

_IN_CONFIG = frozenset({*kwargs.POOL_FIELDS.values(), "args", "env", "replicas", "hosts", "bind", "devices"})
"""Fields of a pool that have a place in its config, or none."""
_ELSEWHERE = frozenset(("name", "model", "engine", *POOLS))
"""Sections of a spec that have a place in Ray's schema."""


@dataclass(frozen=True)
class Rendered:
    """The text of a file, and what of the spec it does not say."""

    text: str
    notices: tuple[Notice, ...]


def serve_file(spec: Spec, *, show_secrets: bool = False) -> Rendered:
    """The Serve config file of ``spec``, as ``serve deploy`` takes it.

    Args:
        show_secrets: write the values of arguments and variables that look like secrets instead of ``***``.
    """
    args: dict[str, Any] = {f"{pool}_config": _config(spec, spec.pool(pool)) for pool in POOLS}
    own = _antiphon(spec)
    if own:
        args["antiphon"] = own
    args, hidden = _masked(args, show_secrets)
    application = {"name": spec.name, "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
    return Rendered(_yaml({"applications": [application]}), (*_left_out(spec), *hidden))


def spec_file(spec: Spec, *, show_secrets: bool = False) -> Rendered:
    """``spec`` as a file that it could have come from: what differs from the defaults."""
    values: dict[str, Any] = {"name": spec.name} if spec.name != Spec.model_fields["name"].default else {}
    for name in Spec.model_fields:
        if name not in ("name", "engine"):
            section = _changed(getattr(spec, name))
            if section:
                values[name] = section
    values, hidden = _masked(values, show_secrets)
    return Rendered(_yaml(values), hidden)


def _config(spec: Spec, pool: PoolSpec) -> dict[str, Any]:
    loading = {"model_id": spec.model.served}
    if spec.model.path != spec.model.served:
        loading["model_source"] = spec.model.path
    model, own = _changed(spec.model), _changed(pool)
    args = dict(pool.args)
    if isinstance(args.get("tokenizer"), str):
        loading["tokenizer_source"] = str(args.pop("tokenizer"))
    engine = {arg: model[name] for arg, name in kwargs.MODEL_FIELDS.items() if name in model}
    engine |= {arg: own[name] for arg, name in kwargs.POOL_FIELDS.items() if name in own}
    engine |= dict(kwargs.as_kwarg(flag, value) for flag, value in args.items())
    config: dict[str, Any] = {"model_loading_config": loading}
    if engine:
        config["engine_kwargs"] = engine
    scaling = {"min_replicas": pool.replicas, "max_replicas": pool.replicas}
    config["deployment_config"] = {"autoscaling_config": scaling}
    if pool.env:
        config["runtime_env"] = {"env_vars": dict(pool.env)}
    return config


def _antiphon(spec: Spec) -> dict[str, Any]:
    """What Ray's schema has no word for."""
    own: dict[str, Any] = {}
    for pool in POOLS:
        section = {name: value for name, value in _changed(spec.pool(pool)).items() if name not in _IN_CONFIG}
        if section:
            own[pool] = section
    for name in [name for name in Spec.model_fields if name not in _ELSEWHERE]:
        section = {
            field: value
            for field, value in _changed(getattr(spec, name)).items()
            if f"{name}.{field}" not in LEFT_TO_RAY
        }
        if section:
            own[name] = section
    return own


def _changed(section: BaseModel) -> dict[str, Any]:
    """What is not the default; ``cache.enabled`` also where it is, since to write it is to ask for it."""
    found: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            value = _changed(value)
            if value:
                found[name] = value
        elif (
            field.is_required()
            or value != field.get_default(call_default_factory=True)
            or (name == "enabled" and name in section.model_fields_set)
        ):
            found[name] = value
    if isinstance(section, CacheSpec) and not found and section.model_fields_set:
        found["enabled"] = section.enabled  # any key asks for it, also one that says what is so anyway
    return found


def _left_out(spec: Spec) -> list[Notice]:
    notices = []
    for path, reason in LEFT_TO_RAY.items():
        section, _, name = path.partition(".")
        changed = _changed(getattr(spec, section))
        if name != "replicas" and changed and (not name or name in changed):
            notices.append(Notice(path, f"is left out: {reason}"))
    return notices


def _masked(values: dict[str, Any], show_secrets: bool) -> tuple[dict[str, Any], tuple[Notice, ...]]:
    """``values`` with ``***`` for what is named like a secret, and the notice that says so."""
    hidden = values if show_secrets else _without_secrets(values, "")
    if hidden == values:
        return values, ()
    text = f"values that look like secrets are masked with {MASK}; --show-secrets prints them"
    return hidden, (Notice("env and args", text),)


def _without_secrets(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(item, str(key)) for key, item in value.items()}
    return MASK if isinstance(value, str) and is_secret(name) else value


def _yaml(values: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    if yaml.safe_load(text) != values:  # a letter that YAML takes for the end of a line: as an escape it stays one
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=False, width=120)
    return text
