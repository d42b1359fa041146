from __future__ import annotations

import secrets
import socket
import threading
from contextlib import contextmanager, suppress
from random import Random

import pytest

from samestep.comm.link import (
    HELLO_BYTES,
    Delivery,
    Frames,
    Link,
    Seal,
    decode,
    encode,
    frame,
    parse_address,
    write_address,
)
from samestep.comm.signing import NONCE_BYTES, prove
from samestep.errors import ConfigError, WorldError

TOKEN = "a token of sixteen or more"


@pytest.fixture
def seals():
    nonces = secrets.token_bytes(2 * NONCE_BYTES)
    return [Seal(TOKEN, nonces, coordinator=coordinator) for coordinator in (True, False)]


def body_of(data):
    frames = Frames(HELLO_BYTES)
    frames.feed(data)
    return frames.next()


def test_messages_pass_both_ways_in_order(seals):
    near, far = seals
    for message in ({"a": 1}, {}, {"text": "é\n", "none": None}):
        assert far.open(body_of(near.seal(message))) == message
        assert near.open(body_of(far.seal(message))) == message


@pytest.mark.parametrize(
    "fault", ["changed", "repeated", "left out", "sent back", "cut", "of another connection"]
)
def test_any_frame_but_the_next_of_the_other_end_is_refused(seals, fault):
    near, far = seals
    first, second = body_of(near.seal({"a": 1})), body_of(near.seal({"a": 2}))
    if fault == "repeated":
        far.open(first)
    if fault == "of another connection":
        far = Seal(TOKEN, bytes(2 * NONCE_BYTES), coordinator=False)
    if fault == "sent back":
        far = near
    wrong = {"changed": first[:-1] + b"]", "left out": second, "cut": first[:20]}.get(fault, first)
    with pytest.raises(ValueError, match="MAC"):
        far.open(wrong)


def test_frames_are_complete_however_the_stream_is_cut():
    random = Random(0)
    bodies = [random.randbytes(random.randrange(100)) for _ in range(50)]
    stream = b"".join(map(frame, bodies))
    frames, received = Frames(HELLO_BYTES), []
    while stream:
        size = random.randrange(1, 40)
        frames.feed(stream[:size])
        stream = stream[size:]
        while (body := frames.next()) is not None:
            received.append(body)
    assert received == bodies


def test_a_frame_that_is_too_long_is_refused_before_it_arrives():
    with pytest.raises(ValueError, match="at most 512 bytes, got"):
        body_of(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="must have at most"):
        frame(bytes(2**22 + 1))


