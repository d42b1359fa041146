"""Unauthenticated peers of a run: they know every address and port, but not the token."""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import psutil
from torch.distributed import TCPStore

from samestep.cluster.network import LISTENING, _endpoint

FORK = get_context("fork")
FLOOD = 300  # connections to each address
SOON = timedelta(seconds=1)
AFTER_FIRST_SECONDS = 0.2  # for other ports, after one was a store
NOBODY = 65534  # another user
FORGED = {"host": "forged", "pid": 1, "home": None, "address": None}
# of this version, and of the one before the stores were protected
OFFERS = ("worker/0", "worker/1", "offer/0", "offer/1")
STATUSES = ("heartbeat/0", "heartbeat/1", "beat/0", "beat/1")
SERVER_BYTES = 4096
FILLING = "x" * (1 << 20)
LIMIT_SECONDS = 5.0  # of an attack


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


@dataclass(frozen=True)
class Run:
    """The addresses at which the processes of a run listen; `bomb` exists if a pickle was run."""

    ports: Sequence[tuple[str, int]]
    names: Sequence[str]  # of abstract Unix sockets
    bomb: Path

    @classmethod
    def of(cls, pids: Iterable[int], bomb: Path) -> Run:
        """Find what processes and their descendants listen on."""
        processes: dict[int, psutil.Process] = {}
        for pid in pids:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                processes |= {
                    member.pid: member for member in (process, *process.children(recursive=True))
                }
        ports, inodes = set(), set()
        for process in processes.values():
            with suppress(psutil.Error, OSError):
                links = [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
                inodes |= {link[8:-1] for link in links if link.startswith("socket:")}
                for table in ("tcp", "tcp6"):  # of the process's own network namespace
                    for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines():
                        fields = line.split()
                        if fields[3] == LISTENING and fields[9] in inodes:
                            address, port = _endpoint(fields[1])
                            ports.add((_reachable(str(address)), port))
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        names = {row[7][1:] for row in rows if row[6] in inodes and row[7:] and row[7][0] == "@"}
        return cls(sorted(ports), sorted(names), bomb)

    def connect(self) -> list[socket.socket]:
        """Connect once to every address that accepts a connection."""
        opened = []
        for address in (*self.ports, *self.names):
            kinds = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
            for kind in kinds if isinstance(address, str) else kinds[:1]:
                peer = socket.socket(
                    socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, kind
                )
                peer.settimeout(2.0)
                try:
                    peer.connect(f"\0{address}" if isinstance(address, str) else address)
                    opened.append(peer)
                except OSError:
                    peer.close()
        return opened


def _reachable(address: str) -> str:
    return "127.0.0.1" if address in {"0.0.0.0", "::", "::1"} else address.removeprefix("::ffff:")


def send(run: Run, data: bytes) -> str:
    """Send bytes to every address; return how many took them."""
    peers = run.connect()
    for peer in peers:
        with suppress(OSError):
            peer.sendall(data)
    for peer in peers:
        peer.settimeout(0.05)
        with suppress(OSError):
            while peer.recv(SERVER_BYTES):
                pass
        peer.close()
    return f"sent to {len(peers)} addresses"


def send_garbage(run: Run) -> str:
    """Send lengths and messages that no program of a run sends."""
    for data in (b"\xff" * 4096, b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        send(run, struct.pack(">I", 2**31) + data)
        told = send(run, data)
    return told


def send_pickles(run: Run) -> str:
    """Send a pickle, plain and in the frames of samestep; write it into the store, too."""
    bomb = pickle.dumps(Bomb(run.bomb))
    send(run, bomb)
    told = send(run, struct.pack(">I", len(bomb)) + bomb)
    _write(run, dict.fromkeys((*OFFERS[:0], "gather/0", "objects/0"), bomb.decode("latin-1")))
    return told


def flood(run: Run) -> str:
    """Open many connections to every address and keep them open for a moment."""
    peers = [peer for _ in range(FLOOD) for peer in run.connect()]
    for peer in peers:
        peer.close()
    return f"opened {len(peers)} connections"


def read_store(run: Run) -> str:
    """Read the entries and statuses of workers from the store."""
    keys = (*OFFERS, *STATUSES)
    readable = {
        key
        for store in _stores(run)
        for prefix in _prefixes(store)
        for key in keys
        if store.check([f"{prefix}/{key}"])
        and b"forged" not in store.get(f"{prefix}/{key}")  # not what attackers wrote
    }
    return f"read {', '.join(sorted(readable))}" if readable else "read nothing"


def write_failure(run: Run) -> str:
    """Write an alarm and a failure, which end all workers that believe them."""
    return _write(run, {"alarm": "true", "failure": '"attacked"', "failed": '["attacked", 2]'})


def take_offers(run: Run) -> str:
    """Write the entries of workers, so that others take this process for them."""
    forged = (FORGED | {"nonce": ""}, FORGED)
    entries = {key: json.dumps(forged[key.startswith("offer")]) for key in OFFERS}
    return _write(run, {**entries, "round": '"2/forged"'})


def fill_store(run: Run) -> str:
    """Write megabytes into the store."""
    return _write(run, {f"filling {number}": FILLING for number in range(8)})


def _stores(run: Run) -> list[TCPStore]:
    """Connect to every port that is a store of torch; this needs no secret."""
    stores: list[TCPStore] = []

    def open_store(address: tuple[str, int]) -> None:
        with suppress(RuntimeError):
            store = TCPStore(*address, is_master=False, timeout=SOON)
            store.check(["samestep"])  # other servers accept the connection and then end it
            stores.append(store)

    # daemons: a listener that is no store, or that nobody serves any more, never answers
    threads = [Thread(target=open_store, args=(port,), daemon=True) for port in run.ports]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SOON.total_seconds()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        if stores:  # a run has one
            deadline = min(deadline, time.monotonic() + AFTER_FIRST_SECONDS)
        time.sleep(0.01)
    return list(stores)


def _prefixes(store: TCPStore) -> list[str]:
    rounds = []
    if store.check(["samestep/round"]):
        with suppress(ValueError):
            text = store.get("samestep/round").decode(errors="replace")
            rounds = [f"round/{json.loads(text[text.index(chr(34)) :])}/samestep/0"]
    return ["samestep/0", "attempt/0/samestep/0", "attempt/1/samestep/0", *rounds]


def _write(run: Run, entries: dict[str, str]) -> str:
    stores = _stores(run)
    for store in stores:
        for prefix in (*_prefixes(store), "samestep"):
            for key, value in entries.items():
                store.set(f"{prefix}/{key}", value)
    return "written" if stores else "refused"


ATTACKS: dict[str, Callable[[Run], str]] = {
    "reads the store": read_store,
    "writes a failure": write_failure,
    "takes a worker's entry": take_offers,
    "fills the store": fill_store,
    "floods connections": flood,
    "sends pickles": send_pickles,
    "sends garbage and huge lengths": send_garbage,
}


def _seen(name: str, run: Run) -> str:
    try:
        return ATTACKS[name](run)
    except (OSError, RuntimeError) as error:  # the run closed the connection
        return f"refused: {str(error)[:60]}"


def attack(run: Run, names: Iterable[str] = tuple(ATTACKS)) -> dict[str, str]:
    """Attack a run from other processes; return what the attackers saw by attack.

    Root attacks as another user, too, whose attacks are named `other user NAME`.
    """
    names = tuple(names)
    seen = {name: _in_process(name, run) for name in names}
    if os.geteuid() == 0:
        seen |= {f"other user {name}": _in_process(name, run, NOBODY) for name in names}
    return seen


def _in_process(name: str, run: Run, user: int | None = None) -> str:
    receiver, sender = FORK.Pipe(duplex=False)

    def body() -> None:
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch prints stacks
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        if user is not None:
            os.setresuid(user, user, user)
        sender.send(_seen(name, run))

    process = FORK.Process(target=body)
    process.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(LIMIT_SECONDS) else "no answer"
    except EOFError:
        return "refused"
    finally:
        process.kill()
        process.join()
        receiver.close()
