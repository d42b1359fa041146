"""How workers first find each other: over the store of MASTER_ADDR and MASTER_PORT each tells where it is."""

from __future__ import annotations

import os
import socket
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count, groupby
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import WorldError
from samestep.launch.files import lacking_calls
from samestep.world.base import FORMING
from samestep.world.door import Door, Member
from samestep.world.hang import workers
from samestep.world.store import open_store
from samestep.world.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from samestep.launch.place import Place
    from samestep.world.mesh import Mesh
    from samestep.world.store import Line
    from samestep.world.whereabouts import Whereabouts

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
class Offer:
    """What a worker tells the others: where it runs, and where those of the same `home` find its door; None where it shares nothing."""

    host: str
    pid: int
    home: str | None
    address: str | None

    @classmethod
    def read(cls, rank: int, told: Any) -> Offer:
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
class Formation:
    """What a worker knows before its world exists: `hosts` as in `World`, the `mesh` of its own if that has other workers."""

    rank: int
    size: int
    hosts: Sequence[range]
    mesh: Mesh | None
    store: Store
    whereabouts: Whereabouts
    timeout_seconds: float


def form(place: Place, timeout_seconds: float, *, share: bool) -> Formation:
    """Meet the other workers; with `share`, find those that share this one's memory. Raises `WorldError` where some do not come."""
    seconds = max(START_SHARE * timeout_seconds, min(timeout_seconds, LEAST_START_SECONDS))
    home = _home(place) if share else None
    try:
        store, line = open_store(place, f"samestep/{next(_worlds_formed)}", seconds)
        with Door() if home else nullcontext() as door:
            own = Offer(
                socket.gethostname(), os.getpid(), home, door.member.address if door else None
            )
            offers = _exchange_offers(line, place, own, seconds)
            hosts = _hosts([offer.home for offer in offers])
            watch = Watch(line, place.rank, place.workers, timeout_seconds)
            neighbours = next(ranks for ranks in hosts if place.rank in ranks)
            members = {
                rank: Member(offers[rank].pid, offers[rank].address or "") for rank in neighbours
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
    return Formation(place.rank, place.workers, hosts, mesh, store, watch, timeout_seconds)


def _exchange_offers(line: Line, place: Place, own: Offer, seconds: float) -> list[Offer]:
    """Return every worker's offer by rank. Raises `WorldError` for the ranks that nobody or two workers have."""
    keys = [f"offer/{rank}" for rank in range(place.workers)]
    first = Offer.read(place.rank, line.put_first(keys[place.rank], asdict(own)))
    if first != own:
        twice = f"two workers have rank {place.rank}: {_where(first)} and {_where(own)}; expected a rank of its own for each"
        line.put_first(UNFORMED, [twice, place.workers])
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
            line.put_first(UNFORMED, [late, place.workers - len(missing)])
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_SECONDS * place.workers)  # the store answers everybody
    return [Offer.read(rank, line.get(key)) for rank, key in enumerate(keys)]


def _part(line: Line, coming: int) -> None:
    """Say that this worker knows why no world forms; the one with which the store goes waits until as many know as came or are coming."""
    knowing = line.count(KNOWING)
    deadline = time.monotonic() + PART_SECONDS
    while line.keeps_store and knowing < coming and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        knowing = line.get(KNOWING)


def _where(offer: Offer) -> str:
    return f"process {offer.pid} on host {offer.host}"


def _stranger(found: str) -> WorldError:
    return WorldError(
        f"{found}; expected only this run's workers at MASTER_ADDR and MASTER_PORT: choose a port that nobody else uses"
    )


def _home(place: Place) -> str | None:
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
