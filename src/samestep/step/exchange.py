"""The sum of gradients over all workers, in flat storage, along the tree over lanes.

Every worker owns a slice of the flat gradient and adds it up for all. Workers of one host read each
other's gradients where they are; a host adds what its own workers have before it sends sums of its
subtrees to the owners on other hosts, once for the whole host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from samestep.comm.base import World
from samestep.step.gradients import Gradients, copy_gradients
from samestep.step.layout import Layout, flattened
from samestep.step.tree import Span, carried, halves, subtrees, tree_sum

# of gradients that travel together: the network is busy while the others are computed
BUCKET_BYTES: Final = 8 << 20


def buckets(
    parameters: Sequence[torch.nn.Parameter], world: World
) -> list[list[torch.nn.Parameter]]:
    """Divide parameters into those that are exchanged together: of one dtype, and of no more than `BUCKET_BYTES` between hosts alone.

    Where memory is shared one exchange is best, since nothing is gained while all cores compute.
    """
    most = math.inf if world.shares_memory else BUCKET_BYTES
    together = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        bucket: list[torch.nn.Parameter] = []
        size = 0
        for parameter in parameters:
            if parameter.dtype == dtype:
                if bucket and size + parameter.nbytes > most:
                    together.append(bucket)
                    bucket, size = [], 0
                bucket.append(parameter)
                size += parameter.nbytes
        together.append(bucket)
    return together


class Exchange:
    """Adds gradients of parameters of one dtype over all workers: `put`, let all workers meet, then `sum`, and `gather` if all is needed.

    What `sum` and `gather` return lives in memory that the next `put` reuses.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], lanes: int, world: World) -> None:
        self.parameters = list(parameters)
        self.layout = Layout(tuple(parameter.numel() for parameter in parameters), world.size)
        self._world, self._lanes = world, lanes
        self._route = Route(world.hosts, world.rank)
        self._spans = [
            subtrees(carried(rank, world.size, lanes), lanes) for rank in self._route.host
        ]
        self._sums = self.shared_storage(max(map(len, self._spans)))
        self._own = self._sums[self._route.place]
        # Where the gradients of this worker's subtrees are added, by parameter; `put` copies no
        # gradient that is there.
        self.own_views = [
            self.views(flat) for flat in self._own[: len(self._spans[self._route.place])]
        ]
        self._summed_at = -1
        # of an exchange that has begun
        self._received: Callable[[], dict[Span, torch.Tensor]] | None = None

    @property
    def place(self) -> int:
        """Where this worker stands among those of its host."""
        return self._route.place

    def storage(self) -> torch.Tensor:
        """Return flat storage of zeros for this layout."""
        return self.parameters[0].new_zeros(self.layout.flat_size)

    def shared_storage(self, rows: int) -> list[list[torch.Tensor]]:
        """Return `rows` times flat storage of zeros of every worker of this host, by its place there, in memory that all of them see."""
        like, size = self.parameters[0], self.layout.flat_size
        if like.device.type != "cpu":  # GPUs share no memory: such a worker is a host of its own
            return [[self.storage() for _ in range(rows)]]
        buffers = self._world.shared(rows * size * like.element_size())
        return [list(buffer.view(like.dtype).view(rows, size).unbind()) for buffer in buffers]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of flat storage for each parameter, with its shape and storage order."""
        return [
            _view_like(flat, offset, like)
            for offset, like in zip(self.layout.offsets, self.parameters, strict=False)
        ]

    def slice_of(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a worker's slice of flat storage, 1-D."""
        size = self.layout.slice_size
        return flat[rank * size : (rank + 1) * size]

    def wait_until_free(self) -> None:
        """Return when nobody reads the gradients of before: after two backward passes without an update somebody may."""
        if self._world.shares_memory and self._world.barriers == self._summed_at:
            self._meet("waiting until all have added up the gradients before")

    def put(self, own: Sequence[Gradients]) -> None:
        """Copy the gradients of this worker's subtrees, in lane order, to where they are added; all workers meet before they `sum`."""
        self.wait_until_free()
        for views, gradients in zip(self.own_views, own, strict=True):
            copy_gradients(views, gradients)

    def start(self) -> None:
        """Begin to exchange sums with other hosts; all workers of this host have put theirs."""
        self._received = self._begin()

    def sum(self) -> torch.Tensor:
        """Return this worker's slice, 1-D, of the sum over all lanes."""
        received, self._received = self._received or self._begin(), None
        rank = self._world.rank
        known = {**self._here(rank), **received()}
        self._summed_at = self._world.barriers
        if (0, self._lanes) in known:
            return known[0, self._lanes]
        left, right = (_add_up(half, known) for half in halves((0, self._lanes)))
        return torch.add(left, right, out=self.slice_of(self._own[0], rank))

    def _here(self, rank: int) -> dict[Span, torch.Tensor]:
        """Return the slice of one worker of every sum that this host's workers have put; whoever adds it up may write there."""
        return {
            span: self.slice_of(flat, rank)
            for spans, flats in zip(self._spans, self._sums, strict=True)
            for span, flat in zip(spans, flats, strict=False)
        }

    def _begin(self) -> Callable[[], dict[Span, torch.Tensor]]:
        """Send partners on other hosts what this host has of their slices; return what waits for their sums of this worker's slice."""
        if not self._route.others:
            return dict
        size, own_spans = self.layout.slice_size, self._spans_of(self._route.host)
        served = self._route.brings[self._world.rank]
        parts = [_add_up(span, known) for known in map(self._here, served) for span in own_spans]
        spans_from = {
            partner: self._spans_of(host)
            for partner, host in zip(self._route.partners, self._route.others, strict=True)
        }
        spans = [span for some in spans_from.values() for span in some]
        out = self._own[0].new_empty((len(spans), size))
        wait = self._world.begin_all_to_all(
            out.view(-1),
            [size * len(spans_from.get(rank, ())) for rank in range(self._world.size)],
            torch.cat(parts) if parts else out.new_empty(0),
            [size * len(own_spans) * (rank in served) for rank in range(self._world.size)],
            "exchanging gradients",
        )

        def received() -> dict[Span, torch.Tensor]:
            wait()
            return dict(zip(spans, out, strict=True))

        return received

    def _spans_of(self, host: range) -> list[Span]:
        lanes = [carried(rank, self._world.size, self._lanes) for rank in (host[0], host[-1])]
        return subtrees(range(lanes[0].start, lanes[1].stop), self._lanes)

    def gather(self) -> list[torch.Tensor]:
        """Return the whole gradient of every parameter, in its shape, once all workers have their `sum`."""
        self.complete([flats[0] for flats in self._sums], "gathering gradients")
        return self.own_views[0]

    def complete(self, flats: Sequence[torch.Tensor], what: str) -> None:
        """Fill the flat storage of this host's workers, each of which has its own slice there, with all workers' slices."""
        rank, own = self._world.rank, flats[self._route.place]
        if not self._world.shares_memory:
            self._world.all_gather(own, self.slice_of(own, rank), what)
            return
        if self._route.others:
            self._fetch(own, what)
        self._meet(what)
        for worker, flat in zip(self._route.host, flats, strict=True):
            for owner in () if worker == rank else (worker, *self._route.brings[worker]):
                self.slice_of(own, owner).copy_(self.slice_of(flat, owner))
        self._meet(what)  # after it, whoever holds the storage may write there

    def _meet(self, what: str) -> None:
        self._world.barrier_on_host(what)
        self._summed_at = -1  # those who came have added up

    def _fetch(self, own: torch.Tensor, what: str) -> None:
        """Bring this host the slices of the workers whose partner this one is."""
        size, owners, partners = (
            self.layout.slice_size,
            self._route.brings[self._world.rank],
            self._route.partners,
        )
        out = own.new_empty((len(owners), size))
        self._world.all_to_all(
            out.view(-1),
            [size * (rank in owners) for rank in range(self._world.size)],
            self.slice_of(own, self._world.rank).repeat(len(partners)),
            [size * (rank in partners) for rank in range(self._world.size)],
            what,
        )
        for owner, part in zip(owners, out, strict=True):
            self.slice_of(own, owner).copy_(part)


class Route:
    """Who talks with whom between hosts: each worker has one partner on every other host, who handles its slice there. Pure: ranks only."""

    def __init__(self, hosts: Sequence[range], rank: int) -> None:
        self.host = next(host for host in hosts if rank in host)
        self.place = rank - self.host.start
        self.others = [host for host in hosts if host != self.host]
        # in the order of ranks
        self.partners = [host[self.place % len(host)] for host in self.others]
        # whose slices come through a worker of this host
        self.brings: dict[int, list[int]] = {worker: [] for worker in self.host}
        for host in self.others:
            for place, owner in enumerate(host):
                self.brings[self.host[place % len(self.host)]].append(owner)


def _add_up(span: Span, known: Mapping[Span, torch.Tensor]) -> torch.Tensor:
    """Add known sums along the tree, in the memory of the leftmost: of these slices, nobody else reads."""
    return tree_sum(span, known.get, torch.Tensor.add_)


def _view_like(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    dense = flattened(like).data_ptr() == like.data_ptr()
    return flat.as_strided(
        like.shape, (like if dense else like.contiguous()).stride(), flat.storage_offset() + offset
    )
