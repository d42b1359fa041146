"""How the workers of one host come to be connected: each listens at an address without a file, and lets in the others alone."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from itertools import count, groupby
from pathlib import Path
from types import NoneType
from typing import Any, Final

from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import Self

from samestep.cluster import ProcessInfo
from samestep.comm.base import FORMING
from samestep.comm.mesh import Mesh, Peer
from samestep.comm.status import WorkerStatus, no_answer, workers
from samestep.comm.store import StoreClient, open_store
from samestep.comm.watchdog import Watchdog
from samestep.errors import WorldError
from samestep.host import lacking_calls

_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): process, user, group


@dataclass(frozen=True)
class MeshAddress:
    """What a worker tells the others of its host, so that they find it: its process, and the abstract address where it listens."""

    pid: int
    address: str


class PeerListener:
    """Where a worker listens for the others of its host until they are connected; a context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"samestep-{os.urandom(16).hex()}"
        self._socket.bind("\0" + address)
        self._socket.listen(socket.SOMAXCONN)
        self.member = MeshAddress(os.getpid(), address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def connect(
        self,
        rank: int,
        members: Mapping[int, MeshAddress],
        start_timeout_seconds: float,
        timeout_seconds: float,
        status: WorkerStatus | None = None,
    ) -> Mesh:
        """Return the mesh of `members`, by rank, of which this worker is one. Raises `WorldError` where some do not come.

        Each worker calls those before it and lets in those after it. The kernel says who is at the
        other end: strangers are refused. `start_timeout_seconds` is for that; later on the mesh
        waits for `timeout_seconds`.
        """
        deadline = time.monotonic() + start_timeout_seconds
        with ExitStack() as exits:
            try:
                sockets = {
                    other: _call(member, exits) for other, member in members.items() if other < rank
                }
                sockets |= self._let_in(
                    {member.pid: other for other, member in members.items() if other > rank},
                    deadline,
                    exits,
                )
                peers = [
                    _peer(other, members[other], sockets[other], exits) for other in sorted(sockets)
                ]
            except OSError as error:
                raise no_answer(rank, FORMING, str(error)) from error
            exits.pop_all()
        return Mesh(rank, sorted(members), peers, timeout_seconds, status)

    def _let_in(
        self, ranks: dict[int, int], deadline: float, exits: ExitStack
    ) -> dict[int, socket.socket]:
        """Return by rank the connections of those processes that `ranks` has, and of no other. Raises `TimeoutError`."""
        sockets: dict[int, socket.socket] = {}
        while ranks:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                missing = " and ".join(
                    f"worker {rank} (process {pid})" for pid, rank in ranks.items()
                )
                raise TimeoutError(f"{missing} did not come") from None
            pid, user = _other_end(connection)
            if user == os.geteuid() and pid in ranks:
                sockets[ranks.pop(pid)] = exits.enter_context(connection)
            else:
                connection.close()
        return sockets


def _call(member: MeshAddress, exits: ExitStack) -> socket.socket:
    connection = exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    connection.connect("\0" + member.address)
    if _other_end(connection) != (member.pid, os.geteuid()):
        raise PermissionError(
            f"process {_other_end(connection)[0]} listens where process {member.pid} should"
        )
    return connection


def _peer(rank: int, member: MeshAddress, connection: socket.socket, exits: ExitStack) -> Peer:
    process = os.pidfd_open(member.pid)
    exits.callback(os.close, process)
    return Peer(rank, member.pid, connection, process)


def _other_end(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, user


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# in which sockets without a file, processes and users have one name for all
NAMESPACES = ("net", "pid", "user")
# of the timeout, for all to come: what is started together comes together
START_SHARE: Final = 0.25
LEAST_START_SECONDS: Final = 30.0  # unless that is more than the timeout
PART_SECONDS: Final = 3.0
PAUSE_SECONDS: Final = 0.0005  # between looks who came
UNFORMED: Final = "unformed"  # the key of why no world forms, and how many workers are to know
KNOWING: Final = "knowing"  # the key of how many do
_worlds_formed = count()  # a store prefix of its own for each world that this process forms


@dataclass(frozen=True)
class PeerInfo:
    """What a worker tells the others: where it runs, and where those of the same `home` find its door; None where it shares nothing."""

    host: str
    pid: int
    home: str | None
    address: str | None

    @classmethod
    def read(cls, rank: int, told: Any) -> PeerInfo:
        """Return the offer of worker `rank`. Raises `WorldError` where a stranger wrote into the store."""
        kinds: dict[str, tuple[type, ...]] = {
            "host": (str,),
            "pid": (int,),
            "home": (str, NoneType),
            "address": (str, NoneType),
        }
        if (
            isinstance(told, dict)
            and told.keys() == kinds.keys()
            and all(isinstance(told[name], kind) for name, kind in kinds.items())
        ):
            return cls(**told)
        raise _stranger(f"{str(told)[:80]!r} stands in the store as worker {rank}'s offer")


@dataclass(frozen=True)
class Rendezvous:
    """What a worker knows before its world exists: `hosts` as in `World`, the `mesh` of its own if that has other workers."""

    rank: int
    size: int
    hosts: Sequence[range]
    mesh: Mesh | None
    store: Store
    status: WorkerStatus
    timeout_seconds: float


def form(place: ProcessInfo, timeout_seconds: float, *, share: bool) -> Rendezvous:
    """Meet the other workers; with `share`, find those that share this one's memory. Raises `WorldError` where some do not come."""
    seconds = max(START_SHARE * timeout_seconds, min(timeout_seconds, LEAST_START_SECONDS))
    home = _home(place) if share else None
    try:
        store, line = open_store(place, f"samestep/{next(_worlds_formed)}", seconds)
        with PeerListener() if home else nullcontext() as door:
            own = PeerInfo(
                socket.gethostname(), os.getpid(), home, door.member.address if door else None
            )
            offers = _exchange_offers(line, place, own, seconds)
            hosts = _hosts([offer.home for offer in offers])
            watch = Watchdog(line, place.rank, place.world_size, timeout_seconds)
            neighbours = next(ranks for ranks in hosts if place.rank in ranks)
            members = {
                rank: MeshAddress(offers[rank].pid, offers[rank].address or "")
                for rank in neighbours
            }
            try:
                mesh = (
                    door.connect(place.rank, members, seconds, timeout_seconds, watch)
                    if door and len(members) > 1
                    else None
                )
            except BaseException:
                watch.close()
                raise
    except OSError as error:
        raise WorldError(
            f"worker {place.rank} got no answer from the others while {FORMING}: {error}"
        ) from error
    except ValueError as error:
        raise _stranger(f"the store holds what is no JSON: {error}") from None
    return Rendezvous(place.rank, place.world_size, hosts, mesh, store, watch, timeout_seconds)


def _exchange_offers(
    line: StoreClient, place: ProcessInfo, own: PeerInfo, seconds: float
) -> list[PeerInfo]:
    """Return every worker's offer by rank. Raises `WorldError` for the ranks that nobody or two workers have."""
    keys = [f"offer/{rank}" for rank in range(place.world_size)]
    first = PeerInfo.read(place.rank, line.put_first(keys[place.rank], asdict(own)))
    if first != own:
        twice = f"two workers have rank {place.rank}: {_where(first)} and {_where(own)}; expected a rank of its own for each"
        line.put_first(UNFORMED, [twice, place.world_size])
    deadline, pause = time.monotonic() + seconds, PAUSE_SECONDS
    while first != own or not line.has(keys):
        if (unformed := line.get(UNFORMED)) is not None:
            reason, coming = unformed
            _part(line, coming)
            raise WorldError(
                f"{reason}: look at what started them (worker {place.rank}, while {FORMING}, was told {place.source})"
            )
        if time.monotonic() > deadline:
            missing = [rank for rank, key in enumerate(keys) if not line.has([key])]
            late = f"{workers(missing)} did not come within {seconds:g} s; expected all, or more timeout where some start late"
            line.put_first(UNFORMED, [late, place.world_size - len(missing)])
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_SECONDS * place.world_size)  # the store answers everybody
    return [PeerInfo.read(rank, line.get(key)) for rank, key in enumerate(keys)]


def _part(line: StoreClient, coming: int) -> None:
    """Say that this worker knows why no world forms; the one with which the store goes waits until as many know as came or are coming."""
    knowing = line.count(KNOWING)
    deadline = time.monotonic() + PART_SECONDS
    while line.keeps_store and knowing < coming and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        knowing = line.get(KNOWING)


def _where(offer: PeerInfo) -> str:
    return f"process {offer.pid} on host {offer.host}"


def _stranger(found: str) -> WorldError:
    return WorldError(
        f"{found}; expected only this run's workers at MASTER_ADDR and MASTER_PORT: choose a port that nobody else uses"
    )


def _home(place: ProcessInfo) -> str | None:
    """Return what workers have in common that can share memory: a kernel, its namespaces, a user, and who started them as one host's.

    None where the system or this Python lacks something, or refuses it.
    """
    if lacking_calls():
        return None
    try:
        machine = [
            BOOT_ID.read_text().strip(),
            *(str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES),
        ]
    except OSError:
        return None
    return " ".join([*machine, str(os.geteuid()), str(place.rank - place.local_rank)])


def _hosts(names: Sequence[str | None]) -> list[range]:
    """Return the runs of ranks whose host has the same name; one without a name is a host of its own."""
    runs = [
        list(run) for _, run in groupby(range(len(names)), key=lambda rank: names[rank] or rank)
    ]
    return [range(run[0], run[-1] + 1) for run in runs]
