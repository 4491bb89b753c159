"""``antiphon cache-server``, and its alias ``antiphon server``: run a cache server."""

from __future__ import annotations

import logging
import os
import resource
import sys
from typing import Any

import click

from antiphon.cache_server.app import serve
from antiphon.cache_server.server import CacheServer
from antiphon.cli.flags import model_from_flags, spec_options
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.core.errors import ConfigError, StartError
from antiphon.transport.loop import run


@click.command()
@spec_options(CacheServerSpec)
def cache_server(**params: Any) -> None:
    """Run a cache server: it keeps KV of earlier requests in shared memory for the engines of this host.

    Example: antiphon cache-server --port 6555 --http-port 8090 --l1-size-gb 100 --eviction-policy LRU
    --chunk-size 256 --instance-id prefiller
    """
    spec = model_from_flags(CacheServerSpec, params)
    if spec.port and spec.port == spec.http_port and _number(spec.host) == _number(spec.http_host):
        fix = "give --port and --http-port a value each"
        raise click.UsageError(f"--http-port: two uses of one port, {spec.port}: it is --port already\n  fix: {fix}")
    logging.basicConfig(
        level=spec.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    log = logging.getLogger("antiphon.cache_server")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def announce(server: CacheServer, http_port: int) -> None:
        log.info(
            "ready: instance=%s incarnation=%s port=%d http_port=%d socket=%s arena_bytes=%d chunk_size=%d policy=%s",
            *(server.instance, server.incarnation, server.port, http_port, server.socket_path),
            *(server.population.total_bytes, spec.chunk_size, spec.eviction_policy),
        )

    try:
        is_asked = run(serve(spec, announce))
    except ConfigError as error:
        flag = f"--{error.field.replace('_', '-')}: " if error.field else ""
        fix = f"\n  fix: {error.remedy}" if error.remedy else ""
        raise click.UsageError(f"{flag}{error.message}{fix}") from error
    except StartError as error:
        click.echo(f"antiphon cache-server: {error.message}\n  fix: {error.remedy}", err=True)
        sys.exit(1)
    if "nixl" in sys.modules:
        # Its libraries take seconds to unload; all that has to be closed is closed.
        logging.shutdown()
        os._exit(0 if is_asked else 1)
    if not is_asked:
        sys.exit(1)


def _number(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


server = cache_server
"""The verb's alias, which command lines of the field carry."""
