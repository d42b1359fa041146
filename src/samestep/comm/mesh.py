"""Connections between the workers of one host, over which they meet and hand each other small messages and open files."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from samestep.comm.base import FORMING, another_call
from samestep.comm.status import WorkerStatus, no_answer, process_state

# of the largest message: a socket holds several, so that sending never waits
MESSAGE_BYTES = 16 * 1024
WHAT_CHARACTERS = 200  # of `what`, with which messages begin
BUFFER_BYTES = MESSAGE_BYTES + 4 * WHAT_CHARACTERS + 1

Message = tuple[bytes, list[int]]  # with the files that came with it


@dataclass(frozen=True)
class Peer:
    """Another worker of the host, its `socket`, and a file that tells of the end of its `process`.

    The socket may outlive the worker, in a process that it forked.
    """

    rank: int
    pid: int
    socket: socket.socket
    process: int

    def __str__(self) -> str:
        stopped = ", which is stopped" if process_state(self.pid) in {"T", "t"} else ""
        return f"worker {self.rank} (process {self.pid}{stopped})"

    def send(self, message: bytes, files: list[int]) -> None:
        """Send without waiting. Raises `OSError` where the peer is gone."""
        if files:
            socket.send_fds(self.socket, [message], files)
        else:
            self.socket.send(message)

    def receive(self, files: int) -> Message | None:
        """Return the peer's next message, or None if there is none yet. Raises `OSError` where the peer is gone."""
        received: list[int] = []
        try:
            if files:
                data, received, *_ = socket.recv_fds(self.socket, BUFFER_BYTES, files)
            else:
                data = self.socket.recv(BUFFER_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError
        return data, received

    def close(self) -> None:
        """Leave the peer. A process that was forked here may hold the socket, so that closing alone would tell nobody."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        os.close(self.process)


class Mesh:
    """The workers `ranks` of a host, each connected to every other. Each call is collective among them.

    In a call a worker sends each other one message and waits for theirs; so nobody is ever more
    than one call ahead. It sleeps in the kernel: a worker that looked again and again would take
    the core from the one it waits for. After a failure every further call fails at once, because
    messages of the failed one may be left.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        peers: Sequence[Peer],
        timeout_seconds: float,
        status: WorkerStatus | None = None,
    ) -> None:
        for peer in peers:
            peer.socket.settimeout(0)
        self.rank, self.ranks = rank, ranks
        self._peers = peers
        self._timeout_seconds = timeout_seconds
        self._status = status or WorkerStatus(rank)
        self._last = FORMING  # what all were doing when they last met
        self._failure = ""

    def exchange(self, messages: Mapping[int, bytes], what: str) -> dict[int, bytes]:
        """Hand each other worker its message, of at most `MESSAGE_BYTES`; return by rank what they handed this one.

        Raises `WorldError` where a worker is gone, does not come in time, or makes another call.
        """
        return {rank: message for rank, (message, _) in self._exchange(messages, [], what).items()}

    def meet(self, what: str) -> None:
        """Return when every worker has come. Raises `WorldError` as `exchange` does."""
        self._exchange(dict.fromkeys(self.ranks, b""), [], what)

    def exchange_files(self, file: int, what: str) -> dict[int, int]:
        """Hand each other worker an open file; return theirs by rank, for this worker to close. Raises `WorldError` as `exchange` does."""
        received = self._exchange(dict.fromkeys(self.ranks, b""), [file], what)
        return {rank: files[0] for rank, (_, files) in received.items()}

    def close(self) -> None:
        """Leave; the others notice when they call."""
        self._failure = "this worker has left the world"
        for peer in self._peers:
            peer.close()
        self._peers = []

    def _exchange(
        self, messages: Mapping[int, bytes], files: list[int], what: str
    ) -> dict[int, Message]:
        if self._failure:
            raise no_answer(self.rank, what, self._failure)
        # unless this one ends well, which a signal's handler may prevent too
        self._failure = f"an earlier call failed, while {what}"
        head = what[:WHAT_CHARACTERS].encode() + b"\0"
        with self._status.waiting(what):
            try:
                for peer in self._peers:
                    peer.send(head + messages[peer.rank], files)
                received = self._receive(len(files))
            except OSError as error:
                late = isinstance(error, TimeoutError)
                self._failure = f"{error if late else f'gone: {self._gone()}'}; before that all were {self._last}"
                raise self._status.explain(what, self._failure, late=late) from None
        for rank, (message, _) in received.items():
            if not message.startswith(head):
                raise another_call(
                    self.rank, what, rank, message.partition(b"\0")[0].decode(errors="replace")
                )
        self._last, self._failure = what, ""
        return {
            rank: (message[len(head) :], attached) for rank, (message, attached) in received.items()
        }

    def _receive(self, files: int) -> dict[int, Message]:
        """Return every peer's next message. Raises `OSError` where one is gone, `TimeoutError` where one does not come."""
        received: dict[int, Message] = {}
        missing = {peer.rank: peer for peer in self._peers}
        deadline = time.monotonic() + self._timeout_seconds
        ready: set[int] = set()
        while True:
            for rank, peer in list(missing.items()):
                message = peer.receive(files)
                if message is not None:
                    received[rank] = message
                    del missing[rank]
                elif peer.process in ready:
                    raise ConnectionResetError
            if not missing:
                return received
            ready = _ready(missing.values(), select.POLLIN, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = " and ".join(map(str, missing.values()))
                raise TimeoutError(f"{late} did not come within {self._timeout_seconds:g} s")

    def _gone(self) -> str:
        """Return the names of all that have ended or left by now."""
        ready = _ready(self._peers, 0, 0)
        return " and ".join(
            str(peer)
            for peer in self._peers
            if not ready.isdisjoint({peer.socket.fileno(), peer.process})
        )


def _ready(peers: Iterable[Peer], event: int, seconds: float) -> set[int]:
    """Return the files of those peers that have ended, left, or caused the `event`; wait so long for the first."""
    poll = select.poll()
    for peer in peers:
        poll.register(peer.socket, event)
        poll.register(peer.process, select.POLLIN)
    return {file for file, _ in poll.poll(seconds * 1000)}
