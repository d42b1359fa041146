"""The exchanges of gradients, also during the backward pass of a worker's last lane."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from samestep.comm.base import World
from samestep.errors import WorldError
from samestep.step.across_hosts import choose_exchange
from samestep.step.exchange import Exchange, ExchangeSpec, buckets, gather, wait_until_free
from samestep.step.flat_buffer import FlatBuffer
from samestep.step.gradients import (
    Gradients,
    Parameters,
    add_gradients,
    have_none,
    scaled_together,
)
from samestep.step.layout import Assignment, Span, tree_sum
from samestep.step.scaling import scaled
from samestep.step.shard import DividedOptimizer, Shard

# Above this size, copying a gradient early saves more time than the hook costs.
EARLY_BYTES: Final = 1 << 18
# calls of `backward` after which exchanges of other parameters are freed, if they need new ones
KEPT_CALLS: Final = 100


@dataclass
class Bucket:
    """Parameters whose gradients are exchanged together, by number in the updated list."""

    exchange: Exchange
    numbers: list[int | None]  # None: a parameter of a sharded optimizer that is not updated now
    flat_buffer: FlatBuffer | None  # of a sharded optimizer, None for others

    @cached_property
    def has_all(self) -> bool:
        """Whether all of its parameters are updated now."""
        return None not in self.numbers

    def select(self, gradients: Gradients) -> Gradients:
        """Return the gradients of this bucket's parameters, None for those not updated."""
        return [None if n is None else gradients[n] for n in self.numbers]

    def put(self, own_gradients: Sequence[Gradients]) -> Tensor:
        """Take the gradients of this worker's subtrees, and return their size, `Exchange.size`."""
        self.exchange.put(own_gradients)
        return self.exchange.size(own_gradients)

    def reduce(self, missing: Collection[int], scale: float) -> float:
        """Complete the sums that this worker holds; return the factor for gathered ones.

        The segments of a sharded optimizer get theirs, times `scale`, later if they still arrive.
        """
        dtype = self.exchange.parameters[0].dtype
        if self.flat_buffer is not None:
            present = None if self.has_all and not missing else self.present(missing)
            # `scaled` also converts a 16-bit sum to the dtype of the optimizer
            self.flat_buffer.set_gradients(
                lambda: scaled(self.exchange.sum(), dtype, scale),
                present,
                lambda: (scaled(part, dtype, scale) for part in self.exchange.sum_parts()),
            )
            return scale
        total = self.exchange.sum()  # 1-D, the held slices
        if total.dtype == dtype:  # fewer than the complete gradients
            scaled(total, dtype, scale)
            return 1.0
        return scale

    def present(self, missing: Collection[int]) -> list[bool]:
        """Return which of this bucket's parameters are updated."""
        return [n is not None and n not in missing for n in self.numbers]


class Overlap:
    """Puts gradients into the exchanges of `buckets` after backward; subclasses do so earlier.

    A loss per lane has passes of this `kind_of_pass`, None for a `LanePass`.
    """

    kind_of_pass: Any = None

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.order = buckets  # of their exchanges
        # numbers of the parameters whose gradients are exchanged during backward, in this order
        self.groups: list[list[int]] = []
        self.sizes: list[Tensor] = []  # of what each bucket took
        self.used_at = 0  # the last call of `backward` that used it
        self._hooks: dict[int, RemovableHandle] = {}  # by number of the parameter
        self._active = False
        self._sums: Mapping[Span, Gradients] = {}
        # what backward has put so far: views of each subtree, by number of the parameter
        self._in_exchange: dict[int, Gradients] = {}

    def used(self, call: int) -> Self:
        """Note the call of `backward` that uses it, and return it."""
        self.used_at = call
        return self

    def close(self) -> None:
        """Leave the parameters as they are without it."""
        while self._hooks:
            self._hooks.popitem()[1].remove()

    @contextmanager
    def active(self, sums: Mapping[Span, Gradients]) -> Iterator[Mapping[int, Gradients]]:
        """Handle gradients during a block that runs autograd's backward of the last lane.

        `sums` has the gradients of the other lanes. The block gets those of this worker's subtrees
        that are in exchanges now, by number; they are None in `sums` and in `.grad`.
        """
        self._begin()
        self._active, self._sums, self._in_exchange = True, sums, {}
        try:
            yield self._in_exchange
        finally:
            self._active, self._sums, self._in_exchange = False, {}, {}

    def _begin(self) -> None:
        """Prepare for the first gradient."""

    def take_complete(self) -> None:
        """Take the next of the `groups` whose gradients are in `.grad`, up to one that misses any.

        Hooks of autograd call this. After a CUDA graph, which calls no hooks, its caller does.
        """

    def finish(self, own_gradients: Sequence[Gradients]) -> None:
        """Put the remaining gradients of this worker's subtrees, [subtrees, parameters]."""
        wait_until_free([bucket.exchange for bucket in self.buckets])
        self.sizes = [
            bucket.put(list(map(bucket.select, own_gradients))) for bucket in self.buckets
        ]

    def start(self) -> None:
        """Start the remaining exchanges, after a message to all workers.

        It has shown that all workers of this host have called `finish`.
        """

    def set_gradients(self, parameters: Parameters, missing: Collection[int], scale: float) -> None:
        """Set `.grad` of all parameters not in `missing` to the global gradient times `scale`.

        With a sharded optimizer, its segments get the gradients instead.
        """
        scales = {id(bucket): bucket.reduce(missing, scale) for bucket in self.order}
        # unsharded optimizers update every parameter on every worker
        unsharded = [bucket for bucket in self.order if bucket.flat_buffer is None]
        gathered = gather([bucket.exchange for bucket in unsharded])
        for bucket, gradients in zip(unsharded, gathered, strict=True):
            for n, gradient, is_present in zip(
                bucket.numbers, gradients, bucket.present(missing), strict=True
            ):
                if n is not None and is_present:
                    parameters[n].grad = scaled(gradient, gradient.dtype, scales[id(bucket)])


