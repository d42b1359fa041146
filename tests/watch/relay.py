"""A way to a server that can be cut: `python -m tests.watch.relay PORT TO` passes on what comes to a port of the loopback."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"


@contextmanager
def relay(port: int, to: int) -> Iterator[None]:
    """Have a process listen at `port` and pass all on to the port `to`; at the end it is killed, with its connections."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(port), str(to)], stdout=subprocess.PIPE
    ) as process:
        try:
            process.stdout.readline()  # when it listens
            yield
        finally:
            process.kill()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _main(port: int, to: int) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(HOST, to)
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    server = await asyncio.start_server(connect, HOST, port)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*map(int, sys.argv[1:])))
