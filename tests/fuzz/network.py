"""Targets that read what other processes send, and what they write into the store of a run."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

from samestep.cluster import ProcessInfo
from samestep.comm import rendezvous, store_server
from samestep.comm.base import Alone, World
from samestep.comm.link import MAX_BYTES, Frames, Link, Seal, decode, encode, frame
from samestep.comm.mesh import StatusBoard, boards
from samestep.comm.rendezvous import OUTCOME, PeerInfo
from samestep.comm.signing import prove, sign
from samestep.comm.status import Heartbeat, report_hang
from samestep.comm.store import ROUND, StoreClient, join_round
from samestep.comm.store_server import StoreServer
from samestep.comm.watchdog import ALARM, FAILURE, Watchdog
from samestep.errors import WorldError
from samestep.launch.preemption import CLOUDS
from tests.fuzz import mutate
from tests.fuzz.target import Target

TOKEN = "a token of the fuzzer"
NONCE = bytes(32)
WORKER = {"as": "worker", "attempt": 0, "rank": 1, "process": "here:7"}
REQUESTS = (
    {"do": "set", "key": "rank", "value": "MA=="},
    {"do": "append", "key": "rank", "value": "MA=="},
    {"do": "add", "key": "rank", "amount": 1},
    {"do": "get", "key": "rank", "seconds": 0.0},
    {"do": "wait", "keys": ["rank"], "seconds": 0.0},
    {"do": "compare_set", "key": "rank", "expected": "", "value": "MA=="},
    {"do": "delete", "key": "rank"},
)
INFOS = [PeerInfo("here", 7 + rank, "home", f"samestep-{rank}", "0" * 32) for rank in range(2)]
BEAT = Heartbeat(
    rank=1, host="here", pid=1, machine="one", at=0.0, step=3, activity="computing", collective="",
    seconds=0.5, left=False, failed=False, stack=["File dataloader.py"],
)  # fmt: skip


def targets() -> list[Target]:
    """Return the targets that read what other processes send."""
    return [*_servers(), *_clients(), *_entries(), *_gathered(), _clouds()]


@dataclass(frozen=True)
class _Session:
    """What a peer sends to the store's server, with the right token or a guess of it."""

    token: str
    hello: dict[str, Any]
    requests: list[Any]
    raw: bytes | None  # sent instead of a proof


class _Writer:
    """A stream writer that hands what the server sends to the peer."""

    def __init__(self) -> None:
        self.sent, self.transport = Frames(MAX_BYTES), self

    def write(self, data: bytes) -> None:
        self.sent.feed(data)

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _: str) -> None:
        return None

    def close(self) -> None:
        pass

    abort = close


async def _converse(session: _Session) -> bool:
    """Serve a peer to the end of its connection; return whether it reached the store."""
    server, reader, writer = StoreServer(TOKEN, 0), asyncio.StreamReader(), _Writer()
    serving = asyncio.ensure_future(server.serve_peer(reader, writer))  # type: ignore[arg-type]
    while (first := writer.sent.next()) is None:  # noqa: ASYNC110  nothing else would set an event
        await asyncio.sleep(0)
    nonces = bytes.fromhex(decode(first)["nonce"]) + NONCE
    if session.raw is None:
        proof = prove(session.token, "member", nonces)
        reader.feed_data(frame(encode({"nonce": NONCE.hex(), "proof": proof})))
        seal = Seal(session.token, nonces, coordinator=False)
        for message in (session.hello, *session.requests):
            with suppress(ValueError):  # too long
                reader.feed_data(seal.seal(message))
    else:
        reader.feed_data(session.raw)
    reader.feed_eof()
    await asyncio.wait_for(serving, 5.0)
    assert not server._unauthenticated
    return bool(server._rank_owners)


