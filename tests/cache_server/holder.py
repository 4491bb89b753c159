"""An engine's process to be killed: it holds a lease, an announced copy and a reservation, and says so.

python -m tests.cache_server.holder SOCKET
"""

from __future__ import annotations

import sys

from antiphon.protocol import cache as wire
from tests.cache_server.world import Client, keys_of


def main(path: str) -> None:
    client = Client(path).hello().attach("holder", "life")
    keys = keys_of("held", 3)
    client.store("held", keys)
    found = client.lookup("held", keys)
    assert found.lease is not None
    client.call(wire.CopyBegan(found.lease), wire.LeaseNoted)
    assert client.reserve("held", keys_of("reserved", 2)).verdicts == ("write", "write")
    print("holding", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
