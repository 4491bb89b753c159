"""Plain NIXL between two processes: what peers are measured beside. The target is a process of its own.

    python -m antiphon.bench.peers_raw FILE NUM_BYTES

registers so much memory, writes its address and metadata to FILE as JSON, and polls until it is killed.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from antiphon.bench.rig import Buffer

POLL_S = 0.000_2
"""How often the target polls: what gives the best figures."""


def new_agent(buffer: Buffer) -> Any:
    """An agent with ``buffer`` registered, and no progress thread."""
    api: Any = importlib.import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of each agent on standard output, among the figures
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = api.nixl_agent_config(enable_prog_thread=False, sync_mode=sync, backends=["UCX"])
    agent = api.nixl_agent(f"bench-{secrets.token_hex(8)}", config)
    agent.register_memory([(buffer.address, buffer.num_bytes, 0, "")], "DRAM")
    return agent


class RawReader:
    """Reads the whole target in pieces, one after the other.

    Args:
        told: by the target.
        buffer: where to; at least as large.
    """

    def __init__(self, told: dict[str, Any], buffer: Buffer) -> None:
        self._agent = new_agent(buffer)
        self._buffer = buffer
        self._address = int(told["address"])
        found = self._agent.add_remote_agent(bytes.fromhex(told["metadata"]))
        self._remote = found.decode() if isinstance(found, bytes) else found

    def read(self, num_bytes: int, piece_bytes: int) -> float:
        """Seconds that it takes."""
        agent = self._agent
        began_s = time.perf_counter()
        for start in range(0, num_bytes, piece_bytes):
            here = agent.get_xfer_descs([(self._buffer.address + start, piece_bytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(self._address + start, piece_bytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, self._remote)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)
        return time.perf_counter() - began_s


def main(path: str, num_bytes: int) -> None:
    """The target."""
    buffer = Buffer(num_bytes)
    buffer.fill_random()
    agent = new_agent(buffer)
    draft = Path(f"{path}.{os.getpid()}")
    draft.write_text(json.dumps({"address": buffer.address, "metadata": agent.get_agent_metadata().hex()}))
    draft.rename(path)
    while True:
        agent.get_new_notifs()
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
