"""Exchange of gradients during the backward pass, for workers with only one lane."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor

from samestep.step.exchange import Exchange
from samestep.step.gradients import Gradients, Parameters
from samestep.step.shard import FlatBuffer

# Above this size, copying a gradient early saves more time than the hook costs.
EARLY_BYTES: Final = 1 << 18


@dataclass
class Bucket:
    """Parameters whose gradients are exchanged together, by number in the updated list."""

    exchange: Exchange
    numbers: list[int | None]  # None: a parameter of a sharded optimizer that is not updated now
    flat_buffer: FlatBuffer | None

    def put(self, own: Sequence[Gradients]) -> None:
        """Put the gradients of this worker's subtrees into the exchange."""
        self.exchange.put(
            [[None if n is None else gradients[n] for n in self.numbers] for gradients in own]
        )

    def finish(self, parameters: Parameters, missing: Collection[int], scale: float) -> None:
        """Set `.grad` of all parameters not in `missing` to the global gradient times `scale`.

        With a sharded optimizer, its segments get the gradients instead.
        """
        total = self.exchange.sum()
        if scale != 1.0:
            total.mul_(scale)
        present = [n is not None and n not in missing for n in self.numbers]
        if self.flat_buffer is not None:
            self.flat_buffer.set_gradients(total, present)
            return
        for n, gradient in zip(self.numbers, self.exchange.gather(), strict=True):
            if n is not None and n not in missing:
                parameters[n].grad = gradient


class Overlap:
    """Puts gradients into the exchanges of `buckets` after backward; subclasses do so earlier."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Handle gradients during a block that runs autograd's backward of a lane once."""
        self._begin()
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _begin(self) -> None:
        """Prepare for the first gradient."""

    def finish(self, own: Sequence[Gradients]) -> None:
        """Put the remaining gradients; `own` holds those of this worker's subtrees."""
        for bucket in self.buckets:
            bucket.put(own)


class EarlyExchange(Overlap):
    """Exchanges each bucket between hosts as soon as autograd has computed its gradients.

    Autograd reaches parameters roughly in reverse order, and all workers must start exchanges in
    the same order. So buckets start from last to first; those that a lane does not reach wait for
    `finish`.
    """

    def __init__(self, buckets: Sequence[Bucket], parameters: Parameters) -> None:
        super().__init__(buckets)
        self._parameters = parameters
        self._order = buckets[::-1]
        self._awaited = [0] * len(buckets)
        self._started = 0
        for number, bucket in enumerate(self._order):
            for n in bucket.numbers:
                if n is not None:
                    parameters[n].register_post_accumulate_grad_hook(partial(self._arrived, number))

    def _begin(self) -> None:
        self._awaited = [sum(n is not None for n in bucket.numbers) for bucket in self._order]
        self._started = 0

    def _arrived(self, number: int, _: Tensor) -> None:
        if not self._active:
            return
        self._awaited[number] -= 1
        if self._started == number:
            while self._started < len(self._order) and not self._awaited[self._started]:
                self._start_next([parameter.grad for parameter in self._parameters])

    def finish(self, own: Sequence[Gradients]) -> None:
        while self._started < len(self._order):
            self._start_next(*own)
        self._started = 0

    def _start_next(self, gradients: Gradients) -> None:
        bucket = self._order[self._started]
        self._started += 1
        bucket.put([gradients])
        bucket.exchange.start()


class EarlyCopies(Overlap):
    """Copies each large gradient into the exchange as soon as autograd has computed it.

    It is then still in the CPU cache, and only one gradient at a time is in memory twice.
    """

    def __init__(self, buckets: Sequence[Bucket], parameters: Parameters) -> None:
        super().__init__(buckets)
        for bucket in buckets:
            for n, view in zip(bucket.numbers, bucket.exchange.own_views[0], strict=True):
                if n is not None and view.nbytes >= EARLY_BYTES:
                    parameters[n].register_post_accumulate_grad_hook(partial(self._arrived, view))

    def _begin(self) -> None:
        for bucket in self.buckets:
            bucket.exchange.wait_until_free()

    def _arrived(self, view: Tensor, parameter: Tensor) -> None:
        gradient = parameter.grad
        # sparse gradients are rejected after backward
        if self._active and gradient is not None and gradient.layout == view.layout:
            view.copy_(gradient)
            parameter.grad = view
