"""``antiphon coordinator``: run a coordinator."""

from __future__ import annotations

import logging
from typing import Any

import click

from antiphon.cli.flags import FlagsCommand, model_from_flags, spec_options
from antiphon.cli.serving import (
    Listener,
    log_to_stderr,
    raise_descriptor_limit,
    refusals,
    refuse_one_port_twice,
    warn_of_open_files,
)
from antiphon.config.coordinator_spec import CoordinatorSpec
from antiphon.coordinator.app import serve
from antiphon.coordinator.server import Coordinator
from antiphon.transport.loop import run


@click.command(cls=FlagsCommand)
@spec_options(CoordinatorSpec)
def coordinator(**params: Any) -> None:
    """Run a coordinator: it knows which cache servers are alive and which holds what. Its loss costs sharing only.

    Example: antiphon coordinator --host 0.0.0.0 --port 6655 --cluster-secret-file /etc/antiphon/cluster.secret
    """
    spec = model_from_flags(CoordinatorSpec, params)
    refuse_one_port_twice(
        (Listener("--port", spec.host, spec.port), Listener("--http-port", spec.http_host, spec.http_port))
    )
    log_to_stderr(spec.log_level)
    log = logging.getLogger("antiphon.coordinator")
    raise_descriptor_limit()
    warn_of_open_files(log, {"--cluster-secret-file": spec.cluster_secret_file})

    def announce(started: Coordinator, http_port: int) -> None:
        log.info("ready: incarnation=%s port=%d http_port=%d", started.incarnation, started.port, http_port)

    with refusals("coordinator"):
        run(serve(spec, announce))