class OneWorker(Overlap):
    """Keeps the gradients of a single worker, whose only subtree is the whole tree."""

    def finish(self, own_gradients: Sequence[Gradients]) -> None:
        (self._gradients,) = own_gradients

    def set_gradients(self, parameters: Parameters, missing: Collection[int], scale: float) -> None:
        gradients, self._gradients = self._gradients, []
        if len(missing) < len(parameters):
            scaled = scaled_together(gradients, parameters, scale)
            for parameter, gradient in zip(parameters, scaled, strict=True):
                parameter.grad = gradient


NO_OVERLAP: Final = Overlap([])  # no gradient goes into exchanges during backward


class EarlyExchange(Overlap):
    """Exchanges each bucket between hosts as soon as autograd has computed its gradients.

    A backward pass nested in that of the lane may be one of several that add to a gradient. So if
    the lane `has_nested` ones, or its loss function has set a gradient, the remaining ones wait for
    `finish`. So do all, for good, once a gradient is computed in another stream of the GPU, which
    is awaited at the end of backward.

    Autograd reaches parameters roughly in reverse order, and all workers must start exchanges in
    the same order. So buckets start from last to first; those that a lane does not reach wait for
    `finish`. An exchange starts once all workers of the host have put their gradients into it. They
    count these in shared memory without waiting: each checks the counts at its next gradient.

    If a host has one worker, only the last gradient of each bucket calls into Python after the
    first pass.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Parameters,
        world: World,
        has_nested: Callable[[], bool],
    ) -> None:
        super().__init__(buckets)
        self._parameters, self._has_nested = parameters, has_nested
        self.order = buckets[::-1]
        self._put = self._started = 0  # how many of `order`, from its start
        self._before = -len(buckets)  # all puts of earlier passes
        self._is_begun = self._are_clear = False
        self._world = world
        self._stream: torch.cuda.Stream | None = None  # of the pass, on a GPU
        # int64 [1] per worker of this host, as NumPy arrays, which are faster to read than tensors
        self._puts = [counter.view(torch.int64).numpy() for counter in world.shared(8)]
        self._fence = Lock()
        self.groups = [[n for n in bucket.numbers if n is not None] for bucket in self.order]
        self._last = [-1] * len(buckets)  # the parameter whose gradient was the last one so far
        self._hooks = {
            n: parameters[n].register_post_accumulate_grad_hook(partial(self._arrived, number, n))
            for number, numbers in enumerate(self.groups)
            for n in numbers
        }

    def _begin(self) -> None:
        if self._world.is_exchanging:  # also for other parameters
            raise WorldError(
                "an exception ended an earlier run.backward when gradients had been sent to other"
                " hosts, so this worker cannot go on; do not catch exceptions of a backward pass"
            )
        self._world.is_exchanging = self._is_begun = True
        wait_until_free([bucket.exchange for bucket in self.order])
        for bucket in self.order:
            bucket.exchange.receive()  # partners may be ahead
        self._put, self._started, self.sizes = 0, 0, []
        self._before += len(self.order)
        self._are_clear = have_none(self._parameters)
        self._stream = _stream_of(self._parameters[0])

    def _arrived(self, number: int, n: int, parameter: Tensor) -> None:
        if not (self._active and self.groups) or self._has_nested() or not self._are_clear:
            return  # it may not be the complete gradient of the last lane
        if self._stream not in {None, _stream_of(parameter)}:
            self.groups = []
            return
        self._last[number] = n
        self.take_complete()

    def take_complete(self) -> None:
        while self._is_next_complete():
            self._take_next()
        if self._started < self._put:  # other workers of this host may be done by now
            self._start_ready()

    def _is_next_complete(self) -> bool:
        if self._put == len(self.order):
            return False
        # sparse gradients are rejected after backward
        return all(
            (gradient := self._parameters[n].grad) is not None and gradient.layout == torch.strided
            for n in self.groups[self._put]
        )

    def _keep_last_hooks(self) -> None:
        """Remove all hooks but those of the last gradients, once all buckets have been reached."""
        # with several workers per host, each gradient is an occasion to look at the counts
        if len(self._puts) == 1 and len(self._hooks) > len(self._last) and -1 not in self._last:
            for n in self._hooks.keys() - self._last:
                self._hooks.pop(n).remove()

    def finish(self, own_gradients: Sequence[Gradients]) -> None:
        if not self._is_begun:  # the last lane has no samples
            self._begin()
        self._world.is_exchanging = self._is_begun = False
        self._keep_last_hooks()
        while self._put < len(self.order):
            bucket = self.order[self._put]
            self._put_next([bucket.select(gradients) for gradients in own_gradients])

    def start(self) -> None:
        self._start_until(self._put)
        self.order[-1].exchange.send_on()

    def _take_next(self) -> None:
        """Add the last lane's gradients of the next bucket to the sums, and put them."""
        bucket = self.order[self._put]
        spans, dtype = bucket.exchange.own_spans, bucket.exchange.dtype
        sums = {span: bucket.select(gradients) for span, gradients in self._sums.items()}
        last = [None if n is None else self._parameters[n].grad for n in bucket.numbers]
        if sums:  # without other lanes, the copy into the exchange rounds
            last = [None if gradient is None else gradient.to(dtype) for gradient in last]
        sums[spans[-1][1] - 1, spans[-1][1]] = last  # the span of the last lane
        # [subtrees, parameters] of this bucket, each a tensor or None
        own_gradients = [tree_sum(span, sums.get, add_gradients) for span in spans]
        self._put_next(own_gradients)
        in_exchange = [  # [subtrees, parameters], views of flat storage
            [
                None if gradient is None else view
                for gradient, view in zip(gradients, views, strict=True)
            ]
            for gradients, views in zip(own_gradients, bucket.exchange.own_views, strict=True)
        ]
        for n, *gradients in zip(bucket.numbers, *in_exchange, strict=True):
            if n is not None:
                # autograd's own tensors are freed bucket by bucket
                self._in_exchange[n], self._parameters[n].grad = gradients, None
                for span_gradients in self._sums.values():
                    span_gradients[n] = None

    def _put_next(self, own_gradients: Sequence[Gradients]) -> None:
        bucket = self.order[self._put]
        self.sizes.append(bucket.put(own_gradients))
        self._put += 1
        # some CPUs reorder writes to memory, but not across two locks
        for _ in range(2):
            with self._fence:
                pass
        # counts never go back, so they need no reset between passes, and no barrier for it
        self._puts[bucket.exchange.local_rank][0] = self._before + self._put
        self._start_ready()

    def _start_ready(self) -> None:
        """Start the exchanges that have the gradients of all workers of this host."""
        ready = min(int(puts[0]) for puts in self._puts) - self._before
        for _ in range(2):  # the gradients are read after the counts
            with self._fence:
                pass
        self._start_until(min(ready, self._put))

    def _start_until(self, number: int) -> None:
        while self._started < number:
            if self._started:  # on GPUs of several machines, its sums go on to the others
                self.order[self._started - 1].exchange.send_on()
            self._started += 1
            self.order[self._started - 1].exchange.start()


