"""Rendezvous: workers find each other, and connect to each other if they share memory."""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count, groupby
from typing import Any, Final

from torch.distributed.distributed_c10d import Store
from typing_extensions import Self

from samestep.cluster import ProcessInfo
from samestep.comm.link import parse, to_bytes, to_text
from samestep.comm.mesh import Mesh, MeshPeer, StatusBoard, create_boards
from samestep.comm.signing import derive
from samestep.comm.status import FORMING, WorkerStatus, list_workers, no_response
from samestep.comm.store import PAUSE_SECONDS, StoreClient, open_store
from samestep.comm.watchdog import OnStall, Watchdog
from samestep.config import TOKEN
from samestep.errors import ConfigError, WorldError
from samestep.host import kernel_id, memory_id, missing_system_calls, peer_credentials

# of the timeout, in which all must arrive: workers are started at the same time
START_SHARE: Final = 0.25
MIN_START_SECONDS: Final = 30.0  # unless that is more than the timeout
LINGER_SECONDS: Final = 10.0
REPORT_SECONDS: Final = 3.0  # for one worker to report which have not started
MAX_ENTRIES_BYTES: Final = 1 << 28
OUTCOME: Final = "outcome"  # key: all entries, or a failure and how many workers to inform
REPORTER: Final = "forming/reporter"  # key: the rank that reports missing workers
INFORMED: Final = "informed"  # key: how many were informed
_worlds_formed = count()  # gives each world of this process its own store prefix


@dataclass(frozen=True)
class PeerInfo:
    """A worker's entry in the store.

    Workers with the same `home` are on one host, None if unknown. Those that share memory listen at
    `address`. `nonce` is random text, from which this world's signing key is derived. The first
    worker of a host opened the memory of its status boards as `statuses`. `gpus` names the worker's
    GPUs: equal names are the same GPU.
    """

    host: str
    pid: int
    home: str | None
    address: str | None
    nonce: str = ""
    statuses: int | None = None
    gpus: Sequence[str] = ()

    @classmethod
    def read(cls, rank: int, value: Any) -> PeerInfo:
        """Return the entry of worker `rank`. Raises `WorldError` if another program wrote it."""
        text: Any = str | None
        kinds = {"host": str, "pid": int, "home": text, "address": text, "nonce": str}
        kinds |= {"statuses": int | None, "gpus": list}
        if (
            isinstance(value, dict)
            and value.keys() == kinds.keys()
            and all(isinstance(value[name], kind) for name, kind in kinds.items())
            and all(isinstance(name, str) for name in value["gpus"])
        ):
            return cls(**{**value, "gpus": tuple(value["gpus"])})
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
                    peers.append(MeshPeer(other, members[other].pid, connection, pidfd))
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
            pid, user = peer_credentials(connection)
            if user == os.geteuid() and pid in ranks:
                sockets[ranks.pop(pid)] = exits.enter_context(connection)
            else:
                connection.close()
        return sockets


def _connect(member: PeerInfo, exits: ExitStack) -> socket.socket:
    connection = exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    connection.connect(f"\0{member.address}")
    pid, user = peer_credentials(connection)
    if (pid, user) != (member.pid, os.geteuid()):
        raise PermissionError(f"expected process {member.pid} to listen, got process {pid}")
    return connection


@dataclass(frozen=True)
class Rendezvous:
    """The result of `rendezvous`, from which a world is made.

    `hosts` and `machines` are as in `World`. `mesh` connects the workers of this host, None if
    there is only one. `signing_key` is None without a token. With `nccl`, every worker has its own
    GPUs: NCCL connects them, so they share no memory and each counts as a separate host.
    """

    rank: int
    size: int
    hosts: Sequence[range]
    mesh: Mesh | None
    store: Store
    status: WorkerStatus
    timeout_seconds: float
    signing_key: bytes | None
    nccl: bool = False
    machines: Sequence[range] = ()


