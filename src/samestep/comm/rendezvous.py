"""Rendezvous: workers find each other, and connect to each other if they share memory."""

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
from typing import Any, Final

from torch.distributed.distributed_c10d import Store
from typing_extensions import Self

from samestep.cluster import ProcessInfo
from samestep.comm.mesh import Mesh, Peer
from samestep.comm.status import FORMING, WorkerStatus, list_workers, no_response
from samestep.comm.store import StoreClient, open_store
from samestep.comm.watchdog import Watchdog
from samestep.errors import WorldError
from samestep.host import missing_system_calls

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# in which abstract sockets, process ids and user ids have the same meaning
NAMESPACES = ("net", "pid", "user")
# of the timeout, in which all must arrive: workers are started at the same time
START_SHARE: Final = 0.25
MIN_START_SECONDS: Final = 30.0  # unless that is more than the timeout
LINGER_SECONDS: Final = 3.0
PAUSE_SECONDS: Final = 0.0005  # between checks for other workers
FAILED: Final = "failed"  # key: the reason for a failure, and how many workers to inform
INFORMED: Final = "informed"  # key: how many were informed
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred of unix(7): process, user, group
_worlds_formed = count()  # gives each world of this process its own store prefix


@dataclass(frozen=True)
class PeerInfo:
    """A worker's entry in the store.

    Workers with the same `home` can share memory, and listen at `address`. Both are None if this
    worker shares no memory.
    """

    host: str
    pid: int
    home: str | None
    address: str | None

    @classmethod
    def read(cls, rank: int, value: Any) -> PeerInfo:
        """Return the entry of worker `rank`. Raises `WorldError` if another program wrote it."""
        text: Any = str | None
        kinds: dict[str, Any] = {"host": str, "pid": int, "home": text, "address": text}
        if (
            isinstance(value, dict)
            and value.keys() == kinds.keys()
            and all(isinstance(value[name], kind) for name, kind in kinds.items())
        ):
            return cls(**value)
        raise _foreign_store(f"the store has {str(value)[:80]!r} as the entry of worker {rank}")

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


