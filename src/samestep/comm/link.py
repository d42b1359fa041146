"""Authenticated connections between the hosts of a run: frames of JSON.

A frame is its length (4 bytes, big endian) and a body. Both ends start with a fresh nonce and prove
that they hold the run's token, which is never sent. Later bodies are signed together with the
frame's sequence number, with one key per direction of this connection (signing.py).
So frames cannot be forged, repeated, reordered or reflected. They are not encrypted. Received data
is parsed as JSON of limited size; nothing is unpickled.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import struct
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from samestep.comm.signing import NONCE_BYTES, derive, is_proof, nonce_of, prove, sign, verified
from samestep.errors import ConfigError, WorldError

Message = Mapping[str, Any]
Address = tuple[str, int] | str  # host and port, or the abstract name of a Unix socket

HELLO_BYTES: Final = 512  # the longest frame of an unauthenticated peer
MAX_BYTES: Final = 1 << 22
HELLO_SECONDS: Final = 5.0
RESPONSE_SECONDS: Final = 10.0
_LENGTH: Final = struct.Struct(">I")
_ABORT: Final = struct.pack("ii", 1, 0)  # struct linger of socket(7)
_READ_BYTES: Final = 1 << 16
_RETRY_SECONDS: Final = 0.01


class Frames:
    """Splits a stream of bytes into the bodies of frames, of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._data += data

    def next(self) -> bytes | None:
        """Return the next body, None if incomplete. Raises `ValueError` if it is too long."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self.max_bytes:
            raise ValueError(f"expected a frame of at most {self.max_bytes} bytes, got {length}")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body


def frame(body: bytes) -> bytes:
    """Return a body preceded by its length. Raises `ValueError` if it is too long."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"messages must have at most {MAX_BYTES} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


def parse(data: bytes) -> Any:
    """Parse JSON that anyone may have sent. Raises `ValueError` if it is invalid."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None


def decode(body: bytes) -> dict[str, Any]:
    """Parse a message. Raises `ValueError` unless it is a JSON object."""
    message = parse(body)
    if not isinstance(message, dict):
        # a wrong value from the peer, not a wrong type from the caller
        raise ValueError(f"expected a JSON object, got {type(message).__name__}")  # noqa: TRY004
    return message


class Seal:
    """Signs and verifies frames once both ends have proved that they hold the token."""

    def __init__(self, token: str, nonces: bytes, *, coordinator: bool) -> None:
        directions = ("from coordinator", "to coordinator")
        outgoing, incoming = directions if coordinator else directions[::-1]
        self._own_key = derive(token, outgoing, nonces)
        self._peer_key = derive(token, incoming, nonces)
        self._sent = self._received = 0

    def seal(self, message: Message) -> bytes:
        """Return a message's frame, to be sent in this order. Raises `ValueError` if too long."""
        sealed = frame(sign(self._own_key, f"frame {self._sent}", encode(message)))
        self._sent += 1
        return sealed

    def open(self, body: bytes) -> dict[str, Any]:
        """Return a body's message. Raises `ValueError` if it is not the peer's next one."""
        text = verified(self._peer_key, f"frame {self._received}", body)
        if text is None:
            raise ValueError("a frame has a wrong MAC")
        self._received += 1
        return decode(text)


class Delivery:
    """Messages that arrive once and in order over any number of successive connections.

    Each message also says how many its sender has `received`. Messages are kept until the other end
    has confirmed them in this way, and are sent again over the next connection.
    """

    def __init__(self) -> None:
        self.received = 0
        self._confirmed = 0
        self._unconfirmed: deque[Message] = deque()
        self._sent = 0  # of the unconfirmed ones, over the current connection

    def add(self, message: Message) -> None:
        """Add a message that is due."""
        self._unconfirmed.append(message)

    def due(self) -> list[Message]:
        """Return the messages that the current connection has to send."""
        due = list(islice(self._unconfirmed, self._sent, None))
        self._sent = len(self._unconfirmed)
        return [{**message, "received": self.received} for message in due]

    def accept(self, message: dict[str, Any]) -> dict[str, Any]:
        """Count a received message. Raises `ValueError` for an invalid confirmation."""
        self._confirm(message.pop("received", None))
        self.received += 1
        return message

    def resume(self, received: object) -> None:
        """Continue over a new connection, whose other end has received this many messages."""
        self._confirm(received)
        self._sent = 0

    def _confirm(self, received: object) -> None:
        expected = range(self._confirmed, self._confirmed + len(self._unconfirmed) + 1)
        if not isinstance(received, int) or received not in expected:
            raise ValueError(
                f"expected a confirmation of {expected} messages, got {received!r:.20}"
            )
        for _ in range(self._confirmed, received):
            self._unconfirmed.popleft()
            self._sent = max(0, self._sent - 1)
        self._confirmed = received


