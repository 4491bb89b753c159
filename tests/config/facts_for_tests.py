"""Facts about a host that every test can state: a quiet machine with 64 GB and two GPUs that are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from antiphon.config.compile import Compiled, compile_all
from antiphon.config.facts import HostFacts, InterpreterFacts, interpreter_key
from antiphon.config.hosts import is_loopback
from antiphon.config.load import load_spec
from antiphon.config.model_facts import ModelFacts
from antiphon.config.resolve import Machine

LAPTOP = Machine(cores=4, has_cuda=False)
GPU_HOST = Machine(cores=64, has_cuda=True)
GOOD_INTERPRETER = InterpreterFacts(vllm="0.32.0", nixl="1.5.1")


def compiled_from(sets: dict[str, Any], machine: Machine = LAPTOP) -> Compiled:
    """A spec with a model path and ``sets``, compiled for ``machine``."""
    return compile_all(load_spec(None, {"model.path": "/models/tiny", **sets}), machine)


def facts_of(compiled: Compiled, **changes: Any) -> HostFacts:
    """Facts of a host on which ``compiled`` works, with ``changes``. Loopback is this machine; other hosts are not."""
    facts = HostFacts(
        mem_available_bytes=64 * 10**9,
        shm_free_bytes=10**9,
        cores=4,
        num_cuda_devices=2,
        local_hosts=frozenset(plan.host for plan in compiled.plans if is_loopback(plan.host)),
        interpreters={interpreter_key(engine): GOOD_INTERPRETER for engine in compiled.engines},
        model=ModelFacts(is_folder=True, num_bytes=270_000_000, saved_dtype="bfloat16"),
    )
    return replace(facts, **changes)


def gatherer(**changes: Any) -> Callable[[Compiled], HostFacts]:
    """A stand-in for ``gather_facts`` that states :func:`facts_of`."""
    return lambda compiled: facts_of(compiled, **changes)
