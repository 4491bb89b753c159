"""``antiphon cache-server``, and its alias ``antiphon server``: run a cache server."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from antiphon.cache_server.app import serve
from antiphon.cache_server.server import CacheServer
from antiphon.cli.flags import FlagsCommand, model_from_flags, spec_options
from antiphon.cli.serving import (
    Listener,
    log_to_stderr,
    raise_descriptor_limit,
    refusals,
    refuse_one_port_twice,
    warn_of_open_files,
)
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.config.cluster import host_port_of
from antiphon.transport.loop import run


@click.command(cls=FlagsCommand)
@spec_options(CacheServerSpec)
def cache_server(**params: Any) -> None:
    """Run a cache server: it keeps KV of earlier requests in shared memory for the engines of this host.

    Example: antiphon cache-server --port 6555 --http-port 8090 --l1-size-gb 100 --eviction-policy LRU
    --chunk-size 256 --instance-id prefiller
    """
    spec = model_from_flags(CacheServerSpec, params)
    refuse_one_port_twice(_listeners(spec))
    log_to_stderr(spec.log_level)
    log = logging.getLogger("antiphon.cache_server")
    raise_descriptor_limit()
    warn_of_open_files(log, _secret_files(spec))

    def announce(server: CacheServer, http_port: int) -> None:
        log.info(
            "ready: instance=%s incarnation=%s port=%d http_port=%d socket=%s arena_bytes=%d chunk_size=%d policy=%s",
            *(server.instance, server.incarnation, server.port, http_port, server.socket_path),
            *(server.population.total_bytes, spec.chunk_size, spec.eviction_policy),
        )

    with refusals("cache-server"):
        is_asked = run(serve(spec, announce))
    if "nixl" in sys.modules:
        # Its libraries take seconds to unload; all that has to be closed is closed.
        logging.shutdown()
        os._exit(0 if is_asked else 1)
    if not is_asked:
        sys.exit(1)


def _listeners(spec: CacheServerSpec) -> list[Listener]:
    found = [Listener("--port", spec.host, spec.port), Listener("--http-port", spec.http_host, spec.http_port)]
    if spec.p2p_advertise_url is not None:
        host, port = host_port_of(spec.p2p_advertise_url)
        found.append(Listener("--p2p-advertise-url", spec.p2p_host or host, port))
    return found


def _secret_files(spec: CacheServerSpec) -> dict[str, str | None]:
    """The files with secrets that the server reads, by the flag that names them."""
    of_tiers = {
        f"--l2 {tier.tier_name}, {option}": path for tier in spec.tiers for option, path in tier.secret_files.items()
    }
    return {"--cluster-secret-file": spec.cluster_secret_file, **of_tiers}


server = cache_server
"""The verb's alias, which command lines of the field carry."""
