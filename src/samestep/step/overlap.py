"""What happens to the gradients of a worker's only lane while backward still runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from samestep.step.exchange import Exchange
from samestep.step.gradients import Gradients
from samestep.step.shard import FlatBuffer

# of the smallest gradient whose early copy saves more than it costs to call for it
EARLY_BYTES: Final = 1 << 18


@dataclass
class Bucket:
    """Some parameters whose gradients are exchanged together, by their numbers among the updated ones."""

    exchange: Exchange
    numbers: list[int | None]  # None: a parameter of a sharded optimizer that is not updated now
    block: FlatBuffer | None

    def set_aside(self) -> None:
        """Move gradients of an earlier call that nobody has used up out of the way."""
        if self.block is not None:
            self.block.set_aside()

    def put(self, own: Sequence[Gradients]) -> None:
        """Give the gradients of this worker's subtrees to the exchange."""
        self.exchange.put(
            [[None if n is None else gradients[n] for n in self.numbers] for gradients in own]
        )

    def finish(
        self, parameters: Sequence[torch.nn.Parameter], missing: Collection[int], scale: float
    ) -> None:
        """Leave the global gradient, multiplied with `scale`, in `.grad` of all that are not `missing`, or of their segments."""
        total = self.exchange.sum()
        if scale != 1.0:
            total.mul_(scale)
        present = [n is not None and n not in missing for n in self.numbers]
        if self.block is not None:
            self.block.set_gradients(total, present)
            return
        for n, gradient, there in zip(self.numbers, self.exchange.gather(), present, strict=True):
            if there:
                parameters[n].grad = gradient  # type: ignore[index]


class Overlap:
    """Gives gradients to the exchanges of `targets` after backward; subclasses do more of that while autograd still runs."""

    def __init__(self, targets: Sequence[Bucket]) -> None:
        self.targets = targets
        self._watching = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Act on gradients that come during a block, which runs autograd's backward of a lane once."""
        self._begin()
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def _begin(self) -> None:
        """Make ready: no gradient has come."""

    def finish(self, own: Sequence[Gradients]) -> None:
        """Give the exchanges what they do not have yet; `own` has the gradients of this worker's subtrees."""
        for target in self.targets:
            target.put(own)


class EarlyExchange(Overlap):
    """Starts to exchange between hosts, a target at a time, as soon as autograd has its gradients.

    Autograd reaches parameters about in the reverse of their order, and every worker must start its
    exchanges in the same order; so targets start from the last to the first, and those that a lane
    does not reach wait for `finish`.
    """

    def __init__(self, targets: Sequence[Bucket], parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(targets)
        self._parameters = parameters
        self._order = targets[::-1]
        self._awaited = [0] * len(targets)
        self._started = 0
        for number, target in enumerate(self._order):
            for n in target.numbers:
                if n is not None:
                    parameters[n].register_post_accumulate_grad_hook(partial(self._arrived, number))

    def _begin(self) -> None:
        self._awaited = [sum(n is not None for n in target.numbers) for target in self._order]
        self._started = 0

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        if not self._watching:
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
        target = self._order[self._started]
        self._started += 1
        target.put([gradients])
        target.exchange.start()


class EarlyCopies(Overlap):
    """Copies large gradients where they are added up as soon as autograd has them: still in the cache, and all are never there twice."""

    def __init__(self, targets: Sequence[Bucket], parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(targets)
        for target in targets:
            for n, view in zip(target.numbers, target.exchange.own_views[0], strict=True):
                if n is not None and view.nbytes >= EARLY_BYTES:
                    parameters[n].register_post_accumulate_grad_hook(partial(self._arrived, view))

    def _begin(self) -> None:
        for target in self.targets:
            target.exchange.wait_until_free()

    def _arrived(self, view: torch.Tensor, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        # sparse ones are refused after backward
        if self._watching and gradient is not None and gradient.layout == view.layout:
            view.copy_(gradient)
            parameter.grad = view