def _servers() -> list[Target]:
    loop = cache(asyncio.new_event_loop)

    def stranger(random: Random) -> _Session:
        hello = {"nonce": NONCE.hex(), "proof": "0" * 64}
        body = mutate.as_json(random, mutate.of_json(random, hello))
        data = frame(body) + frame(mutate.as_json(random, mutate.of_json(random, WORKER)))
        raw = mutate.of_bytes(random, data) if random.random() < 0.7 else data
        guess = random.choice((None, raw))
        token = mutate.text(random, "token").encode(errors="replace").decode()
        return _Session(token, WORKER, [*REQUESTS], guess)

    def worker(random: Random) -> _Session:
        hello = mutate.of_json(random, WORKER) if random.random() < 0.3 else WORKER
        requests = [
            mutate.of_json(random, request) if random.random() < 0.3 else request
            for request in REQUESTS
        ]
        return _Session(TOKEN, hello, requests, None)

    def refused(session: _Session) -> None:
        with patch.object(store_server, "log"):
            served = loop().run_until_complete(_converse(session))
        assert not served, "it served a peer without the token"

    def serve(session: _Session) -> None:
        with patch.object(store_server, "log"):
            loop().run_until_complete(_converse(session))

    return [
        Target("strangers", stranger, refused, ()),
        Target("workers", worker, serve, ()),
    ]


def _clients() -> list[Target]:
    greeting = {"nonce": NONCE.hex()}
    orders = ({"order": "heartbeat"}, {"value": "MA=="}, {"late": ["rank"]}, {"refused": "rank"})

    def link(data: bytes) -> Link:
        """Return a connection to a server that has sent some data and disconnected."""
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(data)
        made = object.__new__(Link)
        made._frames, made._socket, made._deadline = Frames(MAX_BYTES), ours, time.monotonic() + 5.0
        ours.settimeout(5.0)
        return made

    def server(random: Random) -> Link:
        answers = (greeting, random.choice(({"refused": "token"}, {"proof": "0" * 64})))
        bodies = [mutate.as_json(random, mutate.of_json(random, answer)) for answer in answers]
        data = b"".join(map(frame, bodies))
        return link(mutate.of_bytes(random, data) if random.random() < 0.5 else data)

    def authenticate(connection: Link) -> None:
        try:
            connection._authenticate(TOKEN)
        finally:
            connection.close()
        raise AssertionError("it accepted a server without a token")

    def sealed(random: Random) -> Link:
        seal = Seal(TOKEN, NONCE, coordinator=True)
        data = b"".join(map(seal.seal, orders))
        connection = link(mutate.of_bytes(random, data))
        connection._seal = Seal(TOKEN, NONCE, coordinator=False)
        return connection

    def receive(connection: Link) -> None:
        """Expect only whole messages, in their order, until an error."""
        received: list[Any] = []
        try:
            while True:
                received += connection.poll()
        except OSError:
            pass
        finally:
            connection.close()
        assert received == list(orders[: len(received)]), "it accepted what nobody sent"

    return [
        Target("servers", server, authenticate, (OSError, ValueError, WorldError)),
        Target("orders", sealed, receive, ()),
    ]


