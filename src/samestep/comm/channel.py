"""Two TCP connections for each pair of workers on different hosts: for tensors and for messages.

gloo cuts a tensor into messages with an acknowledgment each, and keeps all messages to a worker in
one queue, which its own thread handles. Here a thread writes tensors while another one reads into
place, and a small message neither waits behind megabytes nor for a thread.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import wait
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

from samestep.comm.admission import connections_within, first_of_busiest, is_out_of_files
from samestep.comm.base import Arrival, SendSums, Share
from samestep.comm.link import to_bytes, to_text
from samestep.comm.signing import MAC_BYTES, sign, verified
from samestep.host import SLICE_SECONDS, RunningClock

Offer = tuple[str, int, str]  # address, port, and secret
Key = tuple[int, int]  # the number of a transfer, and of the tensor in it

SECRET_BYTES: Final = 32
HELLO_SECONDS: Final = 5.0  # maximum time for a process that connects to send its signed label
MOST_PENDING: Final = 256  # connections without one; one more closes the oldest of some address
FULL_SECONDS: Final = 0.1  # between attempts to accept without files
CONNECTIONS: Final = 2  # of a channel
LEAST_SECONDS: Final = 0.01  # 0 would mean not to wait at all
CLOSE_SECONDS: Final = 1.0  # maximum time to wait for each thread
NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
_LABEL: Final = struct.Struct("<II")
HELLO_BYTES: Final = MAC_BYTES + _LABEL.size
_HEAD: Final = struct.Struct("<QQQ")  # the key and the number of bytes that follow
_SIZE: Final = struct.Struct("<Q")  # of a message
_ROUND_TRIP: Final = struct.Struct("<68xI")  # tcpi_rtt of struct tcp_info in linux/tcp.h, µs
# A send buffer for what such a network sends in a round trip; the kernel doubles it. With a larger
# one, other messages wait longer, and TCP slows down.
NETWORK_BYTES_A_SECOND: Final = 1.25e9
LEAST_BUFFER_BYTES: Final = 128 << 10
MOST_BUFFER_BYTES: Final = 208 << 10  # the default of net.core.wmem_max on Linux


@dataclass
class _Hello:
    """What a connection has sent so far, and until when it must have sent everything."""

    address: str
    end: float  # time.monotonic()
    data: bytes = b""


class Listener:
    """Accepts connections of processes that know its `secret`; a context manager.

    Others may stay silent: none of them delays a worker. At most `MOST_PENDING` are waited for.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        self._socket.setblocking(False)
        self.address, self.port = address, int(self._socket.getsockname()[1])
        self.secret = os.urandom(SECRET_BYTES)
        self._pending: dict[socket.socket, _Hello] = {}  # oldest first

    @property
    def offer(self) -> Offer:
        """What others need to connect: JSON."""
        return self.address, self.port, to_text(self.secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for connection in list(self._pending):
            self._drop(connection)

    def accept(self, seconds: float) -> tuple[socket.socket, tuple[int, int]]:
        """Return a connection and its label.

        Raises `TimeoutError` after `seconds`, or another `OSError`.
        """
        deadline = time.monotonic() + seconds
        while (now := time.monotonic()) < deadline:
            for connection in [each for each, hello in self._pending.items() if hello.end < now]:
                self._drop(connection)
            seconds = min(HELLO_SECONDS, deadline - now)
            ready: Any = set(wait([self._socket, *self._pending], seconds))
            for connection in ready - {self._socket}:
                if (label := self._label(connection)) is not None:
                    return connection, label
            if self._socket in ready:
                self._admit()
        raise TimeoutError("timed out waiting for other workers to connect")

    def _admit(self) -> None:
        try:
            connection, address = self._socket.accept()
        except BlockingIOError:
            return  # it has gone
        except OSError as error:
            if not is_out_of_files(error):
                raise
            time.sleep(FULL_SECONDS)
        else:
            connection.setblocking(False)
            self._pending[connection] = _Hello(address[0], time.monotonic() + HELLO_SECONDS)
        if len(self._pending) > connections_within(MOST_PENDING):
            addresses = {each: hello.address for each, hello in self._pending.items()}
            self._drop(first_of_busiest(addresses))

    def _label(self, connection: socket.socket) -> tuple[int, int] | None:
        """Return the label of a connection if its hello has arrived; drop it if that is wrong."""
        hello, data = self._pending[connection], b""
        with suppress(OSError):  # of another program
            data = connection.recv(HELLO_BYTES - len(hello.data))
        hello.data += data
        if data and len(hello.data) < HELLO_BYTES:
            return None
        label = verified(self.secret, "label", hello.data)
        if label is None:
            self._drop(connection)
            return None
        del self._pending[connection]
        first, second = _LABEL.unpack(label)
        return first, second

    def _drop(self, connection: socket.socket) -> None:
        del self._pending[connection]
        connection.close()


def connect(
    address: str, port: int, secret: bytes, label: tuple[int, int], seconds: float
) -> socket.socket:
    """Connect to a `Listener`, which gets the label. Raises `OSError`."""
    connection = socket.create_connection((address, port), seconds)
    try:
        connection.sendall(sign(secret, "label", _LABEL.pack(*label)))
    except BaseException:
        connection.close()
        raise
    return connection


def connect_partners(
    rank: int,
    partners: Sequence[int],
    offers: Sequence[Offer],
    listener: Listener | None,
    seconds: float,
) -> dict[int, Channel]:
    """Return worker `rank`'s channel to each partner: it connects to lower ranks, which listen.

    `offers` are those of the workers' listeners, by rank. Raises `OSError`.
    """
    deadline = time.monotonic() + seconds

    def remaining() -> float:
        return max(deadline - time.monotonic(), LEAST_SECONDS)

    connections: dict[tuple[int, int], socket.socket] = {}  # by partner and number
    with ExitStack() as unused:
        for partner, number in product(partners, range(CONNECTIONS)):
            if partner < rank:
                address, port, secret = offers[partner]
                label = rank, number
                connection = connect(address, port, to_bytes(secret), label, remaining())
                connections[partner, number] = unused.enter_context(connection)
        while listener is not None and len(connections) < CONNECTIONS * len(partners):
            connection, label = listener.accept(remaining())
            connections[label] = unused.enter_context(connection)
        channels = {
            partner: Channel(connections[partner, 0], connections[partner, 1])
            for partner in partners
        }
        unused.pop_all()  # channels close them from now on
    return channels


@dataclass(eq=False)
class Transfer:
    """A tensor that is sent or received; then the thread that did so calls `then`."""

    key: Key
    data: memoryview
    then: Callable[[], None] | None = None
    is_done: bool = False


Queue = SimpleQueue[Transfer | None]


class Channel:
    """Sends tensors over a connection, in order, and receives those of the other end by key.

    Another connection carries messages. One thread may wait for either. After an error, what is not
    done yet will never be. A tensor that arrives before it is awaited delays those behind it.
    """

    def __init__(self, connection: socket.socket, messages: socket.socket) -> None:
        for stream in (connection, messages):
            stream.settimeout(None)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_buffer(connection)
        self._connection, self._messages = connection, messages
        self._process = os.getpid()
        self._active_at = 0.0  # time.monotonic() when a tensor was last queued, sent or received
        self._changed = Condition()  # also guards the next two
        self._failure: Exception | None = None
        self._awaited: Transfer | None = None
        self._outgoing: Queue = SimpleQueue()
        self._posted: Queue = SimpleQueue()
        self._expected: dict[Key, Transfer] = {}  # of what was posted
        self._threads: list[Thread] = []  # started with the first tensor

    def send(self, key: Key, tensor: Tensor) -> Transfer:
        """Queue a 1-D CPU tensor, which must stay as it is until it is sent."""
        return self._add(self._outgoing, key, tensor)

    def receive(self, key: Key, tensor: Tensor, then: Callable[[], None] | None = None) -> Transfer:
        """Receive into a 1-D CPU tensor what the other end sends with this key."""
        return self._add(self._posted, key, tensor, then)

    def wait(self, transfer: Transfer, seconds: float, since: float = 0.0) -> None:
        """Wait until a tensor was sent or received.

        Raises the channel's error, or `TimeoutError` if nothing was queued, sent or received for
        `seconds` after `since`, in seconds of `time.monotonic`.
        """
        if transfer.is_done:
            return
        clock = RunningClock()
        since = max(since, time.monotonic())  # it may have been suspended before
        with self._changed:
            self._awaited = transfer
            while not (transfer.is_done or self._failure):
                clock.now()
                begun = max(self._active_at, since, clock.resumed_at)
                remaining = begun + seconds - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError("the other worker sent or received nothing")
                self._changed.wait(min(remaining, SLICE_SECONDS))
            self._awaited = None
        if not transfer.is_done:
            assert self._failure is not None  # noqa: S101
            raise self._failure

    def send_message(self, data: Tensor) -> None:
        """Send bytes: few enough for the kernel to take in, as the other end may do the same."""
        self._messages.sendall(_SIZE.pack(len(data)) + data.numpy().tobytes())

    def receive_message(self, data: Tensor, seconds: float) -> None:
        """Receive bytes. Raises `OSError` if the other end sent more or fewer, or nothing."""
        self._messages.settimeout(seconds)
        size = bytearray(_SIZE.size)
        _fill(self._messages, memoryview(size))
        _check(len(data), *_SIZE.unpack(size))
        array: Any = data.numpy()
        _fill(self._messages, memoryview(array))

    def close(self) -> None:
        """Disconnect, and end the threads. A forked process leaves the connection to its parent."""
        if os.getpid() == self._process:  # the other worker notices, even if a fork lives
            self._fail(ConnectionAbortedError("this worker has left the world"))
            with suppress(OSError):
                self._messages.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self._connection.close()
        self._messages.close()

    def _add(
        self, queue: Queue, key: Key, tensor: Tensor, then: Callable[[], None] | None = None
    ) -> Transfer:
        array: Any = tensor.detach().view(torch.uint8).numpy()  # uint8 [nbytes], the same memory
        transfer = Transfer(key, memoryview(array), then)
        self._active_at = time.monotonic()
        if not self._threads and self._failure is None:
            self._start()
        queue.put(transfer)
        return transfer

    def _start(self) -> None:
        for name, *job in (
            ("sender", self._outgoing, self._send),
            ("receiver", self._posted, self._receive),
        ):
            thread = Thread(target=self._run, args=job, daemon=True, name=f"samestep {name}")
            self._threads.append(thread)
            thread.start()

    def _complete(self, transfer: Transfer) -> None:
        self._active_at = time.monotonic()
        with self._changed:
            transfer.is_done = True
            if transfer is self._awaited:
                self._changed.notify()
        if transfer.then is not None:
            transfer.then()

    def _fail(self, error: Exception) -> None:
        """Let everything fail, and wake all threads, whatever they wait for."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)  # ends the thread
        self._posted.put(None)

    def _run(self, queue: Queue, handle: Callable[[Transfer], None]) -> None:
        while (item := queue.get()) is not None:
            try:
                handle(item)
            except Exception as error:  # noqa: BLE001  the program gets it
                self._fail(error)
                return
            del item  # with its memory, before waiting for the next one

    def _send(self, transfer: Transfer) -> None:
        head = _HEAD.pack(*transfer.key, len(transfer.data))
        parts = [memoryview(head), transfer.data]
        while parts:
            sent = self._connection.sendmsg(parts, (), NO_SIGNAL)
            # the kernel may take in a part of the data, even of the head
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
        self._complete(transfer)

    def _receive(self, transfer: Transfer) -> None:
        """Receive tensors until none is expected, in the order in which the other end sends."""
        self._expected[transfer.key] = transfer
        head = bytearray(_HEAD.size)
        while self._expected:
            _fill(self._connection, memoryview(head))
            number, place, size = _HEAD.unpack(head)
            transfer = self._expected_as((number, place))
            _check(len(transfer.data), size)  # the ends might disagree on a shape
            _fill(self._connection, transfer.data)
            self._complete(transfer)
            del transfer  # with its memory, before waiting for the next one

    def _expected_as(self, key: Key) -> Transfer:
        """Return what waits for this key, if necessary when it is posted."""
        while key not in self._expected:
            item = self._posted.get()
            if item is None:
                raise ConnectionAbortedError("the connection was closed")
            self._expected[item.key] = item
        return self._expected.pop(key)


class Reduction:
    """Adds up a tensor over several workers in the background; each adds a `share` of it.

    It sends others what they add, by rank, and once it has received what it adds, the total.
    `number` is the same on all workers, and that of several `parts` of one sum.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        number: int,
        share: Share,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self._channels, self._share = channels, share
        self._number, self._part, self._parts = number, part, parts
        self._lock = Lock()
        self._is_sent = self._is_added = False
        self._sending: list[tuple[Channel, Transfer]] = []
        # place 0 is for totals, places from 1 on are for the sums that make them up
        self._sums = [
            (channel, channel.receive(self._key(place), partner_sum, self._add_if_complete))
            for rank, channel in channels.items()
            for place, partner_sum in enumerate(share.received[rank], start=1)
        ]
        self._arriving = [
            (channel, channel.receive(self._key(0), share.totals[rank]))
            for rank, channel in channels.items()
        ]

    def _key(self, place: int) -> Key:
        return self._number, place * self._parts + self._part

    def send(self, sums: Mapping[int, Sequence[Tensor]]) -> None:
        """Send sums, which must stay as they are, by the rank of the worker that adds them."""
        self._sending = [
            (channel, channel.send(self._key(place), own_sum))
            for rank, channel in self._channels.items()
            for place, own_sum in enumerate(sums[rank], start=1)
        ]
        self._is_sent = True
        self._add_if_complete()

    def _add_if_complete(self) -> None:
        with self._lock:
            if self._is_added or not (self._is_sent and _are_done(self._sums)):
                return
            self._is_added = True  # even if it fails: parts may be added by then
            self._share.add()
            self._sending += [
                (channel, channel.send(self._key(0), self._share.total))
                for channel in self._channels.values()
            ]

    def is_done(self) -> bool:
        """Return whether everything was received and sent."""
        return self._is_added and _are_done(self._arriving) and _are_done(self._sending)

    def wait(self, seconds: float) -> None:
        """Wait until everything was received and sent. Raises as `Channel.wait` does."""
        for channel, transfer in self._sums:
            channel.wait(transfer, seconds)
        self._add_if_complete()  # or wait for the thread that does so
        since = time.monotonic()  # a channel may have been idle while another worker was awaited
        for channel, transfer in [*self._arriving, *self._sending]:
            channel.wait(transfer, seconds, since)


@dataclass
class ChannelPartners:
    """Partners with a channel to each, by rank.

    `next_number` returns the number of a transfer, the same on all workers. `arrival` explains the
    errors of waiting for one.
    """

    channels: Mapping[int, Channel]
    next_number: Callable[[], int]
    arrival: Callable[[Callable[[float], None], Callable[[], bool], str], Arrival]

    def begin_sums(self, shares: Sequence[Share], what: str) -> SendSums:
        """Do what `Partners.begin_sums` says, with a `Reduction` for each tensor."""
        # one for all of them: workers in other places of a host may have more or fewer parts
        number = self.next_number()
        reductions = [
            Reduction(self.channels, number, share, part, len(shares))
            for part, share in enumerate(shares)
        ]

        def send(sums: Iterable[Mapping[int, Sequence[Tensor]]]) -> list[Arrival]:
            arrivals = []
            for reduction, sums_by_rank in zip(reductions, sums, strict=True):
                reduction.send(sums_by_rank)
                arrivals.append(self.arrival(reduction.wait, reduction.is_done, what))
            return arrivals

        return send


def _are_done(transfers: Sequence[tuple[Channel, Transfer]]) -> bool:
    return all(transfer.is_done for _, transfer in transfers)


def _fill(connection: socket.socket, data: memoryview) -> None:
    while data:
        received = connection.recv_into(data, len(data), socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("the other worker closed the connection")
        data = data[received:]


def _check(expected: int, got: int) -> None:
    if expected != got:
        raise ConnectionError(f"expected {expected} bytes, got {got}")


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
