"""The coordinator of a run on several hosts: a process next to the first host's launcher.

It authenticates hosts and workers, carries reports and orders between hosts and `Membership`, and
serves the store of the current attempt. It needs no torch, so it listens immediately and responds
while launchers import and fork.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from samestep.comm import link
from samestep.host import end_with_parent
from samestep.launch.attempt import ElasticPolicy, Message, Node, Phase
from samestep.launch.membership import Membership
from samestep.launch.store_server import KeyValueStore

TICK_SECONDS: Final = 0.05
HEARTBEAT_SECONDS: Final = 1.0
LINGER_SECONDS: Final = 5.0  # after the end, for hosts to receive it
MAX_UNAUTHENTICATED: Final = 64  # connections; one more closes the oldest
MAX_LOGGED_ADDRESSES: Final = 100  # of refused connections
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class CoordinatorConfig:
    """The run's token and policy, and the `settings` by name that must be equal on all hosts."""

    token: str = field(repr=False)
    policy: ElasticPolicy
    settings: Mapping[str, str]


def coordinate(config: CoordinatorConfig, listener: socket.socket, launcher_pid: int) -> None:
    """Run a coordinator in a fork of the first host's launcher, at most until it exits."""
    end_with_parent(launcher_pid)
    os.setsid()  # Ctrl-C is for the launcher
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    asyncio.run(Coordinator(config).serve(listener))


class Coordinator:
    """Serves the hosts of one run and their workers."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._membership = Membership(
            config.policy, time.monotonic(), open_attempt=self._open_attempt, log=_log
        )
        self._attempt, self._store = -1, KeyValueStore()
        self._rank_owners: dict[str, str] = {}  # processes by rank
        self._hosts: dict[asyncio.Task[None], Peer] = {}
        self._workers: set[asyncio.Task[None]] = set()  # of the current attempt
        self._unauthenticated: list[asyncio.StreamWriter] = []  # oldest first
        self._logged_addresses: set[str] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until the run is finished and all hosts have been notified."""
        async with await asyncio.start_server(self._serve_peer, sock=listener):
            heartbeat_at = 0.0
            while self._membership.phase is not Phase.FINISHED:
                now = time.monotonic()
                self._membership.update(now)
                if now >= heartbeat_at:
                    heartbeat_at = now + HEARTBEAT_SECONDS
                    for host in self._hosts.values():
                        host.send({"order": "heartbeat"})
                await asyncio.sleep(TICK_SECONDS)
            if self._hosts:
                await asyncio.wait(self._hosts, timeout=LINGER_SECONDS)

    def _open_attempt(self, number: int) -> None:
        """Disconnect the workers of the previous attempt, and open a new store."""
        for task in self._workers:
            task.cancel()
        self._attempt, self._store, self._rank_owners = number, KeyValueStore(), {}

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        try:
            hello = await self._authenticate(peer, writer)
            if hello.get("as") == "host":
                await self._serve_host(peer, hello)
            else:
                await self._serve_worker(peer, hello)
        except (ValueError, OSError, asyncio.TimeoutError) as error:
            self._log_refused(writer, error)
        except asyncio.CancelledError:
            pass  # the attempt or the run has ended
        finally:
            writer.close()

    async def _authenticate(self, peer: Peer, writer: asyncio.StreamWriter) -> Message:
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            self._unauthenticated[0].transport.abort()
        self._unauthenticated.append(writer)
        try:
            return await asyncio.wait_for(peer.authenticate(self._config.token), link.HELLO_SECONDS)
        finally:
            self._unauthenticated.remove(writer)

    async def _serve_host(self, peer: Peer, hello: Message) -> None:
        name, workers, settings = (hello.get(key) for key in ("name", "workers", "settings"))
        workers = workers if isinstance(workers, int) else 0
        if not isinstance(name, str) or not isinstance(settings, dict) or workers < 1:
            raise ValueError(f"invalid hello from a host: {dict(hello)!r:.200}")
        is_finished = self._membership.phase is Phase.FINISHED
        if refused := "the run is over" if is_finished else self._differences(settings):
            _log(f"refused host {name}: {refused}")
            peer.send({"refused": refused})
            return
        task, reason, leads = _current_task(), "", bool(hello.get("leads"))
        node = Node(name, workers, peer.send, time.monotonic(), peer.disconnect, leads)
        self._membership.join(node)
        self._hosts[task] = peer
        peer.send({"welcome": node.name})
        try:
            while True:
                self._membership.receive(node, await peer.receive(), time.monotonic())
                self._membership.update(time.monotonic())
        except (ValueError, OSError) as error:
            reason = str(error)
        finally:
            del self._hosts[task]
            self._membership.leave(node, reason, time.monotonic())

    def _differences(self, settings: Message) -> str:
        """Describe settings of a host that differ from the first host's, "" for none."""
        return "; ".join(
            f"{name} must be {own!r} as on the first host, got {settings.get(name)!r}"
            for name, own in self._config.settings.items()
            if settings.get(name) != own
        )

    async def _serve_worker(self, peer: Peer, hello: Message) -> None:
        task, store = _current_task(), self._store
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
        address, logged = writer.get_extra_info("peername", ("?",))[0], self._logged_addresses
        if address not in logged and len(logged) < MAX_LOGGED_ADDRESSES:
            logged.add(address)
            reason = str(error) or f"it sent no hello within {link.HELLO_SECONDS:g} s"
            is_last = len(logged) == MAX_LOGGED_ADDRESSES
            more = "; connections from further addresses are refused silently" if is_last else ""
            _log(f"refused a connection from {address}: {reason}{more}")


class Peer:
    """The coordinator's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = link.Frames(link.HELLO_BYTES)
        self._seal: link.Seal

    async def authenticate(self, token: str) -> Message:
        """Prove to each other that both ends hold the token; return the peer's hello.

        Raises `ValueError` if the peer does not hold it.
        """
        nonces = secrets.token_bytes(link.NONCE_BYTES)
        self._write({"nonce": nonces.hex()})
        hello = link.decode(await self._next_body())
        nonces += link.nonce_of(hello)
        if not link.is_proof(hello, token, b"member", nonces):
            self._write({"refused": "token"})
            raise ValueError("it does not have this run's token")
        self._write({"proof": link.prove(token, b"coordinator", nonces).hex()})
        self._frames.max_bytes = link.MAX_BYTES
        self._seal = link.Seal(token, nonces, coordinator=True)
        return await self.receive()

    def send(self, message: Message) -> None:
        """Queue a message; messages to a closed connection are lost."""
        if not self._writer.is_closing():
            self._writer.write(self._seal.seal(message))

    def disconnect(self) -> None:
        """Close the connection immediately."""
        self._writer.transport.abort()

    async def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises `OSError` at the end of the connection, `ValueError` for a message that the peer
        cannot have sent.
        """
        return self._seal.open(await self._next_body())

    def _write(self, message: Message) -> None:
        self._writer.write(link.frame(link.encode(message)))

    async def _next_body(self) -> bytes:
        while (body := self._frames.next()) is None:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._frames.feed(data)
        return body


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  connections are served in tasks
    return task


def _log(text: str) -> None:
    sys.stderr.write(f"samestep: {text}\n")
    sys.stderr.flush()
