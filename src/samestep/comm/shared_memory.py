"""Memory that all workers of a host see, so that what they exchange passes no socket."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.comm.base import World
from samestep.comm.mesh import MESSAGE_BYTES, Mesh
from samestep.comm.rendezvous import Rendezvous
from samestep.errors import WorldError

Bytes = NDArray[np.uint8]


def share(mesh: Mesh, nbytes: int, what: str = "sharing memory") -> list[torch.Tensor]:
    """Return a buffer of every worker of the mesh by rank, uint8 [nbytes], zeros, each seen by all. Collective.

    Buffers are anonymous files without a place in any directory, so the kernel frees them however
    workers end.
    """
    with ExitStack() as exits:
        own = os.memfd_create("samestep")
        exits.callback(os.close, own)
        os.ftruncate(own, max(1, nbytes))  # an empty file cannot be mapped
        files = {mesh.rank: own, **mesh.exchange_files(own, what)}
        for rank, file in files.items():
            if rank != mesh.rank:
                exits.callback(os.close, file)
        return [_map(files[rank], nbytes, rank) for rank in mesh.ranks]


def _map(file: int, nbytes: int, rank: int) -> torch.Tensor:
    size = max(1, nbytes)
    if os.fstat(file).st_size != size:
        raise WorldError(
            f"a buffer of {nbytes} bytes was asked for and worker {rank} asked for another size; expected the same of all"
        )
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)[:nbytes]


# of what a worker puts down for others at a time: few meetings, and still in the cache when they
# read it
BOX_BYTES = 2 << 20
# of what a worker sends: all its bytes, and where in them those for the receiver start and stop
_HEAD = struct.Struct("<QQQ")
INLINE_BYTES = MESSAGE_BYTES - _HEAD.size


class Shared(World):
    """The world of CPU workers on one host, over their mesh.

    Small data travels in the sockets. Of larger data the sender puts a part into a box in memory
    that all see, they meet, and each copies what is its own. A worker has two boxes and fills them
    in turn: those who come to a meeting have read what lay in the boxes at the meeting before.
    """

    def __init__(self, formation: Rendezvous) -> None:
        self.rank, self.size, self.hosts = formation.rank, formation.size, formation.hosts
        self.status = formation.status
        # there is one where workers share memory
        self._mesh: Mesh = formation.mesh  # type: ignore[assignment]
        self._boxes = [
            buffer.numpy().reshape(2, BOX_BYTES) for buffer in share(self._mesh, 2 * BOX_BYTES)
        ]
        self._turn = 0

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        received = self._exchange(np.frombuffer(data, np.uint8), [(0, len(data))] * self.size, what)
        return [
            data if rank == self.rank else received[rank].tobytes() for rank in range(self.size)
        ]

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        received = self._exchange(
            np.frombuffer(data, np.uint8), [(0, len(data))] + [(0, 0)] * (self.size - 1), what
        )
        return (
            [data, *(received[rank].tobytes() for rank in range(1, self.size))]
            if self.rank == 0
            else None
        )

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        data, places = _bytes(own), _bytes(out)
        into = [places[rank * len(data) : (rank + 1) * len(data)] for rank in range(self.size)]
        if data.ctypes.data != into[self.rank].ctypes.data:
            into[self.rank][:] = data
        self._exchange(data, [(0, len(data))] * self.size, what, into)

    def all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> None:
        data, places = _bytes(own), _bytes(out)
        ranges = _ranges(own_sizes, own.element_size())
        into = [places[start:stop] for start, stop in _ranges(out_sizes, out.element_size())]
        start, stop = ranges[self.rank]
        into[self.rank][:] = data[start:stop]
        self._exchange(data, ranges, what, into)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        data = _bytes(tensor)
        nothing = data[:0]
        if self.rank == 0:
            self._exchange(data, [(0, len(data))] * self.size, what, [nothing] * self.size)
        else:
            self._exchange(
                nothing, [(0, 0)] * self.size, what, [data] + [nothing] * (self.size - 1)
            )

    def barrier(self, what: str) -> None:
        self._mesh.meet(what)
        self.meetings += 1

    def shared(self, nbytes: int) -> list[torch.Tensor]:
        return share(self._mesh, nbytes)

    def close(self) -> None:
        self.status.close()  # first: those who find this worker gone then know why
        self._mesh.close()
        self._boxes = []

    def _exchange(
        self,
        data: Bytes,
        ranges: Sequence[tuple[int, int]],
        what: str,
        into: Sequence[Bytes] | None = None,
    ) -> dict[int, Bytes]:
        """Send the range `ranges[r]` of `data` to each other rank r; return by rank what they sent, in `into` if that is given."""
        inline = len(data) <= INLINE_BYTES
        if not inline:
            self._put(data, 0)
        messages = {
            rank: _HEAD.pack(len(data), start, stop)
            + (data[start:stop].tobytes() if inline else b"")
            for rank, (start, stop) in enumerate(ranges)
        }
        received: dict[int, Bytes] = {}
        boxed: dict[int, tuple[int, int]] = {}
        longest = len(data)
        for rank, message in self._mesh.exchange(messages, what).items():
            length, start, stop = _HEAD.unpack_from(message)
            longest = max(longest, length)
            received[rank] = np.empty(stop - start, np.uint8) if into is None else into[rank]
            if len(received[rank]) != stop - start:
                raise WorldError(
                    f"worker {rank} sent {stop - start} bytes while {what}; worker {self.rank} expected {len(received[rank])}"
                )
            if length > INLINE_BYTES:
                boxed[rank] = (start, stop)
            else:
                received[rank][:] = np.frombuffer(message, np.uint8, offset=_HEAD.size)
        self._take(boxed, received, 0)
        for offset in range(BOX_BYTES, longest, BOX_BYTES):
            self._put(data, offset)
            self._mesh.meet(what)
            self._take(boxed, received, offset)
        self.meetings += 1
        return received

    def _put(self, data: Bytes, offset: int) -> None:
        """Put the part of `data` that begins at `offset` into this worker's box."""
        part = data[offset : offset + BOX_BYTES]
        self._boxes[self.rank][self._turn][: len(part)] = part

    def _take(
        self, boxed: Mapping[int, tuple[int, int]], received: Mapping[int, Bytes], offset: int
    ) -> None:
        """Copy what the boxes have of each range in `boxed`, from `offset` on; then it is the other boxes' turn."""
        for rank, (start, stop) in boxed.items():
            first, last = max(start, offset), min(stop, offset + BOX_BYTES)
            if first < last:
                received[rank][first - start : last - start] = self._boxes[rank][self._turn][
                    first - offset : last - offset
                ]
        self._turn = 1 - self._turn


def _bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous tensor, as a view."""
    flat: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


def _ranges(sizes: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """Return where consecutive parts of so many elements start and stop, in bytes."""
    stops = list(accumulate(size * itemsize for size in sizes))
    return list(zip([0, *stops[:-1]], stops, strict=True))
