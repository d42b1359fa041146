"""Connect a process to the other workers, in the kind of world that fits their devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.distributed_c10d import Store

from samestep.cluster import LOOPBACK_INTERFACE, ProcessInfo, find_process, gloo_interface
from samestep.cluster.launchers import LOOPBACK
from samestep.comm.base import Alone, Sizes, World
from samestep.comm.distributed import Distributed
from samestep.comm.rendezvous import rendezvous
from samestep.comm.shared_memory import Shared
from samestep.comm.signing import derive
from samestep.comm.status import FORMING
from samestep.comm.store import destroy_group, group_store
from samestep.comm.watchdog import OnStall
from samestep.config import TOKEN, Config
from samestep.errors import ConfigError
from samestep.host import raise_file_limit


def find_worker(environment: Mapping[str, str]) -> ProcessInfo:
    """Return this worker's position in torch.distributed's default group, if there is one.

    Otherwise it is that of `find_process`. Raises `ConfigError` if the group does not fit its
    launcher.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return find_process(environment)
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    source = f"rank {rank} of torch.distributed's default group of {size}"
    try:
        launched = find_process(environment)
    except ConfigError:  # such as MASTER_ADDR alone
        launched = ProcessInfo(0, 1, 0, 1, LOOPBACK, 0, "alone")
    is_own = launched.started_by == "samestep"
    if size < launched.world_size or (
        is_own and (rank, size) != (launched.rank, launched.world_size)
    ):
        raise ConfigError(
            f"torch.distributed's default group ({source}) contradicts {launched.source}; make it "
            "with all workers of the launcher, or call destroy_process_group before samestep.init"
        )
    if is_own:  # its store asks for the run's token
        return launched
    if backend in {"fake", "mpi"}:
        raise ConfigError(
            f"torch.distributed's default group must use gloo or nccl to be joined, got {backend}; "
            "make it with one of these, or call destroy_process_group before samestep.init"
        )
    _, store = group_store()  # a file has no address
    address, port = getattr(store, "host", socket.gethostname()), getattr(store, "port", 0)
    return ProcessInfo(rank, size, rank, size, address, port, "group", source, knows_host=size == 1)


def connect(
    process: ProcessInfo,
    config: Config,
    *,
    gpus: Sequence[str] = (),
    on_stall: OnStall = lambda _: None,
) -> World:
    """Return the world of the worker `process`; all workers must make the same call.

    CPU workers that all share memory need nothing else. Others communicate through
    torch.distributed. GPUs, named by `gpus`, exchange through NCCL unless workers share one.
    `on_stall` is called from a thread with one line about workers that keep others waiting, and
    with None when they no longer do.
    Raises `ConfigError` if there are fewer lanes than workers, `WorldError` if workers are missing.
    """
    if config.lanes is not None and process.world_size > config.lanes:
        raise ConfigError(
            f"lanes must be at least the number of workers ({process.world_size}), "
            f"got {config.lanes}; start at most {config.lanes} workers (samestep run "
            f"-n {config.lanes}), or increase lanes"
        )
    if process.world_size == 1:
        return _with_group(Alone(), None, config)
    raise_file_limit()
    meeting = rendezvous(process, config.timeout, share=True, gpus=gpus, on_stall=on_stall)
    if meeting.mesh is not None and len(meeting.hosts) == 1:  # one host, whose workers share memory
        world: World = Shared(meeting)
    else:  # several hosts, a GPU for each worker (NCCL), or no shared memory
        is_one_host = process.local_world_size == process.world_size
        if is_one_host and meeting.nccl:  # which opens its sockets later
            os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        with gloo_interface(LOOPBACK if is_one_host else process.address):
            world = Distributed(meeting, cuda=meeting.nccl)
    _with_group(world, meeting.store, config)
    if process.started_by != "samestep":
        # Anyone may write to other launchers' stores. The workers' connections exist by now.
        key = world.all_gather_bytes(os.urandom(32) if world.rank == 0 else b"", FORMING)[0]
        world.status.set_key(derive(os.environ.get(TOKEN, ""), "statuses", key))
    if gpus and not meeting.nccl:  # the world made above carries host memory only
        world = HostMemoryWorld(world)
    first = process.rank - process.local_rank  # the ranks of a host are consecutive
    world.local_ranks = range(first, first + process.local_world_size)
    return world


def _with_group(world: World, store: Store | None, config: Config) -> World:
    """Return the world; with the option `process_group`, make the default group if none exists.

    Then the world is that of a single host: others communicate through a group.
    """
    if config.process_group and not dist.is_initialized():
        # the status of this worker uses the other connection
        own_store = store.clone() if store else HashStore()  # type: ignore[attr-defined]
        _make_group(world, own_store, config.timeout)
    return world


def _make_group(world: World, store: Store, timeout: float) -> None:
    world.made_group = True
    rank, size = world.rank, world.size
    with gloo_interface(LOOPBACK):
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )


def mesh_of_workers(world: World, device: torch.device, timeout: float) -> Any:
    """Return a `DeviceMesh` of all workers, which FSDP2 asks for its size. Collective.

    If there is no default group, all workers are on one host: it is made with a file.
    """
    from torch.distributed.device_mesh import DeviceMesh  # takes a second

    if not dist.is_initialized():
        what = "forming a process group"
        with TemporaryDirectory() as folder:
            path = world.broadcast_json(f"{folder}/store", what)
            _make_group(world, dist.FileStore(path, world.size), timeout)  # type: ignore[attr-defined]
            world.barrier(what)
    group: Any = dist.group.WORLD
    return DeviceMesh.from_group(group, device.type)


def end_group(world: World) -> None:
    """Destroy the default group if `connect` made it for users' code."""
    if world.made_group:
        destroy_group(None)


class HostMemoryWorld(World):
    """A world that copies GPU tensors to host memory and back; no memory is shared."""

    backend = "host memory"

    def __init__(self, world: World) -> None:
        self.rank, self.size, self.status = world.rank, world.size, world.status
        # one per worker, so that no caller counts on shared memory
        self.hosts = [range(rank, rank + 1) for rank in range(world.size)]
        self.signing_key, self.made_group = world.signing_key, world.made_group
        self._world = world

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        self.barriers += 1
        return self._world.all_gather_bytes(data, what)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        self.barriers += 1
        return self._world.gather_bytes(data, what)

    def all_gather(self, out: Tensor, sent: Tensor, what: str) -> None:
        received = torch.empty(out.shape, dtype=out.dtype)  # [size * n]
        self._world.all_gather(received, sent.cpu(), what)  # `cpu` waits for the GPU
        out.copy_(received)
        self.barriers += 1

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, sent: Tensor, sent_sizes: Sizes, what: str
    ) -> None:
        received = torch.empty(out.shape, dtype=out.dtype)
        self._world.all_to_all(received, out_sizes, sent.cpu(), sent_sizes, what)
        out.copy_(received)
        self.barriers += 1

    def broadcast(self, tensor: Tensor, what: str) -> None:
        received = tensor.cpu()  # what rank 0 sends; the others overwrite theirs
        self._world.broadcast(received, what)
        tensor.copy_(received)
        self.barriers += 1

    def barrier(self, what: str) -> None:
        self._world.barrier(what)
        self.barriers += 1

    def close(self) -> None:
        self._world.close()
