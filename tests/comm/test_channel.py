"""A connection of two workers that sends tensors both ways, with real sockets."""

import os
import random
import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack
from itertools import combinations

import pytest
import torch

from samestep.comm import admission
from samestep.comm import channel as module
from samestep.comm.base import Share
from samestep.comm.channel import Channel, Listener, Reduction, connect, limit_buffer
from samestep.comm.distributed import MESSAGE_BYTES

LARGE = 1 << 22  # bytes, more than both kernels take in
SECONDS = 60


@pytest.fixture
def channels():
    connections = []
    for _ in range(2):
        with Listener("127.0.0.1") as listener:
            first = connect(listener.address, listener.port, listener.secret, (3, 1), SECONDS)
            connections.append((first, listener.accept(SECONDS)[0]))
    pair = [Channel(*sockets) for sockets in zip(*connections, strict=True)]
    yield pair
    for channel in pair:
        channel.close()


def values(number, elements=LARGE // 4, dtype=torch.float32):
    return torch.arange(elements).add(number).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("elements", [0, 1, LARGE // 4])
def test_tensors_are_received_by_key_in_whatever_order_they_are_awaited(channels, elements, dtype):
    """A worker may await tensors of a step that failed before it sent them."""
    keys = [(1, 0), (1, 1), (2, 0), (3, 0)]
    awaited = [keys[3], keys[0], keys[2], keys[1]]
    received = [{key: torch.full((elements,), -1.0).to(dtype) for key in awaited} for _ in channels]
    transfers = [
        (channel, channel.receive(key, into[key]))
        for channel, into in zip(channels, received, strict=True)
        for key in awaited
    ]
    for which, channel in enumerate(channels):
        transfers += [
            (channel, channel.send(key, values(10 * which + n, elements, dtype)))
            for n, key in enumerate(keys)
        ]
    for channel, transfer in transfers:
        channel.wait(transfer, SECONDS)
    for which, into in enumerate(received):
        for n, key in enumerate(keys):
            assert torch.equal(into[key], values(10 * (1 - which) + n, elements, dtype))


def test_a_tensor_that_is_not_awaited_yet_is_received_later(channels):
    first, second = channels
    sending = [first.send((1, 0), values(5)), first.send((2, 0), values(6))]
    awaited = torch.zeros(LARGE // 4)
    last = second.receive((2, 0), awaited)
    time.sleep(0.1)
    assert not last.is_done  # the first one is in its way
    earlier = torch.zeros(LARGE // 4)
    second.wait(second.receive((1, 0), earlier), SECONDS)
    second.wait(last, SECONDS)
    for transfer in sending:
        first.wait(transfer, SECONDS)
    assert torch.equal(earlier, values(5))
    assert torch.equal(awaited, values(6))


@pytest.mark.parametrize("is_sending", [True, False])
def test_everything_fails_once_the_other_worker_has_left(channels, is_sending):
    first, second = channels
    transfers = [first.receive((number, 0), torch.zeros(LARGE // 4)) for number in range(2)]
    if is_sending:  # more than the kernel takes in
        transfers += [first.send((number, 0), torch.zeros(LARGE)) for number in range(2)]
    second.close()
    transfers.append(first.receive((9, 0), torch.zeros(1)))
    for transfer in transfers:
        with pytest.raises(OSError, match=r"closed|reset|Broken|[Cc]onnection"):
            first.wait(transfer, SECONDS)


def test_a_worker_that_leaves_is_noticed_although_its_child_lives(channels):
    first, second = channels
    child = os.fork()
    if not child:
        second.close()  # changes nothing for its parent
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        first.send_message(torch.ones(1, dtype=torch.uint8))
        second.receive_message(torch.zeros(1, dtype=torch.uint8), SECONDS)
        second.close()
        with pytest.raises(ConnectionError):
            first.receive_message(torch.zeros(1, dtype=torch.uint8), SECONDS)
        with pytest.raises(OSError, match=r"closed|reset|Broken|[Cc]onnection"):
            first.wait(first.receive((1, 0), torch.zeros(1)), SECONDS)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_tensor_of_another_size_is_an_error(channels):
    first, second = channels
    second.send((1, 0), torch.zeros(3))
    transfers = [first.receive((number, 0), torch.zeros(4)) for number in (2, 1, 3)]
    for transfer in transfers:
        with pytest.raises(ConnectionError, match="expected 16 bytes, got 12"):
            first.wait(transfer, SECONDS)


@pytest.mark.parametrize("size", [0, 1, MESSAGE_BYTES])
def test_both_ends_send_a_message_before_they_receive_one(channels, size):
    for number, channel in enumerate(channels):
        for data in (number, 2 + number):
            channel.send_message(torch.full((size,), data, dtype=torch.uint8))
    for number, channel in enumerate(channels):
        for data in (1 - number, 3 - number):
            received = torch.full((size,), 9, dtype=torch.uint8)
            channel.receive_message(received, SECONDS)
            assert (received == data).all()


def test_a_message_of_another_size_is_an_error(channels):
    first, second = channels
    first.send_message(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ConnectionError, match="expected 4 bytes, got 3"):
        second.receive_message(torch.zeros(4, dtype=torch.uint8), SECONDS)


def test_waiting_for_a_message_ends_with_the_limit_or_the_other_worker(channels):
    first, second = channels
    message = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(TimeoutError):
        first.receive_message(message, 0.1)
    second.close()
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        first.receive_message(message, SECONDS)


def test_waiting_has_a_limit(channels):
    first, second = channels
    started = time.monotonic()
    awaited = first.receive((1, 0), torch.zeros(1))
    with pytest.raises(TimeoutError, match="sent or received nothing"):
        first.wait(awaited, 0.2)
    assert time.monotonic() - started >= 0.2
    second.send((1, 0), torch.zeros(1))
    first.wait(awaited, SECONDS)


@pytest.mark.long
def test_the_limit_counts_from_the_last_tensor(channels):
    first, second = channels
    started = time.monotonic()
    awaited = [first.receive((number, 0), torch.zeros(1)) for number in range(7)]

    def send():
        for number in range(7):
            time.sleep(1)
            second.send((number, 0), torch.zeros(1))

    thread = threading.Thread(target=send)
    thread.start()
    first.wait(awaited[-1], 6)
    assert time.monotonic() - started > 6
    thread.join()


@pytest.mark.parametrize("arrives_early", [False, True])
def test_closing_ends_both_threads_while_they_wait(channels, arrives_early):
    first, second = channels
    transfers = [first.send((1, 0), torch.zeros(LARGE)), first.receive((1, 0), torch.zeros(1))]
    if arrives_early:  # the receiver then waits until it is awaited
        second.send((7, 0), torch.zeros(1))
        while first._posted.qsize() or not first._expected:
            time.sleep(0.01)
        time.sleep(0.1)
    first.close()
    for transfer in transfers:
        with pytest.raises(OSError):  # noqa: PT011  whatever the kernel says
            first.wait(transfer, SECONDS)
    assert not any(thread.is_alive() for thread in first._threads)


def test_only_the_process_with_the_key_is_accepted(monkeypatch):
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.2)
    with Listener("127.0.0.1") as listener:
        strangers = [socket.create_connection((listener.address, listener.port)) for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        strangers[1].close()  # and one that says nothing
        acceptances = []
        thread = threading.Thread(target=lambda: acceptances.append(listener.accept(SECONDS)))
        thread.start()
        client = connect(listener.address, listener.port, listener.secret, (7, 1), SECONDS)
        thread.join(SECONDS)
        ((accepted, label),) = acceptances
        assert (accepted.getpeername(), label) == (client.getsockname(), (7, 1))
        with pytest.raises(TimeoutError):
            listener.accept(0.1)
        for connection in (*strangers, accepted, client):
            connection.close()


def test_silent_and_slow_strangers_do_not_delay_a_worker(monkeypatch):
    monkeypatch.setattr(module, "HELLO_SECONDS", 10 * SECONDS)  # that one of them could take
    with Listener("127.0.0.1") as listener, ExitStack() as exits:
        place, secret = (listener.address, listener.port), listener.secret
        strangers = [socket.create_connection(place) for _ in range(module.MOST_PENDING // 2)]
        for number, stranger in enumerate(map(exits.enter_context, strangers)):
            stranger.sendall(bytes(number % 3))
        ends = [connect(*place, secret, (1, number), SECONDS) for number in range(2)]
        strangers = [socket.create_connection(place) for _ in range(module.MOST_PENDING)]
        for stranger in map(exits.enter_context, strangers):
            stranger.sendall(bytes(module.HELLO_BYTES - 1))
        accepted = [listener.accept(SECONDS) for _ in ends]
        assert {label for _, label in accepted} == {(1, 0), (1, 1)}
        assert len(listener._pending) <= module.MOST_PENDING
        for connection in (*ends, *(connection for connection, _ in accepted)):
            connection.close()


def test_a_listener_without_files_says_so_once_and_goes_on(monkeypatch):
    lines = []
    monkeypatch.setattr(admission, "_told_at", [float("-inf")])
    monkeypatch.setattr(admission, "log", lines.append)
    with Listener("127.0.0.1") as listener:
        client = connect(listener.address, listener.port, listener.secret, (1, 0), SECONDS)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for _ in range(3):
                listener._admit()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert lines == [
            "new connections wait: this process has opened all of its 3 files (ulimit -n)"
        ]
        connection, label = listener.accept(SECONDS)
        assert label == (1, 0)
        connection.close()
        client.close()


@pytest.fixture
def meshed():
    """Return the channels of three workers by rank, each by the rank of the other one."""
    by_rank = {rank: {} for rank in range(3)}
    with Listener("127.0.0.1") as listener:
        for low, high in combinations(range(3), 2):
            ends = []
            for number in range(2):
                client = connect(
                    listener.address, listener.port, listener.secret, (low, number), SECONDS
                )
                ends.append((client, listener.accept(SECONDS)[0]))
            by_rank[low][high], by_rank[high][low] = (
                Channel(*sockets) for sockets in zip(*ends, strict=True)
            )
    yield by_rank
    for channels in by_rank.values():
        for channel in channels.values():
            channel.close()


class Adder:
    """A worker's share of a tensor, one element of two sums of each worker, and its reduction."""

    def __init__(self, channels, rank, number):
        self.rank, self.others, self.added_by = rank, list(channels), []
        self.received = {other: [torch.full((1,), -1.0) for _ in range(2)] for other in channels}
        self.totals = {other: torch.full((1,), -1.0) for other in channels}
        self.total = torch.zeros(1)
        share = Share(self.received, self.add, self.total, self.totals)
        self.reduction = Reduction(channels, number, share)

    def sums(self, adder):
        return [torch.tensor([float(10**self.rank * (adder + 1) + n)]) for n in range(2)]

    def send(self):
        self.reduction.send({other: self.sums(other) for other in self.others})

    def add(self):
        self.added_by.append(threading.current_thread().name)
        everything = [*self.received.values(), self.sums(self.rank)]
        self.total.copy_(sum(tensor for sums in everything for tensor in sums))


def test_each_worker_adds_a_share_and_gets_the_totals_of_the_others(meshed):
    numbers = range(3)
    adders = [[Adder(meshed[rank], rank, number) for rank in range(3)] for number in numbers]
    sent = [(number, rank) for number in numbers for rank in range(3)]
    random.Random(0).shuffle(sent)
    for number, rank in sent:
        adders[number][rank].send()
    for group in adders:
        for adder in group:
            adder.reduction.wait(SECONDS)
            assert adder.reduction.is_done()
            assert len(adder.added_by) == 1
            everything = {**adder.totals, adder.rank: adder.total}
            for rank, total in everything.items():
                assert total.item() == 222 * (rank + 1) + 3


def test_a_share_is_added_before_anyone_waits_for_it(meshed):
    adders = [Adder(meshed[rank], rank, 1) for rank in range(3)]
    for adder in adders:
        adder.send()
    deadline = time.monotonic() + SECONDS
    while not all(adder.reduction.is_done() for adder in adders):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert any(name.startswith("samestep") for adder in adders for name in adder.added_by)


def test_nothing_is_added_before_a_worker_has_sent_its_own_sums(meshed):
    first, second, third = adders = [Adder(meshed[rank], rank, 1) for rank in range(3)]
    second.send()
    third.send()
    deadline = time.monotonic() + SECONDS
    while not all(transfer.is_done for _, transfer in first.reduction._sums):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [adder.added_by for adder in adders] == [[], [], []]
    first.send()
    assert first.added_by == ["MainThread"]
    for adder in adders:
        adder.reduction.wait(SECONDS)


def test_an_error_of_an_addition_is_that_of_waiting_for_it(meshed):
    adders = [Adder(meshed[rank], rank, 1) for rank in range(3)]

    def fail():
        adders[0].add()
        raise RuntimeError("no memory")

    adders[0].reduction._share = adders[0].reduction._share._replace(add=fail)
    for adder in adders:
        adder.send()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            adders[0].reduction.wait(SECONDS)
    assert len(adders[0].added_by) == 1


def test_a_worker_that_leaves_before_it_has_sent_its_sums_is_noticed_by_the_others(meshed):
    adders = [Adder(meshed[rank], rank, 1) for rank in range(2)]
    for channel in meshed[2].values():
        channel.close()
    for adder in adders:
        adder.send()
    for adder in adders:
        with pytest.raises(OSError, match=r"closed|reset|Broken|[Cc]onnection"):
            adder.reduction.wait(SECONDS)


def test_a_channel_may_be_idle_while_another_worker_is_awaited(meshed):
    adders = [Adder(meshed[rank], rank, 1) for rank in range(3)]
    for adder in adders[:2]:
        adder.send()
    later = threading.Timer(0.2, adders[2].send)
    later.start()
    meshed[0][1]._active_at -= 2 * SECONDS  # the channel to worker 1 was idle for that long
    adders[0].reduction.wait(SECONDS)
    later.join()
    assert adders[0].totals[1].item() == 222 * 2 + 3


class Connection:
    """A connection whose round trip takes some microseconds."""

    def __init__(self, microseconds):
        self.microseconds, self.size = microseconds, None

    def getsockopt(self, _level, _option, size):
        return bytes(size - 4) + self.microseconds.to_bytes(4, "little")

    def setsockopt(self, _level, option, value):
        assert option == socket.SO_SNDBUF
        self.size = value


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs Linux")
@pytest.mark.parametrize(
    ("microseconds", "size"),
    [(20, 128 << 10), (150, 187_500), (300, 208 << 10), (1000, None), (20_000, None)],
)
def test_the_buffer_is_limited_if_10_gbit_s_still_fit(microseconds, size):
    connection = Connection(microseconds)
    limit_buffer(connection)
    assert connection.size == size


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs Linux")
def test_the_kernel_reports_a_round_trip_and_limits_its_buffer():
    with Listener("127.0.0.1") as listener, socket.socket() as connection:
        connection.connect((listener.address, listener.port))
        before = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72)
        microseconds = int.from_bytes(information[68:], "little")
        limit_buffer(connection)
        size = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert 0 < microseconds < 1_000_000
    assert before > 2 * (208 << 10)  # on loopback
    if microseconds * 1250 <= 2 * (208 << 10):  # under load, a round trip may take longer
        assert 2 * (128 << 10) <= size <= 2 * (208 << 10)  # Linux doubles what was asked for
    else:
        assert size == before
