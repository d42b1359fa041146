"""What workers exchange of units, in memory that those of a host share, or over the run's world."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from samestep.comm.base import World
from samestep.sharded.carry import Piece

RING: Final = 3  # places for units
BOX_BYTES: Final = 2 << 20  # of one worker
PART_ALIGNMENT: Final = 512  # bytes


def is_shared(world: World, device: torch.device) -> bool:
    """Return whether all workers have the memory of one host."""
    return world.size > 1 and len(world.hosts) == 1 and device.type == "cpu"


class GatherMemory:
    """Memory for gathered units. On a single host, all workers put their rows into the same.

    FSDP2 begins a gather before the last one is copied out, and a worker that waits in a gather has
    copied out the one before that. So three places are enough.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._places: list[Tensor] = []
        self._nbytes, self._place = 0, 0

    def allocate(self, size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the parameters of all workers; all workers make the same calls."""
        elements = math.prod(size)
        if not is_shared(self._world, device):
            return torch.empty(elements, dtype=dtype, device=device)
        nbytes = elements * dtype.itemsize
        if nbytes > self._nbytes:
            self._places = list(self._world.shared(RING * nbytes)[0].split(nbytes))
            self._nbytes = nbytes
        self._place = (self._place + 1) % RING
        return self._places[self._place][:nbytes].view(dtype)

    def gather(self, out: Tensor, own: Tensor, what: str) -> None:
        """Fill `out` with the rows of all workers, by rank; `own` is this worker's part of it."""
        if self._places and out.data_ptr() == self._places[self._place].data_ptr():
            self._world.barrier_on_host(what)
        else:
            if self._world.size > 1 and out.device.type == "cpu":  # GPUs compare orders at the end
                self._world.barrier(what)  # an error if others are elsewhere
            self._world.all_gather(out.view(-1), own.view(-1), what)


class Boxes:
    """Memory in which the workers of a host pass each other gradients, piece by piece.

    Each has two boxes with a part for every owner. Who arrives at a barrier has read the boxes of
    the barrier before.
    """

    def __init__(self, world: World) -> None:
        self._world, self._turn = world, 0
        self._boxes: list[Tensor] = []  # uint8 [2, workers, part] each, by rank

    def pieces(
        self,
        sizes: Sequence[int],
        gradients: Sequence[Sequence[Tensor]],
        senders: int,
        dtype: torch.dtype,
        what: str,
    ) -> Iterator[Piece]:
        """Yield the elements of the own part that the first `senders` workers have for it.

        Each owner, by rank, gets as many elements as `sizes` says, of the 1-D `gradients` for it.
        All workers make the same call.
        """
        rank, workers = self._world.rank, self._world.size
        if not self._boxes:
            shape = (2, workers, BOX_BYTES // workers // PART_ALIGNMENT * PART_ALIGNMENT)
            self._boxes = [memory.view(shape) for memory in self._world.shared(math.prod(shape))]
        step = self._boxes[0].shape[2] // dtype.itemsize  # elements
        for start in range(0, max(sizes), step):
            self._turn = 1 - self._turn
            boxes = [box[self._turn].view(dtype) for box in self._boxes]  # [workers, step] each
            for owner, tensors in enumerate(gradients):
                _copy(boxes[rank][owner], tensors, start)
            self._world.barrier_on_host(what)
            stop = min(start + step, sizes[rank])
            if start < stop:
                own = [box[rank, : stop - start] for box in boxes[:senders]]
                yield start, stop, own


def _copy(out: Tensor, tensors: Sequence[Tensor], start: int) -> None:
    """Fill `out` with the elements of 1-D tensors from `start` on, as if they were one."""
    stop, place = start + len(out), 0
    for tensor in tensors:
        first, last = max(place, start), min(place + len(tensor), stop)
        if first < last:
            out[first - start : last - start] = tensor[first - place : last - place]
        place += len(tensor)


class Gather:
    """What FSDP2 calls to gather a unit; `note` is called before."""

    def __init__(self, memory: GatherMemory, note: Callable[[], None], what: str) -> None:
        self._memory, self._note, self._what = memory, note, what

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the parameters of all workers."""
        self._note()
        return self._memory.allocate(size, dtype, device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        """Fill `output_tensor` with the `input_tensor` of all workers, by rank."""
        self._memory.gather(output_tensor, input_tensor, self._what)
