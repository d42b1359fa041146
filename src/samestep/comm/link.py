"""The connection between the hosts of a run: frames of JSON that only those who hold the run's token can make.

A frame is its length (4 bytes, big endian) and a body. Both ends begin with a fresh nonce and prove
by HMAC-SHA256 (RFC 2104) that they hold the token, which is never sent; from then on a body begins
with a MAC over its place in the order of frames and its text, with a key for each direction of this
one connection. So frames can be neither forged, repeated, reordered nor sent back. They can be read
by whoever sees the wire. What is read is JSON of limited size; nothing is unpickled.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import struct
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final

from samestep.errors import ConfigError, WorldError

Message = Mapping[str, Any]

VERSION: Final = 1
HELLO_BYTES: Final = 512  # the longest frame of one that has not proved anything
MOST_BYTES: Final = 1 << 22
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
HELLO_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 10.0
_LENGTH: Final = struct.Struct(">I")
_ORDER: Final = struct.Struct(">Q")
_READ_BYTES: Final = 1 << 16


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self, most: int) -> None:
        """`most` is the longest body allowed, in bytes; it may be raised later."""
        self.most = most
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self._data += data

    def next(self) -> bytes | None:
        """Return the next body, None when it is not whole yet. Raises `ValueError` for a frame that is too long."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self.most:
            raise ValueError(
                f"a frame of {length} bytes was announced; expected at most {self.most}"
            )
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body


def frame(body: bytes) -> bytes:
    """Return a body with its length in front. Raises `ValueError` when it is too long."""
    if len(body) > MOST_BYTES:
        raise ValueError(
            f"a message of {len(body)} bytes cannot be sent between hosts; expected at most {MOST_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


def encode(message: Message) -> bytes:
    """Write a message as JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> dict[str, Any]:
    """Read a message. Raises `ValueError` for anything but a JSON object."""
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(message, dict):
        # it is what was sent
        raise ValueError(f"{type(message).__name__} came where a JSON object was expected")  # noqa: TRY004
    return message


class Seal:
    """What makes frames, and tells right ones from others, once both ends have proved that they hold the token."""

    def __init__(self, token: str, nonces: bytes, *, coordinator: bool) -> None:
        directions = (b"from coordinator", b"to coordinator")
        own, others = directions if coordinator else directions[::-1]
        self._own_key, self._others_key = prove(token, own, nonces), prove(token, others, nonces)
        self._sent = self._received = 0

    def seal(self, message: Message) -> bytes:
        """Return the frame of a message; frames must be sent in the order in which they are made. Raises `ValueError` if it is too long."""
        text = encode(message)
        sealed = frame(hmac.digest(self._own_key, _ORDER.pack(self._sent) + text, "sha256") + text)
        self._sent += 1
        return sealed

    def open(self, body: bytes) -> dict[str, Any]:
        """Return the message of a frame's body. Raises `ValueError` when it is not the next one that the other end made."""
        mac, text = body[:MAC_BYTES], body[MAC_BYTES:]
        if not hmac.compare_digest(
            mac, hmac.digest(self._others_key, _ORDER.pack(self._received) + text, "sha256")
        ):
            raise ValueError("a frame has a wrong MAC")
        self._received += 1
        return decode(text)


def prove(token: str, purpose: bytes, nonces: bytes) -> bytes:
    """Return what only a holder of the token can compute for a purpose from both ends' nonces (the coordinator's first)."""
    return hmac.digest(token.encode(), b"samestep %d %s " % (VERSION, purpose) + nonces, "sha256")


def nonce_of(message: Message) -> bytes:
    """Return the nonce of a hello. Raises `ValueError` where there is none."""
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 2 * NONCE_BYTES:
        raise ValueError("a hello without a nonce")
    return bytes.fromhex(nonce)


def is_proof(message: Message, token: str, purpose: bytes, nonces: bytes) -> bool:
    """Tell whether a hello proves that its sender holds the token."""
    proof = message.get("proof")
    # As bytes, because text that is not ASCII cannot be compared in constant time.
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="replace"), prove(token, purpose, nonces).hex().encode()
    )