def _stream_of(tensor: Tensor) -> torch.cuda.Stream | None:
    """Return the current stream of a tensor's GPU, None for the host."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class EarlyCopies(Overlap):
    """Copies each large gradient of a single lane as soon as autograd has computed it.

    It is then still in the CPU cache, and only one gradient at a time is in memory twice. Those of
    lanes with nested passes wait, as in `EarlyExchange`.
    """

    def __init__(
        self, buckets: Sequence[Bucket], parameters: Parameters, has_nested: Callable[[], bool]
    ) -> None:
        super().__init__(buckets)
        self._has_nested = has_nested
        for bucket in buckets:
            views = bucket.exchange.own_views[0]
            for number, (n, view) in enumerate(zip(bucket.numbers, views, strict=True)):
                if n is not None and view.nbytes >= EARLY_BYTES:
                    hook = partial(self._arrived, n, views, number)
                    self._hooks[n] = parameters[n].register_post_accumulate_grad_hook(hook)

    def _begin(self) -> None:
        wait_until_free([bucket.exchange for bucket in self.buckets])

    def _arrived(self, n: int, views: list[Tensor], number: int, parameter: Tensor) -> None:
        view, gradient = views[number], parameter.grad
        if not self._active or self._has_nested():
            return
        # sparse gradients are rejected after backward
        if gradient is not None and gradient.layout == view.layout:
            view.copy_(gradient)
            self._in_exchange[n], parameter.grad = [view], None  # [subtrees], here one


class Overlaps:
    """The exchanges of parameters that are trained together, each created once.

    A single worker exchanges nothing.
    """

    def __init__(
        self,
        world: World,
        assignment: Assignment,
        round_to: torch.dtype | None,
        shards: Sequence[Shard],
        has_nested: Callable[[], bool],
        *,
        has_one_device: bool,
    ) -> None:
        """`shards` are those of sharded optimizers, and may become more."""
        self._world, self._assignment, self._round_to = world, assignment, round_to
        self._shards, self._has_nested = shards, has_nested
        self._has_one_device = has_one_device
        self._by_parameters: dict[tuple[int, ...], Overlap] = {}
        self._around: Callable[..., Overlap] | None = None
        # of the last step, found by identity: a key of all parameter ids takes longer to make
        self._last: tuple[Parameters, int, Overlap] | None = None

    def of(self, parameters: Parameters, call: int) -> Overlap:
        """Return the exchanges of these parameters, for the step of a number."""
        if self._last is not None:
            last, shards, overlap = self._last
            if last is parameters and shards == len(self._shards):
                return overlap.used(call)
        has_others = self._world.size > 1 or self._around is not None
        cache_key = (len(self._shards), *map(id, parameters)) if has_others else ()
        if cache_key not in self._by_parameters:
            self._close_unused(call)
            new = self._new if self._around is None else partial(self._around, new=self._new)
            self._by_parameters[cache_key] = new(parameters)
        overlap = self._by_parameters[cache_key]
        if has_others:
            self._last = parameters, len(self._shards), overlap
        return overlap.used(call)

    def wrap(self, around: Callable[..., Overlap]) -> None:
        """Let `around` return the sums of parameters, some of which are those of sharded models.

        It gets a function that returns those of replicated ones, as `new`.
        """
        self._around = around

    def close(self) -> None:
        """Remove all hooks of parameters."""
        for overlap in self._by_parameters.values():
            overlap.close()

    def _new(self, parameters: Parameters) -> Overlap:
        world = self._world
        if world.size == 1:
            return OneWorker([])
        own_buckets = self._buckets_of(parameters)
        # Several hosts, or GPUs, each of which counts as one: send during the last backward. With
        # several devices per worker, sums are complete only when all devices are done.
        if len(world.hosts) > 1 and self._has_one_device:
            return EarlyExchange(own_buckets, parameters, world, self._has_nested)
        # one host, one lane per worker: a gradient is final when it arrives, and nothing is added
        if self._assignment.lanes == world.size:
            return EarlyCopies(own_buckets, parameters, self._has_nested)
        return Overlap(own_buckets)  # several lanes are added first

    def _close_unused(self, call: int) -> None:
        """Free the exchanges of parameters that have not been trained together for long."""
        for cache_key, overlap in list(self._by_parameters.items()):
            if call - overlap.used_at > KEPT_CALLS:
                self._by_parameters.pop(cache_key).close()

    def _buckets_of(self, parameters: Parameters) -> list[Bucket]:
        """Group sharded parameters by flat buffer, and the others by dtype and size."""
        number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        grouped = []
        for flat_buffer in flat_buffers_of(self._shards):
            numbers = [number_of.pop(id(parameter), None) for parameter in flat_buffer.parameters]
            if set(numbers) != {None}:
                grouped.append(Bucket(flat_buffer.exchange, numbers, flat_buffer))
        others = [parameters[n] for n in number_of.values()]
        for group in buckets(others, self._world, self._round_to):
            spec = ExchangeSpec(group, self._assignment, self._world, self._round_to)
            grouped.append(Bucket(choose_exchange(spec), [number_of[id(p)] for p in group], None))
        return grouped


def flat_buffers_of(shards: Sequence[DividedOptimizer]) -> list[FlatBuffer]:
    """Return the flat buffers of sharded optimizers."""
    return [flat_buffer for shard in shards for flat_buffer in shard.flat_buffers]
