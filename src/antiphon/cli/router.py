"""``antiphon router``: run a router. Accepts the command line of vllm-router's P/D mode as it stands."""

from __future__ import annotations

import logging
from typing import Any

import click

from antiphon.cli.compiled import use_compiled
from antiphon.cli.flags import FlagsCommand, model_from_flags, spec_options
from antiphon.cli.serving import (
    Listener,
    log_to_stderr,
    raise_descriptor_limit,
    refusals,
    refuse_one_port_twice,
    warn_of_open_files,
)
from antiphon.cli.vllm_router_flags import translate
from antiphon.config.hosts import is_loopback
from antiphon.config.router_notices import router_notices
from antiphon.config.router_spec import RouterSpec
from antiphon.transport.loop import run

_NOTICES = "antiphon.vllm_router_flags"


class _RouterCommand(FlagsCommand):
    """Takes the flags of vllm-router too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        translation = translate(args)
        ctx.meta[_NOTICES] = translation.notices
        return super().parse_args(ctx, translation.args)


@click.command(cls=_RouterCommand)
@spec_options(RouterSpec)
def router(**params: Any) -> None:
    """Run a router: prefill on one engine, decode on another, from one address.

    Flags of vllm-router that have another name here are taken too: docs/routing.md lists them.

    Example: antiphon router --policy round_robin --vllm-pd-disaggregation --prefill http://10.0.0.1:8001
    --decode http://10.0.0.2:8002 --host 0.0.0.0 --port 30000
    """
    spec = model_from_flags(RouterSpec, params)
    refuse_one_port_twice(_listeners(spec))
    not_compiled = use_compiled()
    from antiphon.router.app import serve

    log_to_stderr(spec.log_level)
    log = logging.getLogger("antiphon.router")
    if not_compiled is not None:
        log.info("running as Python: %s", not_compiled)
    for notice in click.get_current_context().meta[_NOTICES]:
        log.warning("%s", notice)
    keys = {"--api-key-file": spec.api_key_file, "--worker-api-key-file": spec.worker_api_key_file}
    warn_of_open_files(log, {**keys, "--admin-key-file": spec.admin_key_file})
    for each in router_notices(spec):
        log.warning("%s", each)
    if not is_loopback(spec.host) and spec.api_key_file is None and spec.tenants_file is None:
        log.warning(
            "listening on %s without client keys: anybody who reaches it may use the inference routes "
            "(--api-key-file or --tenants-file names who may). Receipts, metrics, status and engines are %s",
            spec.host,
            "for this machine only" if spec.admin_key_file is None else "for who shows the admin key",
        )

    raise_descriptor_limit()

    def announce(port: int) -> None:
        log.info(
            "routing %d prefill and %d decode engines on http://%s:%d",
            len(spec.prefill),
            len(spec.decode),
            spec.host,
            port,
        )

    with refusals("router"):
        cut = run(serve(spec, announce))
    if cut:
        log.warning("stopped with %d requests cut", cut)


def _listeners(spec: RouterSpec) -> list[Listener]:
    found = [Listener("--port", spec.host, spec.port)]
    first = spec.kv_events_port
    if first is not None:  # one port for each rank, of which one may be the router's
        port = spec.port if spec.port in range(first, first + spec.kv_events_ranks) else first
        found.append(Listener("--kv-events-port", spec.kv_events_host, port))
    return found
