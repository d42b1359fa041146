"""Connections between the workers of one host, and the statuses that they share."""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from samestep.comm.status import FORMING, WorkerStatus, mismatched_calls, no_response, process_state
from samestep.host import SLICE_SECONDS, RunningClock, anonymous_memory, set_size

# of the largest message: a socket buffers several, so sending never blocks
MESSAGE_BYTES = 16 * 1024
WHAT_CHARACTERS = 200  # of `what`, at the start of every message
BUFFER_BYTES = MESSAGE_BYTES + 4 * WHAT_CHARACTERS + 1
SPIN_SECONDS: Final = 200e-6  # before sleeping: a wakeup takes tens of microseconds

Message = tuple[bytes, list[int]]  # with the files that it carried


@dataclass(frozen=True)
class MeshPeer:
    """Another worker. `pidfd` reports its exit: a process that it forked may keep `socket` open."""

    rank: int
    pid: int
    socket: socket.socket
    pidfd: int

    def __str__(self) -> str:
        stopped = ", which is stopped" if process_state(self.pid) == "stopped" else ""
        return f"worker {self.rank} (process {self.pid}{stopped})"

    def send(self, message: bytes, files: list[int]) -> None:
        """Send without waiting. Raises `OSError` if the peer is gone."""
        if files:
            socket.send_fds(self.socket, [message], files)
        else:
            self.socket.send(message)

    def receive(self, files: int) -> Message | None:
        """Return the next message, None if there is none yet. Raises `OSError` if disconnected."""
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
        """Disconnect; the peer notices even if a forked process still holds the socket."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        os.close(self.pidfd)


class Mesh:
    """The workers `ranks` of a host, each connected to every other. Calls are collective.

    In a call each worker sends one message to every other and waits for theirs, so no worker is
    ever more than one call ahead. It spins for a moment, yielding the core to other processes, then
    sleeps in the kernel: a longer busy wait would slow down the worker that it waits for. After a
    failure, all further calls fail immediately, because messages of the failed call may remain.
    Calls raise `WorldError` if a worker has exited, does not arrive in time, or makes another call.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        peers: Sequence[MeshPeer],
        timeout_seconds: float,
        status: WorkerStatus | None = None,
    ) -> None:
        for peer in peers:
            peer.socket.settimeout(0)  # never block in one: `_receive` polls all of them
        self.rank, self.ranks = rank, ranks
        self._peers = peers
        self._timeout_seconds = timeout_seconds
        self._status = status or WorkerStatus(rank)
        self._last = FORMING  # the last completed call
        self._failure = ""

    def swap(self, messages: Mapping[int, bytes], what: str) -> dict[int, bytes]:
        """Send each other worker its message of at most `MESSAGE_BYTES`; return theirs by rank."""
        return {rank: message for rank, (message, _) in self._swap(messages, [], what).items()}

    def barrier(self, what: str) -> None:
        """Return when every worker has arrived."""
        self._swap(dict.fromkeys(self.ranks, b""), [], what)

    def swap_files(self, file: int, what: str) -> dict[int, int]:
        """Send each other worker an open file; return theirs by rank, for this worker to close."""
        received = self._swap(dict.fromkeys(self.ranks, b""), [file], what)
        return {rank: files[0] for rank, (_, files) in received.items()}

    def close(self) -> None:
        """Disconnect; the others notice in their next call."""
        self._failure = "this worker has left the world"
        for peer in self._peers:
            peer.close()
        self._peers = []

    def _swap(
        self, messages: Mapping[int, bytes], files: list[int], what: str
    ) -> dict[int, Message]:
        if self._failure:
            raise no_response(self.rank, what, self._failure)
        # until this call succeeds: a signal handler may also interrupt it
        self._failure = f"an earlier call failed, while {what}"
        head = what[:WHAT_CHARACTERS].encode() + b"\0"
        with self._status.waiting(what):
            try:
                for peer in self._peers:  # all, before waiting for any
                    peer.send(head + messages[peer.rank], files)
                received = self._receive(len(files))
            except OSError as error:
                timed_out = isinstance(error, TimeoutError)
                reason = str(error) if timed_out else f"lost connection: {self._gone()}"
                self._failure = f"{reason}; last completed call: {self._last}"
                raise self._status.explain(what, self._failure, timed_out=timed_out) from None
        for rank, (message, _) in received.items():
            if not message.startswith(head):
                other = message.partition(b"\0")[0].decode(errors="replace")
                raise mismatched_calls(self.rank, what, rank, other)
        self._last, self._failure = what, ""
        return {rank: (message[len(head) :], fds) for rank, (message, fds) in received.items()}

    def _receive(self, files: int) -> dict[int, Message]:
        """Return every peer's next message. Raises `OSError`, `TimeoutError` in particular."""
        received: dict[int, Message] = {}
        missing = {peer.rank: peer for peer in self._peers}
        clock = RunningClock()
        deadline = clock.now() + self._timeout_seconds
        ready: set[int] = set()
        while True:
            for rank, peer in list(missing.items()):
                message = peer.receive(files)
                if message is not None:
                    received[rank] = message
                    del missing[rank]
                elif peer.pidfd in ready:  # it exited without this call's message
                    raise ConnectionResetError
            if not missing:
                return received
            remaining = deadline - clock.now()
            if self._timeout_seconds - remaining < SPIN_SECONDS:
                os.sched_yield()
                continue
            seconds = min(max(0.0, remaining), SLICE_SECONDS)
            ready = _ready(missing.values(), select.POLLIN, seconds)
            if not ready and clock.now() >= deadline:
                who = " and ".join(map(str, missing.values()))
                raise TimeoutError(f"timed out after {self._timeout_seconds:g} s waiting for {who}")

    def _gone(self) -> str:
        ready = _ready(self._peers, 0, 0)
        gone = (p for p in self._peers if not ready.isdisjoint({p.socket.fileno(), p.pidfd}))
        return " and ".join(map(str, gone))


