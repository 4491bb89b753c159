"""Whether the tiers of this host's cache servers could be opened, asked of the interpreter that each server runs in.

A short child process asks what the server itself would find: packages, files with secrets, folders of a disk. It leaves
nothing behind, asks nothing over the network, and has a limit. Servers of other hosts are not looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from antiphon.config.compile import Compiled
from antiphon.config.interpreters import PROBE_TIMEOUT_S, last_words, run_python
from antiphon.config.plan import ProcessPlan

AT_ONCE: Final = 4
"""Children at a time: each imports what its tiers need, which takes a processor for most of a second."""
_PROBE = """
import json, sys
from antiphon.storage.tiers import faults_of
print(json.dumps(faults_of(sys.argv[1:])))
"""


@dataclass(frozen=True)
class TierFault:
    """A tier that its server could not open."""

    field: str
    """``cache.l2[0]``, or ``cache.l2`` where the server's interpreter could not be asked."""
    message: str
    fix: str


def tier_faults(compiled: Compiled, local_hosts: Collection[str]) -> dict[str, tuple[TierFault, ...]]:
    """The faults of the tiers of each cache server of this host that has some, by its name, in the order of the plans.

    ``AT_ONCE`` servers are tried at a time.
    """
    servers = [plan for plan in compiled.plans if plan.role == "cache_server" and plan.host in local_hosts]
    asked = [(plan.name, plan.argv[0], tiers) for plan in servers if (tiers := _tiers_of(plan))]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        answers = pool.map(lambda each: tuple(_faults(each[1], each[2])), asked)
        return {name: faults for (name, _, _), faults in zip(asked, answers, strict=True) if faults}


def _tiers_of(plan: ProcessPlan) -> list[str]:
    """The values of ``--l2`` on the command line of a cache server."""
    return [value for flag, value in zip(plan.argv, plan.argv[1:], strict=False) if flag == "--l2"]


def _faults(python: str, tiers: list[str]) -> Iterator[TierFault]:
    key = (python, os.environ.get("PYTHONPATH", ""))
    answer, why = None, ""
    try:
        done = run_python(key, _PROBE, tiers, timeout_s=PROBE_TIMEOUT_S)
        if done.returncode == 0:
            answer = json.loads(done.stdout)
        else:
            why = last_words(done)
    except subprocess.TimeoutExpired:
        message = f"the tiers could not be tried in {PROBE_TIMEOUT_S:g} s: a disk hangs, or the host is very busy"
        yield TierFault("cache.l2", message, "look at the disk, or leave its tier out")
        return
    except (OSError, json.JSONDecodeError) as error:
        why = str(error)
    if answer is None:
        yield TierFault("cache.l2", f"the tiers could not be tried with {python}: {why}", "install antiphon anew")
        return
    for text, message, remedy in answer:
        yield TierFault(f"cache.l2[{tiers.index(text)}]", message, remedy or "see docs/tiers.md")
