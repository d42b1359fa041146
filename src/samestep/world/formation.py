"""How workers first find each other: over the store of MASTER_ADDR and MASTER_PORT each tells where it is."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from samestep.world.base import FORMING, no_answer
from samestep.world.door import Door, Member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samestep.launch.place import Place
    from samestep.world.mesh import Mesh

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = ("net", "pid", "user")  # in which sockets without a file, processes and users have one name for all
NEEDED = ("memfd_create", "pidfd_open")
_worlds_formed = count()  # a store prefix of its own for each world that this process forms


@dataclass(frozen=True)
class Formation:
    """What a worker knows before its world exists: `hosts` as in `World`, the `mesh` of its own if that has other workers."""

    rank: int
    size: int
    hosts: Sequence[range]
    mesh: Mesh | None
    store: Store
    timeout_seconds: float


def form(place: Place, timeout_seconds: float, *, share: bool) -> Formation:
    """Meet the other workers; with `share`, find those that share this one's memory. Raises `WorldError` where some do not come."""
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = PrefixStore(f"samestep/{next(_worlds_formed)}", _store(timeout))
    except RuntimeError as error:
        raise no_answer(place.rank, FORMING, _first_line(error)) from error
    host = _host(place) if share else None
    with Door() if host else nullcontext() as door:
        offers = _exchange_offers(store, place, {"host": host, "member": asdict(door.member) if door else None})
        hosts = _hosts([offer["host"] for offer in offers])
        own = next(ranks for ranks in hosts if place.rank in ranks)
        mesh = None
        if door and len(own) > 1:
            mesh = door.connect(place.rank, {rank: Member(**offers[rank]["member"]) for rank in own}, timeout_seconds)
    return Formation(place.rank, place.workers, hosts, mesh, store, timeout_seconds)


def _exchange_offers(store: Store, place: Place, own: dict[str, Any]) -> list[dict[str, Any]]:
    offers: list[dict[str, Any]] = []
    try:
        store.set(f"offer/{place.rank}", json.dumps(own))
        while len(offers) < place.workers:
            offers.append(json.loads(store.get(f"offer/{len(offers)}")))
    except RuntimeError as error:
        raise no_answer(place.rank, FORMING, f"worker {len(offers)} did not come: {_first_line(error)}") from error
    return offers


def _host(place: Place) -> str | None:
    """Return what workers have in common that can share memory: a kernel, its namespaces, a user, and who started them as one host's.

    None where the system or this Python lacks something.
    """
    if not all(hasattr(os, name) for name in NEEDED):
        return None
    try:
        machine = [BOOT_ID.read_text().strip(), *(str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES)]
    except OSError:
        return None
    return " ".join([*machine, str(os.geteuid()), str(place.rank - place.local_rank)])


def _hosts(names: Sequence[str | None]) -> list[range]:
    """Return the runs of ranks whose host has the same name; one without a name is a host of its own."""
    runs = [list(run) for _, run in groupby(range(len(names)), key=lambda rank: names[rank] or rank)]
    return [range(run[0], run[-1] + 1) for run in runs]


@cache
def _store(timeout: timedelta) -> Store:
    """Return where this process's worlds form; it stays open, because the next world's workers may come before it had closed."""
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return store


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