def _ready(peers: Iterable[MeshPeer], event: int, seconds: float) -> set[int]:
    """Wait for an exit, a disconnect or the `event`; return the file descriptors of those peers."""
    poll = select.poll()
    for peer in peers:
        poll.register(peer.socket, event)
        poll.register(peer.pidfd, select.POLLIN)
    return {file for file, _ in poll.poll(seconds * 1000)}


SLOT_BYTES: Final = 16 * 1024
BOARD_WORKERS: Final = 64  # at most: the statuses of a board are one message to the store
BOARD_BYTES: Final = (BOARD_WORKERS + 4) * SLOT_BYTES  # whole pages of any size
LEFT_AT: Final = -1.0  # when a worker that has left wrote its slot; 0 is never
_SLOT: Final = struct.Struct("<dII")  # monotonic time; bytes and checksum of the JSON that follows


class StatusBoard:
    """The newest status of each worker in `ranks`, of one host, in memory that they share.

    So that a store gets one message per host, only one worker publishes them: the first whose
    status is recent. Each worker writes its own slot; one more slot is for news from the store.
    """

    def __init__(
        self, rank: int, ranks: range, memory: Any = None, file: int | None = None
    ) -> None:
        """Without `memory` that others share, the worker is alone on its board.

        `file` is the memory of all boards of the host, to be closed by this worker.
        """
        self._file = file
        self.rank, self.ranks = rank, ranks if memory is not None else range(rank, rank + 1)
        # slot 0 has news, slot 1 + n the status of the nth worker: uint8 [slots, SLOT_BYTES]
        self._memory = bytearray(2 * SLOT_BYTES) if memory is None else memory
        self._latest: dict[int, dict[str, Any]] = {}  # what was last read, by slot
        self._opened_at = time.monotonic()

    @classmethod
    def open(
        cls, rank: int, host: range, pid: int, file: int | None, own_file: int | None
    ) -> StatusBoard:
        """Open the board in memory that process `pid`, the first of the host, opened as `file`.

        `own_file` is that of this process, None unless it is the first.
        """
        number = (rank - host.start) // BOARD_WORKERS  # large hosts have several boards
        ranks, memory = boards([host])[number], None
        if file is not None and len(ranks) > 1:
            # a process may have exited, or may not be inspected
            with suppress(OSError, ValueError):
                other = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
                try:
                    memory = mmap.mmap(other, BOARD_BYTES, offset=number * BOARD_BYTES)
                finally:
                    os.close(other)
        return cls(rank, ranks, memory, own_file)

    def close(self) -> None:
        """Close the memory, which the others keep."""
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write(self, status: Mapping[str, Any], *, left: bool = False) -> None:
        """Write this worker's status; one that `left` publishes no more."""
        self._write(1 + self.rank - self.ranks.start, status, LEFT_AT if left else time.monotonic())

    def write_news(self, news: Mapping[str, Any]) -> None:
        """Add to what the workers of the host know from the store."""
        self._write(0, {**self.news(), **news}, time.monotonic())

    def news(self) -> dict[str, Any]:
        """Return what the workers of the host know from the store."""
        return self._read(0) or {}

    def statuses(self) -> list[dict[str, Any]]:
        """Return all statuses that were written."""
        statuses = (self._read(1 + number) for number in range(len(self.ranks)))
        return [status for status in statuses if status is not None]

    def publishes(self, seconds: float) -> bool:
        """Return whether this worker publishes: no lower rank has written for `seconds`."""
        now, lower = time.monotonic(), range(self.rank - self.ranks.start)
        if now - self._opened_at < seconds and not any(map(self._written_at, lower)):
            return not lower  # the others may not have started
        return all(now - self._written_at(number) > seconds for number in lower)

    def _written_at(self, number: int) -> float:
        at: float = _SLOT.unpack_from(self._memory, (1 + number) * SLOT_BYTES)[0]
        return at

    def _write(self, slot: int, value: Mapping[str, Any], at: float) -> None:
        data = json.dumps(value).encode()
        if len(data) <= SLOT_BYTES - _SLOT.size:
            start = slot * SLOT_BYTES
            head = _SLOT.pack(at, len(data), zlib.crc32(data))
            self._memory[start : start + _SLOT.size + len(data)] = head + data

    def _read(self, slot: int) -> dict[str, Any] | None:
        """Return a slot's value, the previous one while it is being written."""
        start = slot * SLOT_BYTES
        _, length, checksum = _SLOT.unpack_from(self._memory, start)
        data = bytes(self._memory[start + _SLOT.size : start + _SLOT.size + length])
        if length and zlib.crc32(data) == checksum:
            self._latest[slot] = json.loads(data)
        return self._latest.get(slot)


def create_boards(workers: int) -> int | None:
    """Return a file in memory for the boards of a host's workers, None if it is not possible."""
    file = anonymous_memory("samestep-status")
    if file is not None:
        set_size(file, -(-workers // BOARD_WORKERS) * BOARD_BYTES)
    return file


def boards(hosts: Iterable[range]) -> list[range]:
    """Return the ranks of each status board of these hosts."""
    return [
        range(start, min(start + BOARD_WORKERS, host.stop))
        for host in hosts
        for start in range(host.start, host.stop, BOARD_WORKERS)
    ]
