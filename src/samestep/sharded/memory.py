"""What workers exchange of units, in memory that those of a host share, or over the run's world."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from samestep.comm.base import World
from samestep.sharded.carry import Piece
from samestep.torch_internals import gather_in_place

BOX_BYTES: Final = 2 << 20  # of one worker
ALIGNMENT: Final = 512  # bytes


def is_shared(world: World, device: torch.device) -> bool:
    """Return whether all workers have the memory of one host."""
    return world.size > 1 and len(world.hosts) == 1 and device.type == "cpu"


class GatherMemory:
    """Memory for gathered units. The workers of a single host share all parameters.

    There, each worker's rows are in memory that all of them see, so that nothing is gathered, and a
    gather only waits for the others. Who writes to rows waits before, in `await_readers`.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._is_shared = world, is_shared(world, device)

    def share(self, parameters: Sequence[Any]) -> None:
        """Move what FSDP2 has sharded into memory that workers share, if they do. Collective."""
        if not self._is_shared:
            return
        rank, workers = self._world.rank, self._world.size
        shapes = [(workers, -(-p.shape[0] // workers), *p.shape[1:]) for p in parameters]
        sizes = [
            math.prod(shape) * p.dtype.itemsize for shape, p in zip(shapes, parameters, strict=True)
        ]
        places = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        memory = self._world.shared(places[-1])[0].numpy()
        for parameter, shape, size, place in zip(parameters, shapes, sizes, places, strict=False):
            # of two tensors, so that updates of rows are no changes of what autograd has saved
            complete, rows = (
                torch.from_numpy(memory[place : place + size]).view(parameter.dtype).view(shape)
                for _ in range(2)
            )
            gather_in_place(parameter, complete.flatten(0, 1), rows[rank])

    def gather(self, out: Tensor, rows: Tensor, what: str) -> None:
        """Fill `out` with the `rows` of all workers, by rank."""
        if self._is_shared:
            self._world.barrier_on_host(what)
            return
        if self._world.size > 1 and out.device.type == "cpu":  # GPUs compare orders at the end
            self._world.barrier(what)  # an error if others are elsewhere
        self._world.all_gather(out.view(-1), rows.view(-1), what)

    def await_readers(self) -> None:
        """Wait until no worker computes with the rows of this one any more. Collective."""
        if self._is_shared:
            self._world.barrier_on_host("changing parameters")


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
            shape = (2, workers, BOX_BYTES // workers // ALIGNMENT * ALIGNMENT)
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
                rows = [box[rank, : stop - start] for box in boxes[:senders]]
                yield start, stop, rows


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
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        """Fill `output_tensor` with the `input_tensor` of all workers, by rank."""
        self._memory.gather(output_tensor, input_tensor, self._what)
