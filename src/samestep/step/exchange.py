"""The sum of gradients over all workers, in flat storage, along the tree over lanes.

Every worker owns a slice of the flat gradient and sums it for all workers. Workers on one host read
each other's gradients in shared memory. A host sums what its own workers have before it sends sums
of its subtrees to the owners on other hosts, once for the whole host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.comm.base import World
from samestep.step.gradients import Gradients, Parameters, copy_gradients
from samestep.step.layout import Layout, flattened
from samestep.step.tree import Span, halves, lanes_of, subtrees, tree_sum

# Gradients that are sent together. Smaller buckets keep the network busy during backward.
BUCKET_BYTES: Final = 8 << 20


def buckets(parameters: Parameters, world: World) -> list[list[Parameter]]:
    """Group parameters that are exchanged together: of one dtype, and at most `BUCKET_BYTES`.

    If workers share memory there is one bucket per dtype, because exchanging early gains nothing
    while all cores compute.
    """
    most = math.inf if world.shares_memory else BUCKET_BYTES
    groups = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        bucket: list[Parameter] = []
        size = 0
        for parameter in parameters:
            if parameter.dtype == dtype:
                if bucket and size + parameter.nbytes > most:
                    groups.append(bucket)
                    bucket, size = [], 0
                bucket.append(parameter)
                size += parameter.nbytes
        groups.append(bucket)
    return groups


class Exchange:
    """Sums gradients of parameters of one dtype over all workers.

    Call `put`, wait for all workers, call `sum` and, for the complete gradients, `gather`. The
    tensors returned by `sum` and `gather` are in memory that the next `put` reuses.
    """

    def __init__(self, parameters: Sequence[Tensor], lanes: int, world: World) -> None:
        self.parameters = list(parameters)
        self.layout = Layout(tuple(parameter.numel() for parameter in parameters), world.size)
        self._world, self._lanes = world, lanes
        self._route = Route(world.hosts, world.rank)
        self.local_rank = self._route.local_rank
        self._spans = [self._spans_of(range(rank, rank + 1)) for rank in self._route.host]
        self._sums = self.shared_storage(max(map(len, self._spans)))
        self._own = self._sums[self.local_rank]
        # The gradients of this worker's subtrees, by parameter; `put` skips those already here.
        self.own_views = list(map(self.views, self._own[: len(self._spans[self.local_rank])]))
        self._summed_at = -1
        # completes an exchange that was started
        self._receive: Callable[[], dict[Span, Tensor]] | None = None

    def storage(self) -> Tensor:
        """Return flat storage of zeros for this layout."""
        return self.parameters[0].new_zeros(self.layout.flat_size)

    def shared_storage(self, rows: int) -> list[list[Tensor]]:
        """Return `rows` flat storages of zeros per worker of this host, shared among them."""
        like, size = self.parameters[0], self.layout.flat_size
        if like.device.type != "cpu":  # GPUs share no memory: such a worker is a host of its own
            return [[self.storage() for _ in range(rows)]]
        shared = self._world.shared(rows * size * like.element_size())
        return [list(one.view(like.dtype).view(rows, size).unbind()) for one in shared]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view of flat storage per parameter, with its shape and storage order."""
        return [
            _view_like(flat, offset, like)
            for offset, like in zip(self.layout.offsets, self.parameters, strict=False)
        ]

    def slice_of(self, flat: Tensor, rank: int) -> Tensor:
        """Return a worker's slice of flat storage, 1-D."""
        size = self.layout.slice_size
        return flat[rank * size : (rank + 1) * size]

    def wait_until_free(self) -> None:
        """Wait until no worker reads the previous gradients, if there was no update since."""
        if self._world.shares_memory and self._world.barriers == self._summed_at:
            self._barrier("waiting for the previous gradient sum")

    def put(self, own: Sequence[Gradients]) -> None:
        """Copy in the gradients of this worker's subtrees; `sum` needs a barrier after this."""
        self.wait_until_free()
        for views, gradients in zip(self.own_views, own, strict=True):
            copy_gradients(views, gradients)

    def sum(self) -> Tensor:
        """Return this worker's slice, 1-D, of the sum over all lanes."""
        receive, self._receive = self._receive or self.start(), None
        rank = self._world.rank
        known = {**self._host_sums(rank), **receive()}
        self._summed_at = self._world.barriers
        if (0, self._lanes) in known:
            return known[0, self._lanes]
        left, right = (_add_up(half, known) for half in halves((0, self._lanes)))
        return torch.add(left, right, out=self.slice_of(self._own[0], rank))

    def _host_sums(self, rank: int) -> dict[Span, Tensor]:
        """Return a worker's slice of every sum on this host, in memory that its sum may reuse."""
        return {
            span: self.slice_of(flat, rank)
            for spans, flats in zip(self._spans, self._sums, strict=True)
            for span, flat in zip(spans, flats, strict=False)
        }

    def start(self) -> Callable[[], dict[Span, Tensor]]:
        """Send partners this host's sums of their slices; return a call that receives theirs.

        All workers of this host must have called `put`. Without this call, `sum` starts first.
        """
        if not self._route.others:
            return dict
        size, own_spans = self.layout.slice_size, self._spans_of(self._route.host)
        served = self._route.served[self._world.rank]
        parts = [
            _add_up(span, known) for known in map(self._host_sums, served) for span in own_spans
        ]
        spans_from = {
            partner: self._spans_of(host)
            for partner, host in zip(self._route.partners, self._route.others, strict=True)
        }
        spans = [span for some in spans_from.values() for span in some]
        out = self._own[0].new_empty((len(spans), size))
        ranks = range(self._world.size)
        wait = self._world.begin_all_to_all(
            out.view(-1),
            [size * len(spans_from.get(rank, ())) for rank in ranks],
            torch.cat(parts) if parts else out.new_empty(0),
            [size * len(own_spans) * (rank in served) for rank in ranks],
            "exchanging gradients",
        )

        def receive() -> dict[Span, Tensor]:
            wait()
            return dict(zip(spans, out, strict=True))

        self._receive = receive
        return receive

    def _spans_of(self, host: range) -> list[Span]:
        lanes = [lanes_of(rank, self._world.size, self._lanes) for rank in (host[0], host[-1])]
        return subtrees(range(lanes[0].start, lanes[1].stop), self._lanes)

    def gather(self) -> list[Tensor]:
        """Return the complete gradient of every parameter, after all workers have called `sum`."""
        self.all_gather([flats[0] for flats in self._sums], "gathering gradients")
        return self.own_views[0]

    def all_gather(self, flats: Sequence[Tensor], what: str) -> None:
        """Fill the storages of this host's workers, each with its own slice, with all slices."""
        rank, own = self._world.rank, flats[self.local_rank]
        if not self._world.shares_memory:
            self._world.all_gather(own, self.slice_of(own, rank), what)
            return
        if self._route.others:
            self._fetch(own, what)
        self._barrier(what)
        for worker, flat in zip(self._route.host, flats, strict=True):
            for owner in () if worker == rank else (worker, *self._route.served[worker]):
                self.slice_of(own, owner).copy_(self.slice_of(flat, owner))
        self._barrier(what)  # no worker reads this storage from here on

    def _barrier(self, what: str) -> None:
        self._world.barrier_on_host(what)
        self._summed_at = -1  # all workers at the barrier have finished their sums

    def _fetch(self, own: Tensor, what: str) -> None:
        """Fetch the slices of the remote workers that this worker serves."""
        size, ranks = self.layout.slice_size, range(self._world.size)
        owners, partners = self._route.served[self._world.rank], self._route.partners
        out = own.new_empty((len(owners), size))
        self._world.all_to_all(
            out.view(-1),
            [size * (rank in owners) for rank in ranks],
            self.slice_of(own, self._world.rank).repeat(len(partners)),
            [size * (rank in partners) for rank in ranks],
            what,
        )
        for owner, part in zip(owners, out, strict=True):
            self.slice_of(own, owner).copy_(part)


class Route:
    """The communication partners of a worker, one per other host, which handle its slice there.

    Pure: ranks only. `served` lists, for each worker of this host, the remote ranks it is the
    partner of. `partners` is in rank order.
    """

    def __init__(self, hosts: Sequence[range], rank: int) -> None:
        self.host = next(host for host in hosts if rank in host)
        self.local_rank = rank - self.host.start
        self.others = [host for host in hosts if host != self.host]
        self.partners = [host[self.local_rank % len(host)] for host in self.others]
        self.served: dict[int, list[int]] = {worker: [] for worker in self.host}
        for host in self.others:
            for number, owner in enumerate(host):
                self.served[self.host[number % len(self.host)]].append(owner)


def _add_up(span: Span, known: Mapping[Span, Tensor]) -> Tensor:
    """Add known sums along the tree, in the leftmost one's memory, which no one else reads."""
    return tree_sum(span, known.get, Tensor.add_)


def _view_like(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    dense = flattened(like).data_ptr() == like.data_ptr()
    strides = (like if dense else like.contiguous()).stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset() + offset)
