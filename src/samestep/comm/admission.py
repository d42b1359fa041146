"""Limits of servers to which anyone may connect: connections that wait, and what is printed."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, Final, TypeVar

Connection = TypeVar("Connection")

# asyncio accepts so many before it handles any, and with no file left it fails as often at once
ACCEPTED_AT_ONCE: Final = 8
KEPT_FILES: Final = 512  # that connections of strangers never take, at most half of all
NOTICE_SECONDS: Final = 60.0  # between lines about the limit of open files
_lines: SimpleQueue[str] = SimpleQueue()
_printing = threading.Lock()
_told_at = [float("-inf")]  # time.monotonic() of the last such line


def connections_within(limit: int) -> int:
    """Return the limit of connections of strangers, fewer if this process may open few files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if files < 0 else min(limit, files - min(files // 2, KEPT_FILES))


def first_of_busiest(addresses: Mapping[Connection, str]) -> Connection:
    """Return the oldest connection of the address with the most; `addresses` are in their order."""
    ((busiest, _),) = Counter(addresses.values()).most_common(1)
    return next(each for each, address in addresses.items() if address == busiest)


def is_out_of_files(error: object) -> bool:
    """Return whether an error says that no file can be opened; print one line if so."""
    if not isinstance(error, OSError) or error.errno not in {errno.EMFILE, errno.ENFILE}:
        return False
    if time.monotonic() - _told_at[0] > NOTICE_SECONDS:
        _told_at[0] = time.monotonic()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log(f"new connections wait: this process has opened all of its {files} files (ulimit -n)")
    return True


def limit_errors() -> None:
    """Let the running event loop print a line instead of a traceback for each refused accept."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not is_out_of_files(context.get("exception")):
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(handle)


async def start_server(serve: Any, listener: socket.socket) -> asyncio.Server:
    """Start to serve connections on a listening socket with `serve(reader, writer)`."""
    limit_errors()
    server = await asyncio.start_server(serve, sock=listener, backlog=ACCEPTED_AT_ONCE)
    listener.listen(socket.SOMAXCONN)
    return server


def log(text: str) -> None:
    """Print a line for the user, soon: a server must not wait for a slow disk or terminal."""
    _lines.put(f"samestep: {text}\n")
    threading.Thread(target=_print, name="samestep log").start()


def _print() -> None:
    """Print the next line, in a thread that then ends."""
    with _printing:
        sys.stderr.write(_lines.get())
        sys.stderr.flush()
