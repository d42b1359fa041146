"""The key-value store of one attempt, served to workers that hold the run's token."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections import defaultdict
from contextlib import closing
from typing import Any, Final

from samestep.cluster.network import peer_user
from samestep.comm import link, signing
from samestep.comm.admission import connections_within, first_of_busiest, log, start_server
from samestep.comm.link import Message, to_bytes, to_text

MAX_SECONDS: Final = 1e9
# connections in a handshake: all workers of a large run arrive at once
MAX_UNAUTHENTICATED: Final = 4096
MAX_LOGGED_ADDRESSES: Final = 100  # of refused connections
MAX_STORED: Final = 1 << 28  # characters of all keys and values
MAX_ANSWER: Final = 1 << 20  # characters of values, unless one is longer
_READ_BYTES: Final = 1 << 16
TURNS: Final = 8  # of the event loop; from an accept until the connection is served take 3


class PeerExitedError(ConnectionError):
    """The peer's process closed the connection or exited, while the network works."""


class KeyValueStore:
    """Values by key, in memory, with the operations of torch.distributed's stores.

    A request is `{"do": operation, …}` with values in base64. The answer is `{"value": …}`, or
    `{"late": keys}` if the keys were not set in time.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}  # in base64, as they arrive and leave
        self._stored = 0  # characters of keys and values
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    async def handle(self, request: Message) -> dict[str, Any]:
        """Carry out a request. Raises `ValueError` if it is invalid."""
        try:
            return await self._handle(request)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"invalid request to a store: {error}") from error

    async def _handle(self, request: Message) -> dict[str, Any]:
        match request["do"]:
            case "wait":
                return await self._wait(_keys(request["keys"]), _seconds(request["seconds"]))
            case "get":
                (key,) = keys = _keys([request["key"]])
                late = await self._wait(keys, _seconds(request["seconds"]))
                return late or {"value": self._values[key]}
            case "multi_get":
                keys = _keys(request["keys"])
                late = await self._wait(keys, _seconds(request["seconds"]))
                return late or {"value": self._texts(keys)}
            case "check":
                return {"value": all(key in self._values for key in _keys(request["keys"]))}
            case "count":
                return {"value": len(self._values)}
            case _:
                return {"value": self._change(request)}

    def _texts(self, keys: list[str]) -> list[str]:
        """Return the values of the first keys, as many as fit in an answer, at least one."""
        texts: list[str] = []
        characters = 0
        for key in keys:
            texts.append(self._values[key])
            characters += len(texts[-1])
            if characters > MAX_ANSWER:
                return texts[:-1] or texts
        return texts

    def _change(self, request: Message) -> int | str | bool | None:
        (key,) = _keys([request["key"]])
        held = self._values.get(key, "")
        match request["do"]:
            case "set":
                self._set(key, _checked(request["value"]))
                return None
            case "append":
                self._set(key, to_text(to_bytes(held) + to_bytes(request["value"])))
                return None
            case "add":
                total = int(to_bytes(held) or 0) + int(request["amount"])
                self._set(key, to_text(b"%d" % total))
                return total
            case "compare_set":
                expected, desired = _checked(request["expected"]), _checked(request["value"])
                if held == expected:
                    self._set(key, desired)
                    return desired
                # torch's stores return the expected value for a missing key
                return held if key in self._values else expected
            case "delete":
                self._stored -= len(key) + len(held) if key in self._values else 0
                return self._values.pop(key, None) is not None
        raise ValueError(f"a store has no operation {request['do']!r}")

    def _set(self, key: str, value: str) -> None:
        held = self._values.get(key)
        stored = self._stored + len(value) + (len(key) if held is None else -len(held))
        if stored > MAX_STORED:
            raise ValueError(f"the store must hold at most {MAX_STORED} characters, got {stored}")
        self._values[key], self._stored = value, stored
        for waiting in self._waiting.pop(key, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def _wait(self, keys: list[str], seconds: float) -> dict[str, Any]:
        """Return {} when all keys are set, and the missing keys after a timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (key := next((key for key in keys if key not in self._values), None)) is not None:
            arrival = loop.create_future()
            self._waiting[key].add(arrival)
            try:
                await asyncio.wait_for(arrival, deadline - loop.time())
            except asyncio.TimeoutError:
                return {"late": [each for each in keys if each not in self._values]}
            finally:
                self._waiting[key].discard(arrival)
        return {}


def _seconds(number: Any) -> float:
    seconds = float(number)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"seconds must be from 0 to {MAX_SECONDS:g}, got {seconds}")
    return seconds


def _checked(text: Any) -> str:
    """Return a value's text. Raises `TypeError` or `ValueError` if it is invalid."""
    to_bytes(text)
    return str(text)


def _keys(keys: Any) -> list[str]:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"keys must be a list of strings, got {keys!r}")
    return keys