class _Values:
    """A store without connection: values by key."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        return amount + 7

    def compare_set(self, key: str, expected: str | bytes, value: bytes) -> bytes:
        held = self.values.get(key, b"")
        if held == (expected if isinstance(expected, bytes) else expected.encode()):
            self.set(key, value)
        return self.values.get(key, b"")


class _Client(StoreClient):
    """A client of such a store."""

    def __init__(self, values: dict[str, bytes], key: bytes | None) -> None:
        self.hosts_store, self.seconds, self.key, self._is_own = True, None, key, False
        self._held = _Values(values)

    def _request(self, method: str, *arguments: Any) -> Any:
        return getattr(self._held, method)(*arguments)

    def close(self) -> None:
        pass


def _entries() -> list[Target]:
    process = ProcessInfo(0, 2, 0, 2, "127.0.0.1", 1, "variables")
    beats = {f"heartbeat/{rank}": [asdict(BEAT) | {"rank": rank}] for rank in (1, 2)}

    def entries(likely: dict[str, Any]) -> Callable[[Random], _Client]:
        def make(random: Random) -> _Client:
            values = {}
            for key, value in likely.items():
                if random.random() < 0.7:
                    changed = mutate.of_json(random, value) if random.random() < 0.7 else value
                    values[key] = mutate.as_json(random, changed)
                    if random.random() < 0.2:
                        values[key] = mutate.of_bytes(random, values[key])
            return _Client(values, random.choice((None, None, b"key")))

        return make

    def find(client: _Client) -> None:
        with patch.multiple(rendezvous, LINGER_SECONDS=0.0):
            rendezvous._gather_infos(client, process, INFOS[0], 0.0)
        assert client.key is None, "it accepted an entry that is not signed"

    def join(client: _Client) -> None:
        assert len(join_round(client, process, 0.0)) <= 40

    def diagnose(client: _Client) -> None:
        dog = object.__new__(Watchdog)
        dog._client, dog._size, dog._machine, dog._failure = client, 3, "one", None
        dog.rank, dog._board, dog._boards = (
            0,
            StatusBoard(0, range(1)),
            boards([range(1), range(1, 3)]),
        )
        assert isinstance(dog._describe_exits(), str)
        heartbeats = [beat for _, beat in sorted(dog._heartbeats().items())]
        assert not heartbeats or client.key is None, "it read a status that is not signed"
        assert report_hang(BEAT, heartbeats, 3, 1.0).text.encode(errors="replace")

    infos = {"worker/1": asdict(INFOS[1]), "worker/0": asdict(INFOS[0])}
    statuses = {**beats, FAILURE: "worker 1 failed first", ALARM: True}
    return [
        Target(
            "entries",
            entries({**infos, OUTCOME: {"failed": "two workers have rank 1", "expected": 2}}),
            find,
            (WorldError, ValueError),
        ),
        Target("rounds", entries({ROUND: "2/0123"}), join, (ValueError, OSError)),
        Target("statuses", entries(statuses), diagnose, (ValueError,), reads_elsewhere=True),
    ]


class _Gathered(Alone):
    """A world whose other worker sent some data."""

    size = 2
    all_gather_json = World.all_gather_json
    begin_all_gather_json = World.begin_all_gather_json
    all_gather_object = World.all_gather_object
    broadcast_object = World.broadcast_object

    def __init__(self, data: bytes, key: bytes | None) -> None:
        self._data, self.signing_key = data, key

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return [data, self._data]


def _gathered() -> list[Target]:
    what = "looking for a snapshot"

    def message(random: Random) -> bytes:
        value = [what, {"names": ["step-00000002"], "fault": "", "unanswered": False}]
        data = mutate.as_json(random, mutate.of_json(random, value))
        return mutate.of_bytes(random, data) if random.random() < 0.3 else data

    def read(data: bytes) -> None:
        assert len(_Gathered(data, None).all_gather_json(1, what)) == 2

    def signed(random: Random) -> bytes:
        data = mutate.of_bytes(random, json.dumps(what).encode())
        signed = sign(b"key", json.dumps([0, 0, what]), data)
        return random.choice((data, signed, random.randbytes(32) + data))

    def verify(data: bytes) -> None:
        _Gathered(data, b"key").all_gather_object(1, what)
        raise AssertionError("it accepted an object that worker 1 did not sign")

    return [
        Target("gathered", message, read, (WorldError,)),
        Target("objects", signed, verify, (WorldError,)),
    ]


def _clouds() -> Target:
    event = {"EventType": "Preempt", "Resources": ["rank"], "NotBefore": ""}
    likely = (
        {"action": "stop", "time": "rank"}, {"noticeTime": "rank"}, {"Events": [event]}, "FALSE",
        "TERMINATE_ON_HOST_MAINTENANCE", "rank",
    )  # fmt: skip

    def answers(random: Random) -> tuple[str, list[str | None]]:
        texts: list[str | None] = [None]
        for answer in random.choices(likely, k=4):
            changed = mutate.of_json(random, answer) if random.random() < 0.7 else answer
            written = mutate.as_json(random, changed).decode(errors="replace")
            texts.append(changed if isinstance(changed, str) else written)
        return random.choice(sorted(CLOUDS)), random.sample(texts, k=4)

    def ask(answered: tuple[str, list[str | None]]) -> None:
        name, texts = answered
        notice = CLOUDS[name].ask(lambda *_: texts.pop() if texts else None)
        assert notice is None or len(notice.text) < 200

    return Target("clouds", answers, ask, (ValueError, RecursionError))
