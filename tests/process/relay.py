"""Passes connections of an inherited listening socket on to an address: ``relay.py FD HOST PORT``.

A socket stays in the network in which it was made, whoever has it: so the one leads from the network of the tests into
that of this process. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

PIECE_BYTES = 65_536


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the sender ends; then the receiver is told."""
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def serve(listener: socket.socket, host: str, port: int) -> None:
    """Until the process is killed."""
    passing: set[asyncio.Task[None] | None] = set()  # the loop itself does not keep them alive

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing.add(asyncio.current_task())
        try:
            await connect(reader, writer)
        finally:
            passing.discard(asyncio.current_task())
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            far_writer.close()

    server = await asyncio.start_server(one, sock=listener)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
