"""Whether the coordinator that a spec names answers, and takes the cluster secret of this host.

It connects as a cache server does and proves the secret, but joins nothing. One that ``antiphon up`` starts is a
process of the deployment, and tried as such. Every wait has a limit, and nothing is changed: no secret is made here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from antiphon.config.cache_server_spec import default_runtime_dir
from antiphon.config.cluster import SECRET_FILE, cluster_secret, host_port_of
from antiphon.config.compile import Compiled
from antiphon.config.hosts import is_loopback, is_this_machine
from antiphon.config.live import HTTP_TIMEOUT_S, LiveRow, try_port
from antiphon.config.peers_plan import COORDINATOR_NAME, are_peers
from antiphon.core.errors import AntiphonError, ConfigError, PeerRefused
from antiphon.core.ids import new_incarnation
from antiphon.protocol import peers as wire
from antiphon.protocol.cluster_proof import Asker
from antiphon.transport.peer_tcp import PeerSocket

FIELD: Final = "cache.coordinator_url"
_ASKING: Final = "config-check"
"""What the coordinator calls this process in its log, where it refuses it."""
_TARGET: Final = "cluster secret"


def ask_coordinator(compiled: Compiled) -> list[LiveRow]:
    """What the coordinator says that ``cache.coordinator_url`` names.

    Nothing where the cache servers share with nobody, where ``antiphon up`` starts the coordinator, or where it is on
    loopback of other hosts.
    """
    url, servers = compiled.spec.cache.coordinator_url, list(compiled.servers)
    if url is None or not are_peers(compiled.spec, servers):
        return []
    host, port = host_port_of(url)
    has_server = any(is_this_machine(server.host) for server in servers)
    if is_loopback(host) and not has_server:
        return []
    start = f"start antiphon coordinator on {host}, or correct {FIELD}"
    row = try_port(COORDINATOR_NAME, "calls", (host, port), host, start)
    return [row, _try_secret(compiled, url, has_server=has_server)] if row.is_ok else [row]


def _try_secret(compiled: Compiled, url: str, *, has_server: bool) -> LiveRow:
    cache = compiled.spec.cache
    runtime_dir = cache.runtime_dir or default_runtime_dir()
    path = cache.cluster_secret_file or str(Path(runtime_dir) / SECRET_FILE)
    try:
        if cache.cluster_secret_file is None and not Path(path).exists():
            raise ConfigError(
                f"{path} is not there",
                remedy=f"give the coordinator --runtime-dir {runtime_dir}, where it makes one, or give it and "
                "cache.cluster_secret_file the same file",
            )
        secret = cluster_secret(cache.cluster_secret_file, runtime_dir, [])
    except ConfigError as error:
        if not has_server:  # the file is needed where a cache server runs
            result = f"not tried: {error.message}, and no cache server of this deployment runs on this host"
            return LiveRow(COORDINATOR_NAME, _TARGET, True, result)
        return LiveRow(COORDINATOR_NAME, _TARGET, False, error.message, error.remedy or "name a readable file")
    asker = Asker(secret, wire.COORDINATOR, _ASKING, new_incarnation())
    try:
        PeerSocket.connect(url, asker, HTTP_TIMEOUT_S).close()
    except PeerRefused as error:
        fix = f"{error.remedy}; the secret of this host is in {path}" if error.remedy else f"correct {FIELD}"
        return LiveRow(COORDINATOR_NAME, _TARGET, False, error.message, fix)
    except AntiphonError as error:
        port = "the --port of antiphon coordinator (6655 by default), not its --http-port"
        fix = f"see that {FIELD} names {port}, and look in its log"
        return LiveRow(COORDINATOR_NAME, _TARGET, False, error.message, fix)
    return LiveRow(COORDINATOR_NAME, _TARGET, True, f"accepted ({path})")
