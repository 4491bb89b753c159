"""The generated part of ``docs/ray.md``: the schema and the tables of LMCache's keys; each key is described once.

``python -m antiphon.ray.reference docs/ray.md`` writes it below the mark in that file; without a name, to standard
output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from antiphon.config.knobs import section_model
from antiphon.config.model import SpecModel
from antiphon.ray.engine_kwargs import ALWAYS, MODEL_FIELDS, ONE_ONLY, POOL_FIELDS, REFUSED
from antiphon.ray.lmcache_files import CONNECTOR_KEYS, ENV_KEYS, KEYS, OTHER_REMOTE, Key
from antiphon.ray.mapping import LEFT_TO_RAY
from antiphon.ray.schema import DeploymentConfig, PDServingArgs, fate_of

MARK = "<!-- generated from here on: python -m antiphon.ray.reference docs/ray.md -->"
_HEAD = """\
Ray Serve LLM describes prefill and decode by two `LLMConfig`s, `prefill_config` and `decode_config`, in Python or in
the YAML of `serve deploy`. Antiphon reads the same schema and turns it into its own spec, and the other way round:

```bash
antiphon config render --from-ray serve.yaml   # the Antiphon spec that a Serve file means
antiphon config render --ray                   # the Serve file that an Antiphon spec means
```

- Every problem is reported at once, with the key and the remedy; a key that is not known names the nearest that is.
- What is filled in, replaced or ignored is said on standard error, a notice a line. Where a config names no GPU and
  neither this machine nor the Ray that it is part of has any, the defaults of an engine on CPU are filled in that way.
- `kv_transfer_config` goes by the rules of the spec: `NixlConnector`, alone or in a `MultiConnector`, works; engine ids
  are replaced, since an id is new at each start; `kv_both` becomes the role of the pool. Without `kv_transfer_config`
  the engines hand over with NIXL, and on CPU keep KV in cache servers as well.
- `LMCacheConnectorV1` by itself hands KV over through the cache servers: it becomes `handoff.kind: cache`, with a
  notice. What the file of `LMCACHE_CONFIG_FILE` asks for and is not mapped is refused with the name of that part.
- The numbers of replicas, what a pool is scaled by and what an engine reserves of its node are Ray's; of them a spec
  holds the initial number. With only `min_replicas` and `max_replicas` written, targets are filled in, with a notice.
- The files that `LMCACHE_CONFIG_FILE` names are read where the application is built, relative to its working directory;
  what they say becomes part of the spec, so that the nodes of the engines need no copy. One that cannot be read there
  is a problem with its full name; a replica on whose node it cannot be read says so before it starts its engine.
- What Ray's schema has no word for stands under `antiphon`, beside the two configs, as in `antiphon.yaml`:

```yaml
applications:
- name: pd
  import_path: antiphon.ray:build_pd_openai_app
  args:
    prefill_config:
      model_loading_config: {model_id: HuggingFaceTB/SmolLM2-135M-Instruct}
      deployment_config: {autoscaling_config: {min_replicas: 1, max_replicas: 2}}
    decode_config:
      model_loading_config: {model_id: HuggingFaceTB/SmolLM2-135M-Instruct}
      deployment_config: {autoscaling_config: {min_replicas: 2, max_replicas: 3}}
    antiphon:
      router: {policy: least_load}
```
"""


def reference() -> str:
    """The part of the page below the mark, in Markdown."""
    parts = [
        _HEAD,
        "### `pd_config`\n\n" + _schema_table(),
        "### `engine_kwargs`\n\n" + _kwargs_table(),
        "### `antiphon`\n\nEvery section and field of the spec ([configuration.md](configuration.md)) but these:\n\n"
        + _table(("field", "why"), [(f"`{path}`", reason) for path, reason in LEFT_TO_RAY.items()]),
        "### Variables of LMCache in `runtime_env.env_vars`\n\n" + _keys_table(ENV_KEYS),
        "### `kv_connector_extra_config` of LMCacheConnectorV1\n\n" + _keys_table(CONNECTOR_KEYS),
        "### Keys of the file that `LMCACHE_CONFIG_FILE` names\n\n"
        "A refused key is refused for a value that asks for something; `null`, `0` or `false` do not. A file that "
        f"cannot be read is a problem. A `remote_url` that is not `mooncakestore://` is refused as {OTHER_REMOTE}.\n\n"
        + _keys_table(KEYS),
    ]
    return "\n".join(parts)


def _schema_table() -> str:
    rows = [
        (f"`{path}`", fate, text)
        for path, fate, text in _fields(PDServingArgs, "")
        # What the ingress and decode have in common with prefill is said once.
        if not path.startswith(("decode_config.", "ingress_deployment_config.", "proxy_deployment_config."))
    ]
    note = "`decode_config` has the keys of `prefill_config`; the ingress those of its `deployment_config`.\n\n"
    return note + _table(("key", "", "meaning"), rows)


def _fields(model: type[SpecModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        path, inner = f"{prefix}{field.alias or name}", section_model(field)
        if inner is not None and not (inner is DeploymentConfig and prefix == ""):
            yield from _fields(inner, f"{path}.")
        else:
            yield path, fate_of(field.json_schema_extra), field.description or ""


def _kwargs_table() -> str:
    rows = [
        (f"`{name}`", "mapped", f"`model.{field}`, the same in both configs") for name, field in MODEL_FIELDS.items()
    ]
    rows += [(f"`{name}`", "mapped", f"`{field}` of the pool") for name, field in POOL_FIELDS.items()]
    rows += [(f"`{name}`", "ignored", text) for name, text in ALWAYS.items()]
    rows += [(f"`{name}`", "refused", text) for name, text in REFUSED.items()]
    rows += [(f"`{name}`", "only 1", text) for name, text in ONE_ONLY.items()]
    rows.append(("`distributed_executor_backend`", "mp or uni", "an engine's workers are its own processes"))
    rows.append(("any other", "mapped", "`args` of the pool: vLLM checks the name at its start"))
    return _table(("key", "", "meaning"), rows)


def _keys_table(keys: Mapping[str, Key]) -> str:
    rows = []
    for name, key in keys.items():
        if key.fate == "mapped" and key.to:
            text = f"{key.to if key.to == 'the pool' else f'`{key.to}`'}; {key.text}"
        elif key.fate == "refused":
            harmless = ", ".join(f"`{_said(value)}`" for value in key.harmless if value is not None)
            text = f"{key.part}; not mapped: {key.text}" + (f" ({harmless} is fine)" if harmless else "")
        else:
            text = key.text
        rows.append((f"`{name}`", key.fate, text))
    return _table(("key", "", "meaning"), rows)


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        assert not any("|" in cell for cell in row), row
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        page.write_text(f"{page.read_text().partition(MARK)[0]}{MARK}\n\n{reference()}")
    else:
        sys.stdout.write(reference())