class PeerListener:
    """Accepts connections from the other workers of the host; a context manager.

    Its address is abstract, so there is no socket file. The kernel reports the process at the other
    end, and connections of other processes are refused.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address = f"samestep-{os.urandom(16).hex()}"
        self._socket.bind("\0" + self.address)
        self._socket.listen(socket.SOMAXCONN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def connect(
        self,
        rank: int,
        members: Mapping[int, PeerInfo],
        start_timeout_seconds: float,
        timeout_seconds: float,
        status: WorkerStatus | None = None,
    ) -> Mesh:
        """Return the mesh of `members` by rank, including this worker.

        Each worker connects to lower ranks and accepts higher ones within `start_timeout_seconds`.
        Calls of the mesh then use `timeout_seconds`. Raises `WorldError` if workers are missing.
        """
        deadline = time.monotonic() + start_timeout_seconds
        earlier = {other: member for other, member in members.items() if other < rank}
        later = {member.pid: other for other, member in members.items() if other > rank}
        with ExitStack() as exits:
            try:
                sockets = {other: _connect(member, exits) for other, member in earlier.items()}
                sockets |= self._accept(later, deadline, exits)
                peers = []
                for other, connection in sorted(sockets.items()):
                    pidfd = os.pidfd_open(members[other].pid)
                    exits.callback(os.close, pidfd)
                    peers.append(Peer(other, members[other].pid, connection, pidfd))
            except OSError as error:
                raise no_response(rank, FORMING, str(error)) from error
            exits.pop_all()
        return Mesh(rank, sorted(members), peers, timeout_seconds, status)

    def _accept(
        self, ranks: dict[int, int], deadline: float, exits: ExitStack
    ) -> dict[int, socket.socket]:
        """Return the connections of the processes in `ranks` by rank. Raises `TimeoutError`."""
        sockets: dict[int, socket.socket] = {}
        while ranks:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                missing = (f"worker {rank} (process {pid})" for pid, rank in ranks.items())
                raise TimeoutError(f"timed out waiting for {' and '.join(missing)}") from None
            pid, user = _credentials(connection)
            if user == os.geteuid() and pid in ranks:
                sockets[ranks.pop(pid)] = exits.enter_context(connection)
            else:
                connection.close()
        return sockets


def _connect(member: PeerInfo, exits: ExitStack) -> socket.socket:
    connection = exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    connection.connect(f"\0{member.address}")
    pid, user = _credentials(connection)
    if (pid, user) != (member.pid, os.geteuid()):
        raise PermissionError(f"expected process {member.pid} to listen, got process {pid}")
    return connection


def _credentials(connection: socket.socket) -> tuple[int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


@dataclass(frozen=True)
class Rendezvous:
    """The result of `rendezvous`, from which a world is made.

    `hosts` is as in `World`. `mesh` connects the workers of this host, None if there is only one.
    """

    rank: int
    size: int
    hosts: Sequence[range]
    mesh: Mesh | None
    store: Store
    status: WorkerStatus
    timeout_seconds: float


def rendezvous(process: ProcessInfo, timeout_seconds: float, *, share: bool) -> Rendezvous:
    """Find all workers; with `share`, connect those that share memory. Raises `WorldError`."""
    rank, size = process.rank, process.world_size
    seconds = max(START_SHARE * timeout_seconds, min(timeout_seconds, MIN_START_SECONDS))
    home = _home(process) if share else None
    try:
        store, client = open_store(process, f"samestep/{next(_worlds_formed)}", seconds)
        with PeerListener() if home else nullcontext() as listener:
            address = listener.address if listener else None
            own = PeerInfo(socket.gethostname(), os.getpid(), home, address)
            infos = _exchange_infos(client, process, own, seconds)
            hosts = _hosts([info.home for info in infos])
            local_ranks = next(ranks for ranks in hosts if rank in ranks)
            watchdog = Watchdog(client, rank, size, timeout_seconds)
            mesh = None
            if listener and len(local_ranks) > 1:
                members = {other: infos[other] for other in local_ranks}
                try:
                    mesh = listener.connect(rank, members, seconds, timeout_seconds, watchdog)
                except BaseException:
                    watchdog.close()
                    raise
    except OSError as error:
        raise WorldError(
            f"worker {rank} could not reach other workers while {FORMING}: {error}"
        ) from error
    except ValueError as error:
        raise _foreign_store(f"the store has invalid JSON: {error}") from None
    return Rendezvous(rank, size, hosts, mesh, store, watchdog, timeout_seconds)


def _exchange_infos(
    client: StoreClient, process: ProcessInfo, own: PeerInfo, seconds: float
) -> list[PeerInfo]:
    """Return every worker's entry by rank. Raises `WorldError` for missing and duplicate ranks."""
    rank, size = process.rank, process.world_size
    keys = [f"worker/{other}" for other in range(size)]
    first = PeerInfo.read(rank, client.put_first(keys[rank], asdict(own)))
    if first != own:
        reason = f"two workers have rank {rank}: {first} and {own}; ranks must be unique"
        client.put_first(FAILED, [reason, size])
    deadline, pause = time.monotonic() + seconds, PAUSE_SECONDS
    while first != own or not client.has(keys):
        if (failed := client.get(FAILED)) is not None:
            reason, expected = failed
            _wait_for_informed(client, expected)
            raise WorldError(
                f"{reason}; check the launcher (worker {rank}, while {FORMING}, "
                f"was started with {process.source})"
            )
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys) if not client.has([key])]
            reason = (
                f"timed out after {seconds:g} s waiting for {list_workers(missing)} to start; "
                "increase timeout if some start late"
            )
            client.put_first(FAILED, [reason, size - len(missing)])
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_SECONDS * size)  # one store answers all workers
    return [PeerInfo.read(other, client.get(key)) for other, key in enumerate(keys)]


def _wait_for_informed(client: StoreClient, expected: int) -> None:
    """Count this worker; on the store's host, wait until all expected workers are informed."""
    informed = client.count(INFORMED)
    deadline = time.monotonic() + LINGER_SECONDS
    while client.hosts_store and informed < expected and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        informed = client.get(INFORMED)


def _foreign_store(found: str) -> WorldError:
    return WorldError(
        f"{found}; another program uses MASTER_ADDR and MASTER_PORT: choose an unused port"
    )


def _home(process: ProcessInfo) -> str | None:
    """Return text that is equal for workers that can share memory; None if this one cannot.

    They have the same kernel, namespaces, user, and first rank on their host. A worker cannot if
    the system or this Python lacks a system call, or refuses it.
    """
    if missing_system_calls():
        return None
    try:
        namespaces = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES]
        boot_id = BOOT_ID.read_text().strip()
    except OSError:
        return None
    first_rank = process.rank - process.local_rank
    return " ".join([boot_id, *namespaces, str(os.geteuid()), str(first_rank)])


def _hosts(homes: Sequence[str | None]) -> list[range]:
    """Return ranges of ranks with the same home; a worker without one is a separate host."""
    runs = groupby(range(len(homes)), key=lambda rank: homes[rank] or rank)
    ranks = [list(run) for _, run in runs]
    return [range(run[0], run[-1] + 1) for run in ranks]
