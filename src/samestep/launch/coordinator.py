"""The process beside the first host's launcher that brings the hosts of a run together, and keeps strangers out.

It needs no torch, so it listens at once, and answers while launchers import and fork.
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

from samestep.comm.link import (
    HELLO_BYTES,
    HELLO_SECONDS,
    MAX_BYTES,
    NONCE_BYTES,
    Frames,
    Seal,
    decode,
    encode,
    frame,
    is_proof,
    nonce_of,
    prove,
)
from samestep.host import end_with_parent
from samestep.launch.membership import ElasticPolicy, Membership, Phase
from samestep.launch.store_server import Keys

Message = Mapping[str, Any]

TICK_SECONDS: Final = 0.05
BEAT_SECONDS: Final = 1.0
LINGER_SECONDS: Final = 5.0  # after the end, for hosts to hear of it
# connections that have not proved anything yet; one more ends the oldest
MOST_STRANGERS: Final = 64
MOST_NAMED: Final = 100  # addresses of strangers that are logged
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class CoordinatorConfig:
    """What a coordinator is to do: whom to trust, on what terms, and what must be `same` on all hosts, by what it is called."""

    token: str = field(repr=False)
    terms: ElasticPolicy
    same: Mapping[str, str]


def coordinate(charge: CoordinatorConfig, listener: socket.socket, launcher_pid: int) -> None:
    """Be the coordinator, in a process that the first host's launcher forked for it and whose end is the launcher's."""
    end_with_parent(launcher_pid)
    os.setsid()  # Ctrl-C is for the launcher
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    asyncio.run(Coordinator(charge).serve(listener))


class Coordinator:
    """Serves the hosts of one run, and their workers, until it is over."""

    def __init__(self, charge: CoordinatorConfig) -> None:
        self._charge = charge
        self._membership = Membership(
            charge.terms, time.monotonic(), open_attempt=self._open_attempt, log=_log
        )
        self._attempt, self._keys = -1, Keys()
        self._owners: dict[str, str] = {}  # of ranks: processes
        self._hosts: dict[asyncio.Task[None], Peer] = {}
        self._workers: set[asyncio.Task[None]] = set()  # of the present attempt
        self._strangers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # the oldest first
        self._named: set[str] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Return when the run is over and all hosts have heard so."""
        async with await asyncio.start_server(self._receive, sock=listener):
            beat_at = 0.0
            while self._membership.phase is not Phase.OVER:
                now = time.monotonic()
                self._membership.update(now)
                if now >= beat_at:
                    beat_at = now + BEAT_SECONDS
                    for host in self._hosts.values():
                        host.send({"order": "beat"})
                await asyncio.sleep(TICK_SECONDS)
            if self._hosts:
                await asyncio.wait(self._hosts, timeout=LINGER_SECONDS)

    def _open_attempt(self, number: int) -> None:
        """Forget the attempt before: no worker of it may take part in this one."""
        for task in self._workers:
            task.cancel()
        self._attempt, self._keys, self._owners = number, Keys(), {}

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        try:
            hello = await self._meet(peer, writer)
            if hello.get("as") == "host":
                await self._serve_host(peer, hello)
            else:
                await self._serve_worker(peer, hello)
        except (ValueError, OSError, asyncio.TimeoutError) as error:
            self._refuse(writer, error)
        except asyncio.CancelledError:
            pass  # its attempt is over, or the run
        finally:
            writer.close()

    async def _meet(self, peer: Peer, writer: asyncio.StreamWriter) -> Message:
        """Let a stranger prove that it holds the token, and say what it wants."""
        task = _current_task()
        if len(self._strangers) >= MOST_STRANGERS:
            next(iter(self._strangers.values())).transport.abort()
        self._strangers[task] = writer
        try:
            return await asyncio.wait_for(peer.meet(self._charge.token), HELLO_SECONDS)
        finally:
            del self._strangers[task]

    async def _serve_host(self, peer: Peer, hello: Message) -> None:
        name, room, same, leads = (
            hello.get("name"),
            hello.get("workers"),
            hello.get("same"),
            bool(hello.get("leads")),
        )
        if (
            not isinstance(name, str)
            or not isinstance(room, int)
            or room < 1
            or not isinstance(same, dict)
        ):
            raise ValueError(f"it came as {dict(hello)!r:.200}")
        if (
            refused := "the run is over"
            if self._membership.phase is Phase.OVER
            else self._differences(same)
        ):
            peer.send({"refused": refused})
            _log(f"host {name} is refused: {refused}")
            return
        task, reason = _current_task(), ""
        node = self._membership.join(
            name, room, peer.send, peer.hang_up, time.monotonic(), leads=leads
        )
        self._hosts[task] = peer
        peer.send({"welcome": node.name})
        try:
            while True:
                self._membership.hear(node, await peer.receive(), time.monotonic())
                self._membership.update(time.monotonic())
        except (ValueError, OSError) as error:
            reason = str(error)
        finally:
            del self._hosts[task]
            self._membership.leave(node, reason, time.monotonic())

    async def _serve_worker(self, peer: Peer, hello: Message) -> None:
        task, keys = _current_task(), self._keys
        if refused := self._claim(hello):
            peer.send({"refused": refused})
            raise ValueError(refused)
        self._workers.add(task)
        try:
            peer.send({"welcome": ""})
            while True:
                peer.send(await keys.answer(await peer.receive()))
        except OSError:
            pass  # workers may end at any time: their launchers tell
        finally:
            self._workers.discard(task)

    def _claim(self, hello: Message) -> str:
        """Give a process the rank that it has in the present attempt, for all of its connections; say why not, "" if it has it."""
        if hello.get("attempt") != self._attempt:
            return f"it belongs to attempt {hello.get('attempt')!r:.20} and the present one is {self._attempt}"
        rank, process = str(hello.get("rank")), str(hello.get("process"))
        owner = self._owners.setdefault(rank, process)
        return (
            ""
            if owner == process
            else f"{process:.100} claims rank {rank:.20}, which {owner:.100} has"
        )

    def _differences(self, told: Message) -> str:
        """Say what of a host is not as on the first one, "" for nothing."""
        own = self._charge.same
        return "; ".join(
            f"its {name} is {told.get(name)!r}, and {own[name]!r} on the first host: expected the same on all"
            for name in own
            if told.get(name) != own[name]
        )

    def _refuse(self, writer: asyncio.StreamWriter, error: Exception) -> None:
        address = str(writer.get_extra_info("peername", ("?",))[0])
        if address not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(address)
            reason = str(error) or f"it did not say hello within {HELLO_SECONDS:g} s"
            more = (
                ""
                if len(self._named) < MOST_NAMED
                else "; those from further addresses are refused without a word"
            )
            _log(f"a connection from {address} is refused: {reason}{more}")


class Peer:
    """The coordinator's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = Frames(HELLO_BYTES)
        self._seal: Seal

    async def meet(self, token: str) -> Message:
        """Return what the other end wants, when both have proved that they hold the token. Raises `ValueError` where it has not."""
        nonces = secrets.token_bytes(NONCE_BYTES)
        self._writer.write(frame(encode({"nonce": nonces.hex()})))
        hello = decode(await self._next_body())
        nonces += nonce_of(hello)
        if not is_proof(hello, token, b"member", nonces):
            self._writer.write(frame(encode({"refused": "token"})))
            raise ValueError("it does not have this run's token")
        self._writer.write(frame(encode({"proof": prove(token, b"coordinator", nonces).hex()})))
        self._frames.max_bytes = MAX_BYTES
        self._seal = Seal(token, nonces, coordinator=True)
        return await self.receive()

    def send(self, message: Message) -> None:
        """Send a message, some time soon; one to an end that is gone is lost."""
        if not self._writer.is_closing():
            self._writer.write(self._seal.seal(message))

    def hang_up(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises `OSError` at the end of the connection, `ValueError` for what the other end cannot have sent."""
        return self._seal.open(await self._next_body())

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