def test_any_bytes_are_a_message_or_an_error(seals):
    random = Random(0)
    right = seals[0].seal({"order": "beat", "step": 3})
    for _ in range(20_000):
        data = bytearray(right)
        for _ in range(random.randrange(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        data = bytes(data) if random.random() < 0.5 else random.randbytes(random.randrange(80))
        with suppress(ValueError):
            body = body_of(data)
            assert body is None or len(body) <= HELLO_BYTES
            if body is not None:
                assert isinstance(decode(body), dict)
        if data != right and (body := complete_body(data)) is not None:
            with pytest.raises(ValueError, match="MAC"):
                seals[1].open(body)


def complete_body(data):
    with suppress(ValueError):
        return body_of(data)
    return None


@pytest.mark.parametrize("seed", range(5))
def test_messages_arrive_once_and_in_order_over_connections_that_break(seed):
    random = Random(seed)
    ends = Delivery(), Delivery()
    sent, arrived = ([], []), ([], [])
    on_the_way = ([], [])  # over the current connection

    def transmit():
        for end, messages in zip(ends, on_the_way, strict=True):
            messages.extend(end.due())

    for number in range(2000):
        side = random.randrange(2)
        ends[side].add({"number": number})
        sent[side].append({"number": number})
        transmit()
        for receiver in range(2):
            messages = on_the_way[1 - receiver]
            for _ in range(random.randrange(len(messages) + 1)):
                arrived[receiver].append(ends[receiver].accept(messages.pop(0)))
        if random.random() < 0.1:  # the rest is lost
            received = [end.received for end in ends]
            for side in range(2):
                ends[side].resume(received[1 - side])
                on_the_way[side].clear()
            transmit()
    for receiver in range(2):
        arrived[receiver].extend(map(ends[receiver].accept, on_the_way[1 - receiver]))
    assert arrived == (sent[1], sent[0])
    assert max(len(end._unconfirmed) for end in ends) < 200  # confirmed ones are forgotten


@pytest.mark.parametrize("received", [None, "1", -1, 2, 0.5])
def test_a_confirmation_of_messages_that_were_not_sent_is_an_error(received):
    delivery = Delivery()
    delivery.add({"number": 1})
    with pytest.raises(ValueError, match="expected a confirmation of"):
        delivery.resume(received)
    with pytest.raises(ValueError, match="expected a confirmation of"):
        delivery.accept({"received": received})


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_anything_but_a_json_object_is_an_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  of several kinds
        decode(text)


@contextmanager
def answering(*answers):
    """Yield the address of a server that sends these answers to its first connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                for answer in answers:
                    connection.sendall(answer)
                connection.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
            "not a samestep coordinator: expected a frame of at most 4194304 bytes, got 1213486160",
        ),
        ([frame(b"{}")], "expected a hello with a nonce"),
        ([frame(b'{"nonce":"' + 64 * b"z" + b'"}')], "not a samestep coordinator"),
        (
            [frame(encode({"nonce": 64 * "0"})), frame(encode({"refused": "token"}))],
            "the coordinator there has a different token",
        ),
        (
            [frame(encode({"nonce": 64 * "0"})), frame(encode({"proof": 64 * "0"}))],
            "does not know the token",
        ),
        (
            [frame(encode({"nonce": 64 * "0"})), frame(encode({"proof": "é"}))],
            "does not know the token",
        ),
        (
            [
                frame(encode({"nonce": 64 * "0"})),
                frame(encode({"proof": prove(TOKEN, "member", bytes(64))})),
            ],
            "does not know the token",
        ),
    ],
)
def test_the_server_must_know_the_token(answers, message):
    with answering(*answers) as address, pytest.raises(WorldError, match=message):
        Link(address, TOKEN, 5.0)


def test_a_silent_server_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        Link(listener.getsockname(), TOKEN, 0.1)


def test_a_hello_that_times_out_does_not_end_the_connection_in_an_orderly_way():
    """The other end would take that for the end of the process."""
    nonce, ends = bytes(NONCE_BYTES), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(frame(encode({"nonce": nonce.hex()})))
                frames = Frames(HELLO_BYTES)
                while (body := frames.next()) is None:
                    frames.feed(connection.recv(1 << 16))
                nonces = nonce + bytes.fromhex(decode(body)["nonce"])
                proof = prove(TOKEN, "coordinator", nonces)
                connection.sendall(frame(encode({"proof": proof})))
                try:
                    while connection.recv(1 << 16):
                        ends.append("hello")
                    ends.append("orderly")
                except ConnectionResetError:
                    ends.append("reset")

        thread = threading.Thread(target=serve)
        thread.start()
        link = Link(listener.getsockname(), TOKEN, 5.0)
        with pytest.raises(TimeoutError):
            link.hello({"as": "host"}, 0.2)
        thread.join()
    assert ends == ["hello", "reset"]


@pytest.mark.parametrize(
    ("host", "text"),
    [("node1", "node1:29400"), ("10.0.0.1", "10.0.0.1:29400"), ("fd00::1", "[fd00::1]:29400")],
)
def test_an_address_is_a_host_and_a_port(host, text):
    assert parse_address(text, "--master") == (host, 29400)
    assert write_address(host, 29400) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node1",
        ":1",
        "node1:",
        "node1:0",
        "node1:65536",
        "node1:x",
        "node1:1٣",
        "fd00::1:29400",
        "[]:1",
    ],
)
def test_an_invalid_address_is_named(text):
    with pytest.raises(ConfigError, match=r"--master must be HOST:PORT, .*, got '"):
        parse_address(text, "--master")
