"""Counts the bytes of the TCP connections that pass through it, on this machine."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections import Counter
from contextlib import suppress

from fedml_noniid.deploy.stream import wait_for

UP, DOWN = "up", "down"  # from the caller, to the caller
PIECE = 1 << 16  # bytes


class Relay:
    """Listens while it is open, and sends what comes on to `target`."""

    def __init__(self, target: str) -> None:
        """`target`: host:port; it may listen later."""
        self._host, _, self._port = target.rpartition(":")
        self.bytes = Counter[str]()
        self.address = ""

    def __enter__(self) -> Relay:
        self._server = wait_for(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            answers, there = await asyncio.open_connection(self._host, int(self._port))
        except OSError:  # it does not listen: the caller tries again
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, there, UP), self._pass_on(answers, writer, DOWN))

    async def _pass_on(self, reader: StreamReader, writer: StreamWriter, way: str) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE):
                self.bytes[way] += len(piece)
                writer.write(piece)
                await writer.drain()
        writer.close()
