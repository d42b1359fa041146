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
from threading import Thread
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

Key = tuple[int, int]  # the number of a swap, and of the tensor in it
Result = futures.Future[Exception | None]

KEY_BYTES: Final = 32
HELLO_SECONDS: Final = 5.0  # for a process that connects to say who it is
CLOSE_SECONDS: Final = 1.0  # maximum time to wait for each thread
_HEAD: Final = struct.Struct("<QQQ")  # the key and the number of bytes that follow
_ROUND_TRIP: Final = struct.Struct("<68xI")  # tcpi_rtt of struct tcp_info in linux/tcp.h, µs
# The kernel takes as much as the fastest usual network sends in a round trip, and doubles it. More
# would only make other messages wait, and TCP slows down when it has taken in more than it can send
NETWORK_BYTES_A_SECOND: Final = 1.25e9
LEAST_BUFFER_BYTES: Final = 128 << 10
MOST_BUFFER_BYTES: Final = 208 << 10  # Linux' default of net.core.wmem_max


class Listener:
    """Accepts the connection of the one process that knows its `key`; a context manager."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.address, self.port = address, int(self._socket.getsockname()[1])
        self.key = os.urandom(KEY_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def accept(self, seconds: float) -> socket.socket:
        """Return the connection. Raises `TimeoutError` after `seconds`, or another `OSError`."""
        deadline = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            connection, _ = self._socket.accept()
            connection.settimeout(HELLO_SECONDS)
            with suppress(OSError):  # a stranger's
                hello = connection.recv(KEY_BYTES, socket.MSG_WAITALL)
                if hmac.compare_digest(hello, self.key):
                    return connection
            connection.close()


def connect(address: str, port: int, key: bytes, seconds: float) -> socket.socket:
    """Connect to a `Listener`. Raises `OSError`."""
    connection = socket.create_connection((address, port), seconds)
    connection.sendall(key)
    return connection


class Channel:
    """Sends tensors over a connection, in order, and receives those of the other end by key.

    Futures resolve to the first error, or None. After an error, all others resolve to it as well.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_buffer(connection)
        self._connection = connection
        self._failure: Exception | None = None
        self._outgoing: SimpleQueue[tuple[Key, Tensor, Result] | None] = SimpleQueue()
        self._posted: SimpleQueue[tuple[Key, Tensor, Result] | None] = SimpleQueue()
        self._expected: dict[Key, tuple[Tensor, Result]] = {}
        self._threads = [
            Thread(target=self._run, args=(queue, handle), daemon=True, name=f"samestep {name}")
            for name, queue, handle in (
                ("sender", self._outgoing, self._send),
                ("receiver", self._posted, self._receive),
            )
        ]
        for thread in self._threads:
            thread.start()

    def send(self, key: Key, tensor: Tensor) -> Result:
        """Queue a 1-D CPU tensor, which must stay as it is until the result is there."""
        result: Result = futures.Future()
        self._outgoing.put((key, tensor, result))
        return result

    def receive(self, key: Key, tensor: Tensor) -> Result:
        """Receive into a 1-D CPU tensor what the other end sends with this key."""
        result: Result = futures.Future()
        self._posted.put((key, tensor, result))
        return result

    def close(self) -> None:
        """Disconnect, and end the threads."""
        self._disconnect()
        self._outgoing.put(None)
        self._posted.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self._connection.close()

    def _disconnect(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _run(
        self,
        queue: SimpleQueue[tuple[Key, Tensor, Result] | None],
        handle: Callable[[Key, Tensor, Result], None],
    ) -> None:
        """Handle what is queued until `close`, or resolve it to the failure."""
        while (item := queue.get()) is not None:
            try:
                if self._failure is None:
                    handle(*item)
            except Exception as error:  # noqa: BLE001  the program gets it
                self._failure = self._failure or error
                self._disconnect()  # so that the other thread fails as well
            if self._failure is not None:
                waiting = [item[2]]
                if queue is self._posted:
                    waiting += [result for _, result in self._expected.values()]
                    self._expected.clear()
                for result in waiting:
                    if not result.done():
                        result.set_result(self._failure)
                del waiting
            del item  # with its memory, before waiting for the next one

    def _send(self, key: Key, tensor: Tensor, result: Result) -> None:
        data = _memory(tensor)
        # in the same packet as what follows
        self._connection.sendall(_HEAD.pack(*key, len(data)), socket.MSG_MORE if data else 0)
        self._connection.sendall(data)
        result.set_result(None)

    def _receive(self, key: Key, tensor: Tensor, result: Result) -> None:
        """Receive tensors until none is expected, in the order in which the other end sends."""
        self._expected[key] = tensor, result
        head = bytearray(_HEAD.size)
        while self._expected:
            self._fill(memoryview(head))
            *found, size = _HEAD.unpack(head)
            tensor, result = self._expected_as((found[0], found[1]))
            data = _memory(tensor)
            if len(data) != size:
                raise ConnectionError(f"expected a tensor of {len(data)} bytes, got {size}")
            self._fill(data)
            result.set_result(None)

    def _expected_as(self, key: Key) -> tuple[Tensor, Result]:
        """Return what waits for this key, if necessary when it is posted."""
        while key not in self._expected:
            item = self._posted.get()
            if item is None:
                raise ConnectionAbortedError("this worker has left the world")
            self._expected[item[0]] = item[1:]
        return self._expected.pop(key)

    def _fill(self, data: memoryview) -> None:
        while data:
            received = self._connection.recv_into(data, len(data), socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError("the other worker closed the connection")
            data = data[received:]


def await_result(result: Result, seconds: float) -> None:
    """Wait for the result of a channel. Raises its error, or `TimeoutError` after `seconds`."""
    try:
        failure = result.result(max(0.0, seconds))
    except futures.TimeoutError:  # not the built-in one before Python 3.11
        raise TimeoutError("the other worker did not send or receive in time") from None
    if failure is not None:
        raise failure


def limit_buffer(connection: socket.socket) -> None:
    """Let the kernel take in no more than a network of 10 Gbit/s needs, if so little is enough.

    A longer round trip needs more than an unprivileged process may ask for, so the kernel's own
    choice remains.
    """
    if not hasattr(socket, "TCP_INFO"):  # only Linux says how long a round trip takes
        return
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    (microseconds,) = _ROUND_TRIP.unpack(information)
    needed = int(NETWORK_BYTES_A_SECOND * microseconds * 1e-6)
    if needed <= 2 * MOST_BUFFER_BYTES:
        size = min(max(needed, LEAST_BUFFER_BYTES), MOST_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


def _memory(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array)