def rendezvous(
    process: ProcessInfo,
    timeout_seconds: float,
    *,
    share: bool,
    gpus: Sequence[str] = (),
    on_stall: OnStall = lambda _: None,
) -> Rendezvous:
    """Find all workers; with `share`, connect those that share memory. Raises `WorldError`.

    `gpus` are the names of this worker's GPUs. Raises `ConfigError` if only some workers have any.
    `on_stall` is as for `Watchdog`.
    """
    rank, size = process.rank, process.world_size
    seconds = _start_seconds(timeout_seconds)
    home = memory_id(process.rank - process.local_rank)
    shares = share and home is not None and not missing_system_calls()
    with _explained(rank):
        store, client = open_store(process, f"samestep/{next(_worlds_formed)}", seconds)
        with ExitStack() as exits:
            listener = exits.enter_context(PeerListener()) if shares else None
            address, statuses = listener.address if listener else None, None
            if home is not None and process.local_rank == 0 and process.local_world_size > 1:
                statuses = create_boards(process.local_world_size)
            failed = exits.enter_context(ExitStack())  # until the board owns the file
            if statuses is not None:
                failed.callback(os.close, statuses)
            this = socket.gethostname(), os.getpid(), home, address, os.urandom(16).hex()
            own_info = PeerInfo(*this, statuses, tuple(gpus))
            infos = _gather_infos(client, process, own_info, seconds)
            nccl = _have_own_gpus(client, [info.gpus for info in infos])
            sharing = [info.home if info.address and not nccl else None for info in infos]
            hosts = _hosts(sharing)
            homes = _hosts([info.home for info in infos])
            # workers of one machine share a board, even if they share no gradients
            home_ranks = next(ranks for ranks in homes if rank in ranks)
            first = infos[home_ranks.start]
            board = StatusBoard.open(rank, home_ranks, first.pid, first.statuses, statuses)
            failed.pop_all()
            watchdog = Watchdog(client, timeout_seconds, homes, board, on_stall)
            mesh = None
            members = {
                other: infos[other] for other in next(host for host in hosts if rank in host)
            }
            if listener and len(members) > 1:  # others of this host share memory
                try:
                    mesh = listener.connect(rank, members, seconds, timeout_seconds, watchdog)
                except BaseException:
                    watchdog.close()
                    raise
    key, machines = _signing_key(infos), homes if nccl else ()
    workers = rank, size, hosts, mesh, store, watchdog
    return Rendezvous(*workers, timeout_seconds, key, nccl, machines)


def locate(process: ProcessInfo, timeout_seconds: float) -> ProcessInfo:
    """Return a worker with its local rank and world size, found by comparing hosts if unknown.

    Raises `WorldError` if workers are missing.
    """
    if process.knows_host:
        return process
    host = f"{socket.gethostname()} {kernel_id('net')}"
    own_info = PeerInfo(socket.gethostname(), os.getpid(), host, None, os.urandom(16).hex())
    seconds = _start_seconds(timeout_seconds)
    with _explained(process.rank):
        _, client = open_store(process, f"samestep/{next(_worlds_formed)}", seconds)
        infos = _gather_infos(client, process, own_info, seconds)
        client.close()
    ranks = [rank for rank, info in enumerate(infos) if info.home == host]
    local_rank = ranks.index(process.rank)
    return replace(process, local_rank=local_rank, local_world_size=len(ranks), knows_host=True)


def _start_seconds(timeout_seconds: float) -> float:
    return max(START_SHARE * timeout_seconds, min(timeout_seconds, MIN_START_SECONDS))


@contextmanager
def _explained(rank: int) -> Iterator[None]:
    """Raise `WorldError` for a store that does not respond or has values of another program."""
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        raise WorldError(
            f"worker {rank} could not reach other workers while {FORMING}: {error}"
        ) from error
    except ValueError as error:
        raise _foreign_store(f"the store has invalid JSON: {error}") from None


def _have_own_gpus(client: StoreClient, gpus: Sequence[Sequence[str]]) -> bool:
    """Return whether no two workers have the same GPU, which NCCL refuses; False without GPUs."""
    without = [rank for rank, names in enumerate(gpus) if not names]
    if without and len(without) < len(gpus):
        with suppress(OSError):
            _wait_for_informed(client, len(gpus))
        raise ConfigError(
            f"all workers must use GPUs or none, but torch finds no GPU on {list_workers(without)};"
            " check the driver and CUDA_VISIBLE_DEVICES there, or set device='cpu' on all workers"
        )
    names = [name for worker_gpus in gpus for name in worker_gpus]
    return len(set(names)) == len(names) > 0


def _signing_key(infos: Sequence[PeerInfo]) -> bytes | None:
    """Return a key that only this world's workers can derive, None without a token."""
    if TOKEN not in os.environ:
        return None
    nonces = " ".join(info.nonce for info in infos)
    return derive(os.environ[TOKEN], "objects", nonces.encode())


