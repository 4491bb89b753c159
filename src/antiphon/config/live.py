"""Whether the processes of a deployment can be reached from this host, and fit together.

It talks to them as their peers do (HTTP port, side-channel port, ``/health``, ``/version``) and changes nothing.
Every wait has a limit.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from antiphon.config.cluster import host_port_text
from antiphon.config.compile import Compiled
from antiphon.config.facts import interpreter_key, probe_interpreter
from antiphon.config.hosts import WILDCARDS, host_and_port, is_this_machine
from antiphon.config.interpreters import InterpreterKey, run_python
from antiphon.config.plan import BEHIND_ENGINES, ProcessPlan

CONNECT_TIMEOUT_S = 2.0
HTTP_TIMEOUT_S = 5.0
"""Longer than to connect: an engine on a busy CPU answers late."""
IMPORT_TIMEOUT_S = 60.0
_BODY_MAX_BYTES = 65536


@dataclass(frozen=True)
class LiveRow:
    """One thing that was tried."""

    process: str
    """Name of the process, or the interpreter."""
    target: str
    """What was asked, with host and port."""
    is_ok: bool
    result: str
    """What came back, or what went wrong."""
    fix: str = ""
    """What to do, where it went wrong."""


def check_live(compiled: Compiled) -> list[LiveRow]:
    """Try every process of the plan from here, in parallel; then compare versions; then import NIXL here."""
    plans = tried(compiled)
    with ThreadPoolExecutor(max_workers=min(32, len(plans))) as pool:
        answers = list(pool.map(_try_process, plans))
    rows = [row for found, _ in answers for row in found]
    versions = {plan.name: version for plan, (_, version) in zip(plans, answers, strict=True) if version is not None}
    rows += _compare(versions, compiled)
    rows += [_import_nixl(key) for key in _interpreters(compiled)]
    return rows


def tried(compiled: Compiled) -> list[ProcessPlan]:
    """The processes that can be reached from here: all but what answers on loopback of other hosts, which are cache
    servers and the coordinator."""
    return [plan for plan in compiled.plans if plan.kind not in BEHIND_ENGINES or is_this_machine(plan.host)]


def _try_process(plan: ProcessPlan) -> tuple[list[LiveRow], str | None]:
    """What ``plan`` answers, and its version where it is an engine that told it."""
    rows = []
    version = None
    host, port = host_and_port(plan.base_url)
    for use, number in plan.ports.items():
        address = plan.addresses.get(use, host)
        start = f"start {plan.name} on {plan.host} (antiphon config render --only {plan.name}), or look in its log"
        rows.append(try_port(plan.name, use, (host if address in WILDCARDS else address, number), plan.host, start))
    if not rows[0].is_ok:
        return rows, None
    rows.append(_try_health(plan, host, port))
    if plan.kind == "vllm":
        row, version = _try_version(plan, host, port)
        rows.append(row)
    return rows, version


def try_port(process: str, use: str, address: tuple[str, int], machine: str, start: str) -> LiveRow:
    """Whether something listens.

    Args:
        process: whose port it is.
        use: of the port, as a plan names it.
        address: host and port.
        machine: that the process runs on, as the spec names it.
        start: what to do where nothing listens.
    """
    host, port = address
    target = f"{use.replace('_', ' ')} port {host_port_text(host, port)}"
    try:
        with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S):
            return LiveRow(process, target, True, "open")
    except ConnectionRefusedError:
        return LiveRow(process, target, False, "refused: nothing listens", start)
    except TimeoutError:
        fix = f"let TCP {port} of {host} through the firewall, and see that {machine} is up"
        return LiveRow(process, target, False, f"no answer in {CONNECT_TIMEOUT_S:g} s", fix)
    except OSError as error:
        fix = f"correct the host name {host}, or the route to it"
        return LiveRow(process, target, False, error.strerror or str(error), fix)


def _try_health(plan: ProcessPlan, host: str, port: int) -> LiveRow:
    # That of a cache server stores and reads back a chunk; that of an engine or a router is spelled as vLLM spells it.
    path = "/healthz" if plan.kind in BEHIND_ENGINES else "/health"
    target = f"GET {plan.base_url}{path}"
    try:
        status, _ = _get(host, port, path)
    except (OSError, http.client.HTTPException) as error:
        fix = f"see that {plan.name} and no other program listens there, and look in its log"
        return LiveRow(plan.name, target, False, _said(error), fix)
    fix = "" if status == 200 else f"wait until {plan.name} is ready, or look in its log"
    return LiveRow(plan.name, target, status == 200, str(status), fix)


def _try_version(plan: ProcessPlan, host: str, port: int) -> tuple[LiveRow, str | None]:
    target = f"GET {plan.base_url}/version"
    fix = f"see that {plan.name} is a vLLM engine"
    try:
        status, body = _get(host, port, "/version")
        version = json.loads(body)["version"] if status == 200 else None
    except (OSError, http.client.HTTPException) as error:
        return LiveRow(plan.name, target, False, _said(error), fix), None
    except (ValueError, KeyError, TypeError):
        return LiveRow(plan.name, target, False, "is not a version", fix), None
    if not isinstance(version, str):
        return LiveRow(plan.name, target, False, str(status), fix), None
    return LiveRow(plan.name, target, True, version), version


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(_BODY_MAX_BYTES)
    finally:
        connection.close()


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {HTTP_TIMEOUT_S:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _compare(versions: dict[str, str], compiled: Compiled) -> Iterator[LiveRow]:
    """Engines have one version among themselves, and it is the one installed here for those that run from here."""
    if not versions:
        return
    found = sorted(set(versions.values()))
    fix = "install the same vLLM everywhere; NIXL hands over between equal versions only"
    text = found[0] if len(found) == 1 else ", ".join(f"{name} {version}" for name, version in versions.items())
    yield LiveRow("engines", "same vLLM version", len(found) == 1, text, "" if len(found) == 1 else fix)
    for key in _interpreters(compiled):
        here = probe_interpreter(key)
        if here.vllm is None:
            continue  # a host that runs the router alone needs no vLLM
        # A local version suffix (+cpu) names the build, not the protocol.
        is_ok = all(here.vllm.split("+")[0] == version.split("+")[0] for version in found)
        yield LiveRow(key[0], "vLLM here as in the engines", is_ok, here.vllm, "" if is_ok else fix)


def _interpreters(compiled: Compiled) -> Iterable[InterpreterKey]:
    """The interpreters of the engines that run on this host; none where it runs no engine."""
    engines = [engine for engine in compiled.engines if engine.spec.kind == "vllm" and is_this_machine(engine.host)]
    return dict.fromkeys(interpreter_key(engine) for engine in engines)


def _import_nixl(key: InterpreterKey) -> LiveRow:
    python, _ = key
    fix = f"install NIXL for it: {python} -m pip install nixl"
    target = "import nixl"
    try:
        done = run_python(key, "import nixl._api", timeout_s=IMPORT_TIMEOUT_S)
    except OSError as error:
        return LiveRow(python, target, False, error.strerror or str(error), "name the interpreter that has NIXL")
    except subprocess.TimeoutExpired:
        return LiveRow(python, target, False, f"not done in {IMPORT_TIMEOUT_S:g} s", "try again on a quieter host")
    if done.returncode == 0:
        return LiveRow(python, target, True, "works")
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return LiveRow(python, target, False, last, fix)