def _connect(address: Address, seconds: float) -> socket.socket:
    if not isinstance(address, str):
        connection = socket.create_connection(address, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + seconds
    try:
        connection.settimeout(seconds)
        # with EAGAIN, too many others are waiting to be accepted
        while (code := connection.connect_ex(f"\0{address}")) == errno.EAGAIN:
            if time.monotonic() > deadline:
                break
            time.sleep(_RETRY_SECONDS)
    except BaseException:
        connection.close()
        raise
    if code:
        connection.close()
        raise OSError(code, os.strerror(code))
    return connection


class Link:
    """A launcher's or worker's authenticated connection to the coordinator."""

    def __init__(self, address: Address, token: str, seconds: float) -> None:
        """Connect. Raises `OSError` if nothing responds, `WorldError` if the tokens differ."""
        self._frames = Frames(MAX_BYTES)
        self._deadline = time.monotonic() + seconds
        self._socket = _connect(address, seconds)
        # the coordinator's IP address, which needs no name lookup
        self.address: Any = self._socket.getpeername()[:2]
        try:
            self._seal = self._authenticate(token)
        except ValueError as error:
            self.close()
            raise WorldError(f"the server there is not a samestep coordinator: {error}") from error
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the file descriptor, which becomes readable when data arrives."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises `OSError` if disconnected, `ValueError` if it is too long."""
        self._socket.sendall(self._seal.seal(message))

    def hello(self, message: Message, seconds: float = RESPONSE_SECONDS) -> dict[str, Any]:
        """Send the first message; return the response. Closes if `refused`. Raises `OSError`.

        The other end may get the message after an error here, so it must not see an orderly end.
        """
        try:
            self.send(message)
            response = self.receive(seconds)
        except OSError:
            self.abort()
            raise
        if "refused" in response:
            self.close()
        return response

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for a message. Raises `TimeoutError`, or another `OSError` if disconnected."""
        self._deadline = time.monotonic() + seconds
        try:
            return self._seal.open(self._next_body())
        except ValueError as error:
            raise _unauthenticated(error) from error

    def poll(self) -> list[dict[str, Any]]:
        """Return the messages received so far. Raises `OSError` if disconnected."""
        messages = []
        self._socket.settimeout(0.0)
        try:
            while True:
                while (body := self._frames.next()) is not None:
                    messages.append(self._seal.open(body))
                self._feed(self._socket.recv(_READ_BYTES))
        except BlockingIOError:
            return messages
        except ValueError as error:
            raise _unauthenticated(error) from error
        except ConnectionError:
            if messages:  # they may explain it; the next call raises again
                return messages
            raise
        finally:
            self._socket.settimeout(RESPONSE_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def abort(self) -> None:
        """Close a connection that another one replaces: the process does not end."""
        with suppress(OSError):  # the other end must not see an orderly end
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self.close()

    def _authenticate(self, token: str) -> Seal:
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = nonce_of(decode(self._next_body())) + nonce
        hello = {"nonce": nonce.hex(), "proof": prove(token, "member", nonces)}
        self._socket.sendall(frame(encode(hello)))
        response = decode(self._next_body())
        if "refused" in response:
            raise WorldError("the coordinator there has a different token")
        if not is_proof(response, token, "coordinator", nonces):
            raise WorldError("the server there does not know the token")
        return Seal(token, nonces, coordinator=False)

    def _next_body(self) -> bytes:
        while (body := self._frames.next()) is None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out waiting for a response")
            self._socket.settimeout(remaining)
            self._feed(self._socket.recv(_READ_BYTES))
        return body

    def _feed(self, data: bytes) -> None:
        if not data:
            raise ConnectionResetError("the coordinator closed the connection")
        self._frames.feed(data)


def _unauthenticated(error: ValueError) -> ConnectionAbortedError:
    return ConnectionAbortedError(f"unauthenticated data: {error}")


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT or [IPV6]:PORT. Raises `ConfigError` with `name`."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise ConfigError(
            f"{name} must be HOST:PORT, such as node1:29400 or [fd00::1]:29400, got {text!r}"
        )
    return host, int(port)


def write_address(host: str, port: int) -> str:
    """Return the text that `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def to_text(value: bytes) -> str:
    """Encode bytes as text for JSON."""
    return b64encode(value).decode()


def to_bytes(text: str) -> bytes:
    """Decode the text of `to_text`. Raises `ValueError` if it is invalid."""
    return b64decode(text, validate=True)
