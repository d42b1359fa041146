"""A TCP connection of two workers on different hosts, over which both send tensors at once.

gloo cuts a tensor into messages with an acknowledgment each, and keeps all messages to a worker in
one queue. Here a thread writes while another one reads into place, and small messages of other
connections need not wait behind megabytes.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

Key = tuple[int, int]  # the number of a swap, and of the tensor in it
Result = futures.Future[Exception | None]
Queue = SimpleQueue[tuple[Key, memoryview, Result] | None]

SECRET_BYTES: Final = 32
HELLO_SECONDS: Final = 5.0  # maximum time for a process that connects to send the secret
CLOSE_SECONDS: Final = 1.0  # maximum time to wait for each thread
NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
_HEAD: Final = struct.Struct("<QQQ")  # the key and the number of bytes that follow
_ROUND_TRIP: Final = struct.Struct("<68xI")  # tcpi_rtt of struct tcp_info in linux/tcp.h, µs
# A send buffer for what such a network sends in a round trip; the kernel doubles it. With a larger
# one, other messages wait longer, and TCP slows down.
NETWORK_BYTES_A_SECOND: Final = 1.25e9
LEAST_BUFFER_BYTES: Final = 128 << 10
MOST_BUFFER_BYTES: Final = 208 << 10  # the default of net.core.wmem_max on Linux


class Listener:
    """Accepts the connection of the one process that knows its `secret`; a context manager."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.address, self.port = address, int(self._socket.getsockname()[1])
        self.secret = os.urandom(SECRET_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def accept(self, seconds: float) -> socket.socket:
        """Return the connection. Raises `TimeoutError` after `seconds`, or another `OSError`."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            self._socket.settimeout(remaining)
            connection, _ = self._socket.accept()
            connection.settimeout(min(HELLO_SECONDS, remaining))
            with suppress(OSError):  # of another program, which is ignored
                found = b""
                missing = SECRET_BYTES
                while missing and (data := connection.recv(missing)):
                    found, missing = found + data, missing - len(data)
                if hmac.compare_digest(found, self.secret):
                    return connection
            connection.close()
        raise TimeoutError("timed out waiting for the other worker to connect")


def connect(address: str, port: int, secret: bytes, seconds: float) -> socket.socket:
    """Connect to a `Listener`. Raises `OSError`."""
    connection = socket.create_connection((address, port), seconds)
    try:
        connection.sendall(secret)
    except BaseException:
        connection.close()
        raise
    return connection


class Channel:
    """Sends tensors over a connection, in order, and receives those of the other end by key.

    Futures resolve to the first error, or None. After an error, all others resolve to it as well.
    A tensor that arrives before it is awaited delays those behind it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_buffer(connection)
        self._connection = connection
        self._active_at = 0.0  # time.monotonic() when a tensor was last queued, sent or received
        self._lock = Lock()  # for the next two
        self._failure: Exception | None = None
        self._pending: set[Result] = set()
        self._outgoing: Queue = SimpleQueue()
        self._posted: Queue = SimpleQueue()
        self._expected: dict[Key, tuple[memoryview, Result]] = {}  # of what was posted
        self._threads: list[Thread] = []  # started with the first tensor

    def send(self, key: Key, tensor: Tensor) -> Result:
        """Queue a 1-D CPU tensor, which must stay as it is until the result is there."""
        return self._add(self._outgoing, key, tensor)

    def receive(self, key: Key, tensor: Tensor) -> Result:
        """Receive into a 1-D CPU tensor what the other end sends with this key."""
        return self._add(self._posted, key, tensor)

    def wait(self, result: Result, seconds: float) -> None:
        """Wait for a result of `send` or `receive`.

        Raises its error, or `TimeoutError` if nothing was queued, sent or received for `seconds`.
        """
        while True:
            active_at = self._active_at
            try:
                failure = result.result(max(0.0, active_at + seconds - time.monotonic()))
                break
            except futures.TimeoutError:  # not the built-in one before Python 3.11
                if self._active_at == active_at:
                    raise TimeoutError("the other worker sent or received nothing") from None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Disconnect, and end the threads. A forked process leaves the connection to its parent."""
        if any(thread.is_alive() for thread in self._threads):
            self._fail(ConnectionAbortedError("this worker has left the world"))
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self._connection.close()

    def _add(self, queue: Queue, key: Key, tensor: Tensor) -> Result:
        result: Result = futures.Future()
        array: Any = tensor.detach().view(torch.uint8).numpy()
        self._active_at = time.monotonic()
        with self._lock:
            if self._failure is None:
                if not self._threads:
                    self._start()
                self._pending.add(result)
                queue.put((key, memoryview(array), result))
                return result
        result.set_result(self._failure)
        return result

    def _start(self) -> None:
        for name, queue, handle in (
            ("sender", self._outgoing, self._send),
            ("receiver", self._posted, self._receive),
        ):
            arguments = queue, handle
            thread = Thread(target=self._run, args=arguments, daemon=True, name=f"samestep {name}")
            self._threads.append(thread)
            thread.start()

    def _complete(self, result: Result) -> None:
        self._active_at = time.monotonic()
        with self._lock:
            is_pending = result in self._pending
            self._pending.discard(result)
        if is_pending:
            result.set_result(None)

    def _fail(self, error: Exception) -> None:
        """Let everything fail, and wake both threads, whatever they wait for."""
        with self._lock:
            self._failure = self._failure or error
            pending, self._pending = self._pending, set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)
        self._posted.put(None)
        for result in pending:
            result.set_result(self._failure)

    def _run(self, queue: Queue, handle: Callable[[Key, memoryview, Result], None]) -> None:
        while (item := queue.get()) is not None:
            try:
                handle(*item)
            except Exception as error:  # noqa: BLE001  the program gets it
                self._fail(error)
                return
            del item  # with its memory, before waiting for the next one

    def _send(self, key: Key, data: memoryview, result: Result) -> None:
        parts = [memoryview(_HEAD.pack(*key, len(data))), data]
        while parts:
            sent = self._connection.sendmsg(parts, (), NO_SIGNAL)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
        self._complete(result)

    def _receive(self, key: Key, data: memoryview, result: Result) -> None:
        """Receive tensors until none is expected, in the order in which the other end sends."""
        self._expected[key] = data, result
        head = bytearray(_HEAD.size)
        while self._expected:
            self._fill(memoryview(head))
            number, place, size = _HEAD.unpack(head)
            data, result = self._expected_as((number, place))
            if len(data) != size:
                raise ConnectionError(f"expected a tensor of {len(data)} bytes, got {size}")
            self._fill(data)
            del data  # its memory, before waiting for the next one
            self._complete(result)

    def _expected_as(self, key: Key) -> tuple[memoryview, Result]:
        """Return what waits for this key, if necessary when it is posted."""
        while key not in self._expected:
            item = self._posted.get()
            if item is None:
                raise ConnectionAbortedError("the connection was closed")
            self._expected[item[0]] = item[1:]
        return self._expected.pop(key)

    def _fill(self, data: memoryview) -> None:
        while data:
            received = self._connection.recv_into(data, len(data), socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError("the other worker closed the connection")
            data = data[received:]


def limit_buffer(connection: socket.socket) -> None:
    """Let the kernel take in no more than a network of 10 Gbit/s needs, if so little is enough.

    A longer round trip needs more than an unprivileged process may ask for, so the kernel's own
    choice remains.
    """
    if not hasattr(socket, "TCP_INFO"):  # Linux alone measures round trips
        return
    with suppress(OSError, struct.error):  # in some sandboxes
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
        (microseconds,) = _ROUND_TRIP.unpack(information)
        needed = int(NETWORK_BYTES_A_SECOND * microseconds * 1e-6)
        if needed <= 2 * MOST_BUFFER_BYTES:
            size = min(max(needed, LEAST_BUFFER_BYTES), MOST_BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
