"""Free ports for tests. No two test processes on this machine get the same port."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle, islice

FIRST, BLOCKS, BLOCK_SIZE = 15_000, 150, 100  # all below the ports of outgoing connections


def free_port() -> int:
    """Return a free port of the loopback address that no other test process uses.

    A process gets all ports of its block before it gets the first one again.
    """
    _, ports = _claim_block(os.getpid())
    for port in islice(ports, BLOCK_SIZE):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"all {BLOCK_SIZE} ports of this process are in use")


@cache
def _claim_block(pid: int) -> tuple[socket.socket, Iterator[int]]:
    """Claim a block of ports for a process; return the claim and the ports in turn, without end.

    The claim is a socket with an abstract name, which the kernel closes when the process exits.
    """
    claim = socket.socket(socket.AF_UNIX)
    for number in range(pid, pid + BLOCKS):
        with suppress(OSError):
            claim.bind(f"\0samestep-tests-ports-{number % BLOCKS}")
            first = FIRST + number % BLOCKS * BLOCK_SIZE
            return claim, cycle(range(first, first + BLOCK_SIZE))
    raise RuntimeError(f"{BLOCKS} test processes already run on this machine; expected fewer")
