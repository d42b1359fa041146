"""The coordinator of a run on several hosts: a process next to the first host's launcher.

A host's launcher may lose its connection and continue over another one: every report and order
arrives once. Its session ends when its process exits, or is silent for `LOST_SECONDS`. The
coordinator carries reports and orders between hosts and `Membership`, and serves the store of the
current attempt. It needs no torch, so it listens immediately and responds while launchers import
and fork.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from samestep.comm.admission import log, start_server
from samestep.comm.link import Delivery
from samestep.comm.store_server import KeyValueStore, PeerExitedError, StoreConnection, StoreServer
from samestep.host import RunningClock, end_with_parent, raise_file_limit
from samestep.launch.attempt import ElasticPolicy, Message, Node, Phase
from samestep.launch.membership import LOST_SECONDS, Membership

TICK_SECONDS: Final = 0.05
HEARTBEAT_SECONDS: Final = 1.0
CONNECTIONS: Final = 2  # of a worker


@dataclass(frozen=True)
class CoordinatorConfig:
    """The run's token and policy, and the `settings` by name that must be equal on all hosts."""

    token: str = field(repr=False)
    policy: ElasticPolicy
    settings: Mapping[str, str]


def coordinate(config: CoordinatorConfig, listener: socket.socket, launcher_pid: int) -> None:
    """Run a coordinator in a fork of the first host's launcher, at most until it exits."""
    end_with_parent(launcher_pid)
    gc.freeze()  # objects of the launcher may wait for its threads, which a fork does not have
    os.setsid()  # Ctrl-C is for the launcher
    raise_file_limit()
    asyncio.run(Coordinator(config).serve(listener))


class HostSession:
    """A host's launcher, over any number of connections: `peer` is the current one, if any."""

    def __init__(self, name: str, workers: int, *, leads: bool) -> None:
        now = time.monotonic()
        self.node = Node(name, workers, self.send, now, self.close, leads)
        self.delivery = Delivery()
        self.peer: StoreConnection | None = None
        self.is_closed = False

    def resume(self, peer: StoreConnection, received: object) -> None:
        """Continue over a connection of a launcher that has received this many messages."""
        self.delivery.resume(received)
        if self.peer is not None:
            self.peer.disconnect()
        self.peer, self.node.last_seen = peer, time.monotonic()
        peer.send({"welcome": self.node.name, "received": self.delivery.received})
        self._send_due()

    def send(self, order: Message) -> None:
        """Send an order, over the next connection if there is none now."""
        self.delivery.add(order)
        self._send_due()

    def _send_due(self) -> None:
        if self.peer is not None:
            for order in self.delivery.due():
                self.peer.send(order)

    def close(self) -> None:
        """End the session: the launcher can join again, but not continue."""
        self.is_closed = True
        if self.peer is not None:
            self.peer.disconnect()
            self.peer = None


class Coordinator(StoreServer):
    """Serves the hosts of one run and their workers."""

    def __init__(self, config: CoordinatorConfig) -> None:
        super().__init__(config.token, -1)
        self._config = config
        self._membership = Membership(
            config.policy, time.monotonic(), open_attempt=self._open_attempt, log=log
        )
        self._sessions: dict[str, HostSession] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Serve until the run is finished and all hosts have been notified."""
        async with await start_server(self.serve_peer, listener):
            heartbeat_at, end_at, clock = 0.0, math.inf, RunningClock()
            while (now := time.monotonic()) < end_at:
                clock.now()
                if clock.resumed_at >= now:  # nobody is late yet
                    self._membership.see_all(now)
                self._sessions = {
                    name: host for name, host in self._sessions.items() if not host.is_closed
                }
                if self._membership.phase is not Phase.FINISHED:
                    self._membership.update(now)
                elif self._sessions:  # hosts that are disconnected may still receive the end
                    end_at = min(end_at, now + LOST_SECONDS)
                else:
                    break
                if now >= heartbeat_at:
                    heartbeat_at = now + HEARTBEAT_SECONDS
                    for host in self._sessions.values():
                        if host.peer is not None:
                            host.send({"order": "heartbeat"})
                await asyncio.sleep(TICK_SECONDS)

    def _open_attempt(self, number: int) -> None:
        """Disconnect the workers of the previous attempt, and open a new store."""
        for task in self._workers:
            task.cancel()
        self._attempt, self._store, self._rank_owners = number, KeyValueStore(), {}

    async def _serve(self, peer: StoreConnection, hello: Message) -> None:
        if hello.get("as") == "host":
            await self._serve_host(peer, hello)
        else:
            await super()._serve(peer, hello)

    async def _serve_host(self, peer: StoreConnection, hello: Message) -> None:
        session = self._sessions.get(str(hello.get("session")))
        if session is None or session.is_closed:
            session = self._join(peer, hello)
        if session is not None:
            session.resume(peer, hello.get("received") or 0)
            await self._receive(session, peer)

    def _join(self, peer: StoreConnection, hello: Message) -> HostSession | None:
        """Add a host to the run, unless it is refused."""
        name, workers, settings = (hello.get(key) for key in ("name", "workers", "settings"))
        workers = workers if isinstance(workers, int) else 0
        if not isinstance(name, str) or not isinstance(settings, dict) or workers < 1:
            raise ValueError(f"invalid hello from a host: {dict(hello)!r:.200}")
        is_finished = self._membership.phase is Phase.FINISHED
        if refused := "the run is over" if is_finished else self._differences(settings):
            log(f"refused host {name}: {refused}")
            peer.send({"refused": refused})
            return None
        if hello.get("received") is not None:
            peer.send({"unknown": "session"})  # it ends its workers, which are not in this run
            return None
        session = HostSession(name, workers, leads=bool(hello.get("leads")))
        self._membership.join(session.node)
        self._max_unauthenticated += CONNECTIONS * workers  # they all connect at once
        self._sessions[str(hello.get("session"))] = session
        return session

    async def _receive(self, session: HostSession, peer: StoreConnection) -> None:
        node = session.node
        try:
            while True:
                message = session.delivery.accept(await peer.receive())
                self._membership.receive(node, message, time.monotonic())
                self._membership.update(time.monotonic())
        except (ValueError, PeerExitedError) as error:
            if session.peer is peer:  # not a connection that has been replaced
                self._membership.leave(node, str(error), time.monotonic())
                session.close()
        except OSError:  # of the network: the host has some time to connect again
            if session.peer is peer:
                session.peer = None

    def _differences(self, settings: Message) -> str:
        """Describe settings of a host that differ from the first host's, "" for none."""
        return "; ".join(
            f"{name} must be {expected!r} as on the first host, got {settings.get(name)!r}"
            for name, expected in self._config.settings.items()
            if settings.get(name) != expected
        )
