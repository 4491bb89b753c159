"""``antiphon coordinator``: run a coordinator."""

from __future__ import annotations

import logging
import resource
import sys
from typing import Any

import click

from antiphon.cli.flags import FlagsCommand, model_from_flags, spec_options
from antiphon.config.coordinator_spec import CoordinatorSpec
from antiphon.config.key_files import shown_to_others
from antiphon.coordinator.app import serve
from antiphon.coordinator.server import Coordinator
from antiphon.core.errors import ConfigError, StartError
from antiphon.transport.loop import run


@click.command(cls=FlagsCommand)
@spec_options(CoordinatorSpec)
def coordinator(**params: Any) -> None:
    """Run a coordinator: it knows which cache servers are alive and which holds what. Its loss costs sharing only.

    Example: antiphon coordinator --host 0.0.0.0 --port 6655 --cluster-secret-file /etc/antiphon/cluster.secret
    """
    spec = model_from_flags(CoordinatorSpec, params)
    logging.basicConfig(
        level=spec.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    log = logging.getLogger("antiphon.coordinator")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    if spec.cluster_secret_file is not None and (text := shown_to_others(spec.cluster_secret_file)) is not None:
        log.warning("--cluster-secret-file: %s", text)

    def announce(started: Coordinator, http_port: int) -> None:
        log.info("ready: incarnation=%s port=%d http_port=%d", started.incarnation, started.port, http_port)

    try:
        run(serve(spec, announce))
    except ConfigError as error:
        flag = f"--{error.field.replace('_', '-')}: " if error.field else ""
        fix = f"\n  fix: {error.remedy}" if error.remedy else ""
        raise click.UsageError(f"{flag}{error.message}{fix}") from error
    except StartError as error:
        fix = f"\n  fix: {error.remedy}" if error.remedy else ""
        click.echo(f"error: {error.message}{fix}", err=True)
        sys.exit(1)
