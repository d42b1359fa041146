"""A world over memory that the workers of a host share, so that large data bypasses sockets."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.comm.base import Sizes, World
from samestep.comm.mesh import MESSAGE_BYTES, Mesh
from samestep.comm.rendezvous import Rendezvous
from samestep.errors import WorldError
from samestep.host import available_bytes, memory_id, set_size

Bytes = NDArray[np.uint8]
Range = tuple[int, int]

# per box: large enough that few barriers are needed, small enough to stay cached until it is read
BOX_BYTES = 2 << 20
# the total bytes that a worker sends, and where those for the receiver start and stop
_HEAD = struct.Struct("<QQQ")
INLINE_BYTES = MESSAGE_BYTES - _HEAD.size


def share(mesh: Mesh, nbytes: int, what: str = "sharing memory") -> list[Tensor]:
    """Return one buffer for each worker of the mesh by rank, shared by all. Collective.

    Each is uint8 [nbytes] of zeros. They are anonymous files, which the kernel frees however the
    workers exit. Raises `WorldError` if workers ask for different sizes.
    """
    with ExitStack() as exits:
        own_file = os.memfd_create("samestep")
        exits.callback(os.close, own_file)
        set_size(own_file, max(1, nbytes))  # an empty file cannot be mapped
        files = {mesh.rank: own_file, **mesh.swap_files(own_file, what)}
        for rank, file in files.items():
            if rank != mesh.rank:
                exits.callback(os.close, file)
        return [_map(files[rank], nbytes, rank) for rank in mesh.ranks]


def _map(file: int, nbytes: int, rank: int) -> Tensor:
    size, other_size = max(1, nbytes), os.fstat(file).st_size
    if other_size != size:
        raise WorldError(
            "shared buffers must have the same size on all workers, "
            f"got {nbytes} bytes here and {other_size} on worker {rank}"
        )
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)[:nbytes]


@contextmanager
def share_files(
    world: World, sizes: Sequence[int], what: str
) -> Iterator[tuple[list[list[int]], list[int]]]:
    """Yield the ranks of each host, and anonymous files of `sizes` bytes that this host shares.

    Collective. Unlike `share`, this needs no mesh, so it also serves workers with their own
    GPUs. Where a worker cannot share memory, or there is too little, all workers of its host count
    as separate hosts; they have no files, like single workers. The files are closed at the end
    of the block; memory that is mapped from them stays.
    """
    with ExitStack() as exits:
        files: list[int] = []
        own_entry: Any = None  # the host, this process and its files; None shares nothing
        try:
            files = _empty_files(sizes, exits)
            if (home := memory_id((world.local_ranks or world.host).start)) is not None:
                own_entry = [home, os.getpid(), [_identity(file) for file in files]]
        except (AttributeError, OSError):  # this system or Python lacks it, or refuses it
            pass
        entries = world.all_gather_json(own_entry, what)
        hosts: dict[Any, list[int]] = {}
        for rank, entry in enumerate(entries):
            hosts.setdefault(f"worker {rank}" if entry is None else entry[0], []).append(rank)
        ranks = next(host for host in hosts.values() if world.rank in host)
        fault = ""
        try:
            if world.rank != ranks[0]:  # all workers of a host use the files of the first
                _, pid, identities = entries[ranks[0]]
                files = _open_files(pid, identities, exits)
            if len(ranks) > 1:
                _reserve(files, sizes, ranks.index(world.rank), len(ranks))
        except OSError as error:
            fault = str(error)
        faults = world.all_gather_json(fault, what)  # so that all divide hosts in the same way
        divided: list[list[int]] = []
        for host in hosts.values():
            divided += [[rank] for rank in host] if any(faults[rank] for rank in host) else [host]
        yield divided, files if ranks in divided and len(ranks) > 1 else []


def _empty_files(sizes: Sequence[int], exits: ExitStack) -> list[int]:
    """Return anonymous files without any memory yet."""
    files = []
    for size in sizes:
        files.append(file := os.memfd_create("samestep-state"))
        exits.callback(os.close, file)
        os.ftruncate(file, size)
    return files


def _identity(file: int) -> list[int]:
    status = os.fstat(file)
    return [file, status.st_dev, status.st_ino]


def _open_files(pid: int, identities: Sequence[Sequence[int]], exits: ExitStack) -> list[int]:
    """Open files of another process. Raises `OSError`, even if the files are others by now."""
    files = []
    for number, *expected in identities:
        files.append(file := os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))
        exits.callback(os.close, file)
        if _identity(file)[1:] != expected:
            raise OSError(errno.ESTALE, f"process {pid} has another file {number}")
    return files


def _reserve(files: Sequence[int], sizes: Sequence[int], number: int, workers: int) -> None:
    """Allocate this worker's share of files: writing to memory that is not there would kill it."""
    shares = [range(size * number // workers, size * (number + 1) // workers) for size in sizes]
    available, wanted = available_bytes(), sum(map(len, shares))
    if available is not None and wanted > available:
        raise OSError(errno.ENOMEM, f"{wanted} bytes are wanted, {available} are left")
    for file, share in zip(files, shares, strict=True):
        if share:
            os.posix_fallocate(file, share.start, len(share))


class Shared(World):
    """The world of CPU workers on one host, over their mesh.

    Small data is sent through sockets. Larger data is copied piece by piece into the sender's
    shared box; after a barrier each receiver copies its part. A worker alternates between two
    boxes: workers that arrive at a barrier have read the boxes of the previous barrier.
    """

    backend = "shared memory"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self.hosts = rendezvous.rank, rendezvous.size, rendezvous.hosts
        self.status = rendezvous.status
        # workers that share memory have a mesh
        self._mesh: Mesh = rendezvous.mesh  # type: ignore[assignment]
        buffers = share(self._mesh, 2 * BOX_BYTES)
        # by rank: uint8 [turns, box_bytes]
        self._boxes = [buffer.numpy().reshape(2, BOX_BYTES) for buffer in buffers]
        self._turn = 0

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        others = self._swap(np.frombuffer(data, np.uint8), [(0, len(data))] * self.size, what)
        return [data if rank == self.rank else others[rank].tobytes() for rank in range(self.size)]

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        ranges = [(0, len(data))] + [(0, 0)] * (self.size - 1)  # all for rank 0
        received = self._swap(np.frombuffer(data, np.uint8), ranges, what)
        if self.rank != 0:
            return None
        return [data, *(received[rank].tobytes() for rank in range(1, self.size))]

    def all_gather(self, out: Tensor, sent: Tensor, what: str) -> None:
        data, target = _bytes(sent), _bytes(out)  # uint8 [nbytes] and [size * nbytes]
        into = [target[rank * len(data) : (rank + 1) * len(data)] for rank in range(self.size)]
        if data.ctypes.data != into[self.rank].ctypes.data:
            into[self.rank][:] = data
        self._swap(data, [(0, len(data))] * self.size, what, into)

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, sent: Tensor, sent_sizes: Sizes, what: str
    ) -> None:
        data, target = _bytes(sent), _bytes(out)
        ranges = _ranges(sent_sizes, sent.element_size())
        into = [target[start:stop] for start, stop in _ranges(out_sizes, out.element_size())]
        start, stop = ranges[self.rank]
        into[self.rank][:] = data[start:stop]
        self._swap(data, ranges, what, into)

    def broadcast(self, tensor: Tensor, what: str) -> None:
        data = _bytes(tensor)
        sent, nothing = data if self.rank == 0 else data[:0], data[:0]
        into = [data] + [nothing] * (self.size - 1)  # only rank 0 sends
        self._swap(sent, [(0, len(sent))] * self.size, what, into)

    def barrier(self, what: str) -> None:
        self._mesh.barrier(what)
        self.barriers += 1

    def shared(self, nbytes: int) -> list[Tensor]:
        return share(self._mesh, nbytes)

    def close(self) -> None:
        self.status.close()  # first, so that workers that find this one gone know why
        self._mesh.close()
        self._boxes = []

    def _swap(
        self, data: Bytes, ranges: Sequence[Range], what: str, into: Sequence[Bytes] | None = None
    ) -> dict[int, Bytes]:
        """Send part `ranges[r]` of `data` to each rank r; return theirs by rank, using `into`."""
        inline = len(data) <= INLINE_BYTES
        if not inline:  # the box, which the others read once they have this worker's message
            self._fill(data, 0)
        messages = {
            rank: _HEAD.pack(len(data), start, stop)
            + (data[start:stop].tobytes() if inline else b"")
            for rank, (start, stop) in enumerate(ranges)
        }
        received: dict[int, Bytes] = {}
        boxed: dict[int, Range] = {}  # the ranges to be read from boxes, by rank of the sender
        longest = len(data)
        for rank, message in self._mesh.swap(messages, what).items():
            length, start, stop = _HEAD.unpack_from(message)
            longest = max(longest, length)
            received[rank] = np.empty(stop - start, np.uint8) if into is None else into[rank]
            if len(received[rank]) != stop - start:
                raise WorldError(
                    f"worker {self.rank} expected {len(received[rank])} bytes from worker {rank} "
                    f"while {what}, got {stop - start}"
                )
            if length > INLINE_BYTES:
                boxed[rank] = (start, stop)
            else:
                received[rank][:] = np.frombuffer(message, np.uint8, offset=_HEAD.size)
        self._take(boxed, received, 0)
        # workers with less data pass the same barriers
        for offset in range(BOX_BYTES, longest, BOX_BYTES):
            self._fill(data, offset)
            self._mesh.barrier(what)
            self._take(boxed, received, offset)
        self.barriers += 1
        return received

    def _fill(self, data: Bytes, offset: int) -> None:
        """Copy the part of `data` that starts at `offset` into this worker's box."""
        part = data[offset : offset + BOX_BYTES]
        self._boxes[self.rank][self._turn][: len(part)] = part

    def _take(self, boxed: Mapping[int, Range], received: Mapping[int, Bytes], offset: int) -> None:
        """Copy this worker's part of the boxes, which hold data from `offset`; swap the boxes."""
        for rank, (start, stop) in boxed.items():
            # what of the range [start, stop) is in the box now
            first, last = max(start, offset), min(stop, offset + BOX_BYTES)
            if first < last:
                box = self._boxes[rank][self._turn]
                received[rank][first - start : last - start] = box[first - offset : last - offset]
        self._turn = 1 - self._turn


def _bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a contiguous tensor, as a view."""
    flat: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


def _ranges(sizes: Sizes, itemsize: int) -> list[Range]:
    """Return where consecutive parts start and stop, in bytes."""
    stops = list(accumulate(size * itemsize for size in sizes))
    return list(zip([0, *stops[:-1]], stops, strict=True))
