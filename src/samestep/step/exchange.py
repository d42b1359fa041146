"""The sum of gradients over all workers, in flat storage, along the tree over lanes.

Every worker owns a slice of the flat gradient and sums it for all workers. Workers on one host read
each other's gradients in shared memory. A host first adds the gradients of its workers, then sends
the sums of its subtrees to the slices' owners on other hosts.
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

# Gradients that are exchanged together. Smaller buckets keep the network busy during backward.
BUCKET_BYTES: Final = 8 << 20


def buckets(parameters: Parameters, world: World) -> list[list[Parameter]]:
    """Group parameters by dtype, in buckets of at most `BUCKET_BYTES` unless one is larger.

    Workers that share memory use one bucket per dtype: early exchanges gain nothing while all cores
    compute.
    """
    most = math.inf if world.shares_memory else BUCKET_BYTES
    groups: list[list[Parameter]] = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        groups.append([])
        size = 0
        for parameter in (one for one in parameters if one.dtype == dtype):
            if groups[-1] and size + parameter.nbytes > most:
                groups.append([])
                size = 0
            groups[-1].append(parameter)
            size += parameter.nbytes
    return groups


class Exchange:
    """Sums gradients of parameters of one dtype over all workers.

    Call `put`, wait for all workers, then call `sum`, and `gather` for the complete gradients. The
    next `put` reuses the memory of the tensors that `sum` and `gather` return.
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
        # The gradients of this worker's subtrees by parameter; `put` skips those already in place.
        self.own_views = list(map(self.views, self._own[: len(self._spans[self.local_rank])]))
        self._summed_at = -1  # the world's number of barriers then
        self._receive: Callable[[], dict[Span, Tensor]] | None = None  # of a started exchange

    def shared_storage(self, rows: int) -> list[list[Tensor]]:
        """Return `rows` flat storages of zeros per worker of this host, shared among them."""
        like, size = self.parameters[0], self.layout.flat_size
        if like.device.type != "cpu":  # GPUs share no memory: each worker is a separate host
            return [[like.new_zeros(size) for _ in range(rows)]]
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
        """Wait until no worker reads the previous gradients, unless a barrier since ensured it."""
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
        """Return a worker's slice of every sum on this host; adding them may reuse their memory."""
        return {
            span: self.slice_of(flat, rank)
            for spans, flats in zip(self._spans, self._sums, strict=True)
            for span, flat in zip(spans, flats, strict=False)
        }

    def start(self) -> Callable[[], dict[Span, Tensor]]:
        """Send sums of this host to its partners; return a call that receives theirs.

        All workers of this host must have called `put`. `sum` calls this if nothing was started.
        """
        if not self._route.others:
            return dict
        size, own_spans = self.layout.slice_size, self._spans_of(self._route.host)
        served = self._route.served[self._world.rank]
        parts = [_add_up(span, sums) for sums in map(self._host_sums, served) for span in own_spans]
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
        """Complete the storages of this host's workers, each of which has its worker's slice."""
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
        self._barrier(what)  # no worker reads this storage after this

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
    """The communication partners of a worker: one per other host, which handles its slice there.

    Pure: ranks only. `partners` is in rank order. `served` lists, for each worker of this host, the
    remote ranks whose partner it is.
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
    """Add known sums along the tree, in the memory of the first, which no other worker reads."""
    return tree_sum(span, known.get, Tensor.add_)


def _view_like(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    dense = flattened(like).data_ptr() == like.data_ptr()
    strides = (like if dense else like.contiguous()).stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset() + offset)
