"""The report of a request that has ended: where each of its prompt tokens came from. A value, and no call."""

from __future__ import annotations

from antiphon.connector.options import SchedulerOptions
from antiphon.connector.requests import TrackedRequest
from antiphon.protocol.cache import Report


def report_of(tracked: TrackedRequest, options: SchedulerOptions, finish: str) -> Report:
    """The report.

    Args:
        options: of the engine.
        finish: as in ``Report``.
    """
    sources = tracked.sources
    return Report(
        request=tracked.request.request_id,
        engine=options.engine,
        incarnation=options.incarnation,
        num_prompt_tokens=tracked.request.num_prompt_tokens,
        device=sources.device,
        l1=sources.l1,
        remote_prefill=sources.remote_prefill,
        computed=sources.computed,
        num_preemptions=sources.num_preemptions,
        finish=finish,
        namespace=b"" if tracked.identity is None else tracked.identity.namespace,
        l2=sources.l2,
        peer=sources.peer,
    )