class StoreConnection:
    """The coordinator's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = link.Frames(link.HELLO_BYTES)
        self._seal: link.Seal

    async def authenticate(self, token: str) -> Message:
        """Prove to each other that both ends hold the token; return the peer's hello.

        Raises `ValueError` if the peer does not hold it.
        """
        nonces = secrets.token_bytes(signing.NONCE_BYTES)
        self._write({"nonce": nonces.hex()})
        hello = link.decode(await self._next_body())
        nonces += signing.nonce_of(hello)
        if not signing.is_proof(hello, token, "member", nonces):
            self._write({"refused": "token"})
            raise ValueError("it does not have this run's token")
        self._write({"proof": signing.prove(token, "coordinator", nonces)})
        self._frames.max_bytes = link.MAX_BYTES
        self._seal = link.Seal(token, nonces, coordinator=True)
        return await self.receive()

    def send(self, message: Message) -> None:
        """Queue a message; messages to a closed connection are lost."""
        if not self._writer.is_closing():
            self._writer.write(self._seal.seal(message))

    def disconnect(self) -> None:
        self._writer.transport.abort()

    async def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises `PeerExitedError` at the end of the connection, another `OSError` if it is lost, and
        `ValueError` for a message that the peer cannot have sent.
        """
        return self._seal.open(await self._next_body())

    def _write(self, message: Message) -> None:
        self._writer.write(link.frame(link.encode(message)))

    async def _next_body(self) -> bytes:
        while (body := self._frames.next()) is None:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise PeerExitedError("it closed the connection")
            self._frames.feed(data)
        return body


class StoreServer:
    """Serves the store of an attempt to workers that prove that they hold the token.

    At most `max_unauthenticated` connections may be in a handshake, each for `hello_seconds`. One
    more closes the oldest one of the address that has most of them.
    """

    def __init__(
        self,
        token: str,
        attempt: int,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
        hello_seconds: float | None = None,
    ) -> None:
        self._token, self._max_unauthenticated = token, max_unauthenticated
        self.has_token = bool(token)
        self._hello_seconds = hello_seconds or link.HELLO_SECONDS
        self._attempt, self._store = attempt, KeyValueStore()
        self._rank_owners: dict[str, str] = {}  # processes by rank
        self._workers: set[asyncio.Task[None]] = set()  # of the current attempt
        self._unauthenticated: dict[asyncio.StreamWriter, str] = {}  # addresses, oldest first
        self._logged_addresses: set[str] = set()

    async def serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Authenticate a connection, and serve it until its end."""
        peer = StoreConnection(reader, writer)
        try:
            await self._serve(peer, await self._authenticate(peer, writer))
        except ConnectionError:
            pass  # it has gone, as a worker that waited until this server was up
        except (ValueError, OSError, asyncio.TimeoutError) as error:
            self._log_refused(writer, error)
        except asyncio.CancelledError:
            pass  # the attempt or the run has ended
        finally:
            writer.close()

    async def _authenticate(self, peer: StoreConnection, writer: asyncio.StreamWriter) -> Message:
        waiting = self._unauthenticated
        if len(waiting) >= connections_within(self._max_unauthenticated):
            first = first_of_busiest(waiting)
            del waiting[first]
            first.transport.abort()
        waiting[writer] = _address(writer)
        try:
            return await asyncio.wait_for(peer.authenticate(self._token), self._hello_seconds)
        finally:
            waiting.pop(writer, None)

    async def _serve(self, peer: StoreConnection, hello: Message) -> None:
        task, store = current_task(), self._store
        if refused := self._claim_rank(hello):
            peer.send({"refused": refused})
            raise ValueError(refused)
        self._workers.add(task)
        try:
            peer.send({"welcome": ""})
            while True:
                peer.send(await store.handle(await peer.receive()))
        except OSError:
            pass  # workers may exit at any time; their launchers report it
        finally:
            self._workers.discard(task)

    def _claim_rank(self, hello: Message) -> str:
        """Reserve a rank for all connections of one process; return why not, "" on success."""
        if (attempt := hello.get("attempt")) != self._attempt:
            return f"expected a worker of attempt {self._attempt}, got attempt {attempt!r:.20}"
        rank, process = str(hello.get("rank")), str(hello.get("process"))
        owner = self._rank_owners.setdefault(rank, process)
        if owner == process:
            return ""
        return f"{process:.100} claims rank {rank:.20}, which belongs to {owner:.100}"

    def _log_refused(self, writer: asyncio.StreamWriter, error: Exception) -> None:
        """Log a refused connection, once per address and for a limited number of addresses."""
        address, logged = _address(writer), self._logged_addresses
        if address not in logged and len(logged) < MAX_LOGGED_ADDRESSES:
            logged.add(address)
            reason = str(error) or f"it sent no hello within {self._hello_seconds:g} s"
            is_last = len(logged) == MAX_LOGGED_ADDRESSES
            more = "; further refused addresses are not logged" if is_last else ""
            log(f"refused a connection from {address}: {reason}{more}")


def current_task() -> asyncio.Task[None]:
    """Return the task that serves the current connection."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  connections are served in tasks
    return task


def _address(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if peer else "this host"  # a Unix socket has no address


class StoreThread:
    """Serves a store on a listening socket in a thread of this process.

    Processes of other users of this host are disconnected. With a token, TCP needs no such check.
    """

    def __init__(self, server: StoreServer, listener: socket.socket) -> None:
        self._server, self._listener = server, listener
        listener.listen(socket.SOMAXCONN)  # others may connect before the thread runs
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="samestep store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        with closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asks_kernel = self._listener.family == socket.AF_UNIX or not self._server.has_token
        connection = writer.get_extra_info("socket")
        if asks_kernel and peer_user(connection) not in {None, os.geteuid()}:
            writer.transport.abort()
        else:
            await self._server.serve_peer(reader, writer)

    async def _serve(self) -> None:
        async with await start_server(self._serve_peer, self._listener):
            await self._end.wait()
            # asyncio leaves the socket of a connection open that is cancelled before it is served
            asyncio.get_running_loop().remove_reader(self._listener)
            await _pass_turns()
            tasks = asyncio.all_tasks() - {current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _pass_turns()  # until the sockets are closed


async def _pass_turns() -> None:
    """Let the event loop do what was begun, such as to accept a connection, which takes turns."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
