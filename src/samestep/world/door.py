"""How the workers of one host come to be connected: each listens at an address without a file, and lets in the others alone."""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samestep.world.base import FORMING
from samestep.world.mesh import Mesh, Peer
from samestep.world.whereabouts import no_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from samestep.world.whereabouts import Whereabouts

_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): process, user, group


@dataclass(frozen=True)
class Member:
    """What a worker tells the others of its host, so that they find it: its process, and the abstract address where it listens."""

    pid: int
    address: str


class Door:
    """Where a worker listens for the others of its host until they are connected; a context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"samestep-{os.urandom(16).hex()}"
        self._socket.bind("\0" + address)
        self._socket.listen(socket.SOMAXCONN)
        self.member = Member(os.getpid(), address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def connect(
        self,
        rank: int,
        members: Mapping[int, Member],
        start_timeout_seconds: float,
        timeout_seconds: float,
        whereabouts: Whereabouts | None = None,
    ) -> Mesh:
        """Return the mesh of `members`, by rank, of which this worker is one. Raises `WorldError` where some do not come.

        Each worker calls those before it and lets in those after it. The kernel says who is at the
        other end: strangers are refused. `start_timeout_seconds` is for that; later on the mesh
        waits for `timeout_seconds`.
        """
        deadline = time.monotonic() + start_timeout_seconds
        with ExitStack() as exits:
            try:
                sockets = {
                    other: _call(member, exits) for other, member in members.items() if other < rank
                }
                sockets |= self._let_in(
                    {member.pid: other for other, member in members.items() if other > rank},
                    deadline,
                    exits,
                )
                peers = [
                    _peer(other, members[other], sockets[other], exits) for other in sorted(sockets)
                ]
            except OSError as error:
                raise no_answer(rank, FORMING, str(error)) from error
            exits.pop_all()
        return Mesh(rank, sorted(members), peers, timeout_seconds, whereabouts)

    def _let_in(
        self, ranks: dict[int, int], deadline: float, exits: ExitStack
    ) -> dict[int, socket.socket]:
        """Return by rank the connections of those processes that `ranks` has, and of no other. Raises `TimeoutError`."""
        sockets: dict[int, socket.socket] = {}
        while ranks:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                missing = " and ".join(
                    f"worker {rank} (process {pid})" for pid, rank in ranks.items()
                )
                raise TimeoutError(f"{missing} did not come") from None
            pid, user = _other_end(connection)
            if user == os.geteuid() and pid in ranks:
                sockets[ranks.pop(pid)] = exits.enter_context(connection)
            else:
                connection.close()
        return sockets


def _call(member: Member, exits: ExitStack) -> socket.socket:
    connection = exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    connection.connect("\0" + member.address)
    if _other_end(connection) != (member.pid, os.geteuid()):
        raise PermissionError(
            f"process {_other_end(connection)[0]} listens where process {member.pid} should"
        )
    return connection


def _peer(rank: int, member: Member, connection: socket.socket, exits: ExitStack) -> Peer:
    process = os.pidfd_open(member.pid)
    exits.callback(os.close, process)
    return Peer(rank, member.pid, connection, process)


def _other_end(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, user
