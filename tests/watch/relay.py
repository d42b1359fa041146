"""A TCP proxy whose connections tests can cut.

`python -m tests.watch.relay PORT TARGET` forwards a loopback port to another.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HOST = "127.0.0.1"


@contextmanager
def relay(port: int, target: int) -> Iterator[None]:
    """Forward `port` to `target` in a process; at the end it is killed, with its connections."""
    command = [sys.executable, "-m", __name__, str(port), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()  # it is listening
            yield
        finally:
            process.kill()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _main(port: int, target: int) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection(HOST, target)
        await asyncio.gather(_copy(reader, target_writer), _copy(target_reader, writer))

    server = await asyncio.start_server(connect, HOST, port)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*map(int, sys.argv[1:])))