class Link:
    """A launcher's or worker's end of a connection to the coordinator of its run, open and trusted by both ends."""

    def __init__(self, address: tuple[str, int], token: str, seconds: float) -> None:
        """Connect within so many seconds. Raises `OSError` where nothing answers, `WorldError` where the token is another one."""
        self._frames = Frames(MOST_BYTES)
        self._deadline = time.monotonic() + seconds
        self._socket = socket.create_connection(address, seconds)
        try:
            # the coordinator's, without a name to look up
            self.address: tuple[str, int] = self._socket.getpeername()[:2]
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._seal = self._meet(token)
        except ValueError as error:
            self._socket.close()
            raise WorldError(f"what answers is no coordinator of samestep: {error}") from error
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the file that becomes readable when something came."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises `OSError` when the coordinator is gone, and `ValueError` for what is too long."""
        self._socket.sendall(self._seal.seal(message))

    def hello(self, message: Message) -> dict[str, Any]:
        """Say what this end wants and return the answer; one that is `refused` ends the connection. Raises `OSError`."""
        try:
            self.send(message)
            answer = self.receive(ANSWER_SECONDS)
        except OSError:
            self.close()
            raise
        if "refused" in answer:
            self.close()
        return answer

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait so long for a message. Raises `TimeoutError`, or another `OSError` when the coordinator is gone."""
        self._deadline = time.monotonic() + seconds
        return self._open(self._next_body())

    def received(self) -> list[dict[str, Any]]:
        """Return the messages that came, without waiting for any. Raises `OSError` when the coordinator is gone."""
        messages = []
        self._socket.settimeout(0.0)
        try:
            while True:
                while (body := self._frames.next()) is not None:
                    messages.append(self._open(body))
                self._take(self._socket.recv(_READ_BYTES))
        except BlockingIOError:
            return messages
        except ConnectionError:
            if messages:  # they may say why; the end is met again by the next call
                return messages
            raise
        finally:
            self._socket.settimeout(ANSWER_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _meet(self, token: str) -> Seal:
        challenge = decode(self._next_body())
        nonces = nonce_of(challenge) + secrets.token_bytes(NONCE_BYTES)
        self._socket.sendall(
            frame(
                encode(
                    {
                        "nonce": nonces[NONCE_BYTES:].hex(),
                        "proof": prove(token, b"member", nonces).hex(),
                    }
                )
            )
        )
        answer = decode(self._next_body())
        if "refused" in answer:
            raise WorldError("the token there is another one")
        if not is_proof(answer, token, b"coordinator", nonces):
            raise WorldError("what answers there does not know the token")
        return Seal(token, nonces, coordinator=False)

    def _next_body(self) -> bytes:
        while (body := self._frames.next()) is None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("no answer in time")
            self._socket.settimeout(remaining)
            self._take(self._socket.recv(_READ_BYTES))
        return body

    def _take(self, data: bytes) -> None:
        if not data:
            raise ConnectionResetError("the coordinator has closed the connection")
        self._frames.feed(data)

    def _open(self, body: bytes) -> dict[str, Any]:
        try:
            return self._seal.open(body)
        except ValueError as error:
            raise ConnectionAbortedError(
                f"what came is not from the coordinator: {error}"
            ) from error


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Read HOST:PORT, an IPv6 address in brackets. Raises `ConfigError` that names what gave it."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise ConfigError(
            f"{name} {text!r} was given; expected HOST:PORT, as in node1:29400 or [fd00::1]:29400"
        )
    return host, int(port)


def write_address(host: str, port: int) -> str:
    """Write what `parse_address` reads."""
    try:
        return f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"
    except ValueError:
        return f"{host}:{port}"


def to_text(value: bytes) -> str:
    """Write a value as JSON can hold it."""
    return b64encode(value).decode()


def to_bytes(text: str) -> bytes:
    """Read what `to_text` wrote. Raises `ValueError`."""
    return b64decode(text, validate=True)