def _gather_infos(
    client: StoreClient, process: ProcessInfo, own_info: PeerInfo, seconds: float
) -> list[PeerInfo]:
    """Return every worker's entry by rank. Raises `WorldError` for missing and duplicate ranks.

    Rank 0 reads all entries and publishes them under one key, for which the others wait. So each
    of them makes a few requests, however many workers there are.
    """
    rank, size = process.rank, process.world_size
    keys = [f"worker/{other}" for other in range(size)]
    first = PeerInfo.read(rank, client.put_first(keys[rank], asdict(own_info)))
    outcome = None
    if first != own_info:
        reason = f"two workers have rank {rank}: {first} and {own_info}; ranks must be unique"
        outcome = client.put_first(OUTCOME, {"failed": reason, "expected": size})
    elif rank == 0:
        outcome = _publish_entries(client, keys, seconds)
    if outcome is None:
        outcome = _wait_for_outcome(client, seconds, size)
    if outcome is None:  # worker 0 is missing, or reports now
        is_first = client.put_first(REPORTER, rank) == rank
        if not is_first:
            outcome = _wait_for_outcome(client, REPORT_SECONDS, size)
        outcome = outcome or _end_wait(client, keys, seconds)
    kinds = {name: type(value) for name, value in outcome.items()} if type(outcome) is dict else {}
    if kinds not in ({"workers": str}, {"failed": str, "expected": int}):
        raise _foreign_store(
            f"the store has {str(outcome)[:80]!r} instead of the entries of all workers"
        )
    if "failed" in outcome:
        _wait_for_informed(client, outcome["expected"])
        raise WorldError(
            f"{outcome['failed']}; check the launcher (worker {rank}, while {FORMING}, "
            f"was started with {process.source})"
        )
    entries = _unpack(outcome["workers"])
    if len(entries) != size:
        raise _foreign_store(f"the store has entries of {len(entries)} workers instead of {size}")
    return [PeerInfo.read(other, entry) for other, entry in enumerate(entries)]


def _wait_for_outcome(client: StoreClient, seconds: float, size: int) -> Any:
    """Return the outcome that another worker publishes, None after `seconds`."""
    polls = client.wait_for([OUTCOME], seconds, size)
    return next((values[0] for values in polls if values and values[0] is not None), None)


def _publish_entries(client: StoreClient, keys: Sequence[str], seconds: float) -> Any:
    """Wait for all entries; return the outcome: that of this worker, or an earlier failure."""
    for entries in client.wait_for(keys, seconds, len(keys)):
        if entries and None not in entries:
            return client.put_first(OUTCOME, {"workers": _pack(entries)})
        if (outcome := client.get(OUTCOME)) is not None:
            return outcome
    return _end_wait(client, keys, seconds)


def _pack(entries: Sequence[Any]) -> str:
    """Return entries as compressed JSON, because every worker reads those of all."""
    return to_text(zlib.compress(json.dumps(entries).encode()))


def _unpack(text: Any) -> list[Any]:
    """Return the entries of `_pack`. Raises `ValueError` for anything else."""
    try:
        data = zlib.decompressobj().decompress(to_bytes(text), MAX_ENTRIES_BYTES)
    except (TypeError, zlib.error) as error:
        raise ValueError(f"invalid entries: {error}") from error
    entries = parse(data)
    return entries if isinstance(entries, list) else []


def _end_wait(client: StoreClient, keys: Sequence[str], seconds: float) -> Any:
    """Publish which workers have not started, or all entries; return the first outcome."""
    entries = client.get_many(keys)
    missing = [rank for rank, entry in enumerate(entries) if entry is None]
    if not missing:
        return client.put_first(OUTCOME, {"workers": _pack(entries)})
    same = "" if client.key is None else f" with the same {TOKEN}"
    reason = (
        f"timed out after {seconds:g} s waiting for {list_workers(missing)} to start{same}; "
        "increase timeout if some start late"
    )
    expected = len(keys) - len(missing)
    return client.put_first(OUTCOME, {"failed": reason, "expected": expected})


def _wait_for_informed(client: StoreClient, expected: int) -> None:
    """Count this worker; on the store's host, wait until all expected workers are informed."""
    informed = client.count(INFORMED)
    deadline = time.monotonic() + LINGER_SECONDS
    while client.hosts_store and informed < expected and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        informed = client.count(INFORMED, 0)


def _foreign_store(description: str) -> WorldError:
    return WorldError(
        f"{description}; another program uses MASTER_ADDR and MASTER_PORT: choose an unused port"
    )


def _hosts(homes: Sequence[str | None]) -> list[range]:
    """Return ranges of ranks with the same home; a worker without one is a separate host."""
    runs = groupby(range(len(homes)), key=lambda rank: homes[rank] or rank)
    ranks = [list(run) for _, run in runs]
    return [range(run[0], run[-1] + 1) for run in ranks]
