"""The exchange of gradients between hosts while backward still runs."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from samestep.step.backward import Target


class Overlap:
    """Starts to exchange a worker's only lane, a target at a time, as soon as autograd has its gradients.

    Autograd reaches parameters about in the reverse of their order, and every worker must start its exchanges in the same order; so
    targets start from the last to the first, and those that a lane does not reach wait for `finish`.
    """

    def __init__(self, targets: Sequence[Target], parameters: Sequence[torch.nn.Parameter]) -> None:
        self._targets = targets[::-1]
        self._parameters = parameters
        self._awaited = [0] * len(targets)
        self._started = 0
        self._watching = False
        for number, target in enumerate(self._targets):
            for n in target.numbers:
                if n is not None:
                    parameters[n].register_post_accumulate_grad_hook(partial(self._arrived, number))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Start what is complete during a block, which runs autograd's backward of the lane once."""
        self._awaited = [sum(n is not None for n in target.numbers) for target in self._targets]
        self._started, self._watching = 0, True
        try:
            yield
        finally:
            self._watching = False

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        if not self._watching:
            return
        self._awaited[number] -= 1
        if self._started == number:
            while self._started < len(self._targets) and not self._awaited[self._started]:
                self._start_next([parameter.grad for parameter in self._parameters])

    def finish(self, own: Sequence[list[torch.Tensor | None]]) -> None:
        """Start what has not started; `own` has the lane's gradients."""
        while self._started < len(self._targets):
            self._start_next(*own)
        self._started = 0

    def _start_next(self, gradients: list[torch.Tensor | None]) -> None:
        target = self._targets[self._started]
        self._started += 1
        target.put([gradients])
        target.exchange.start()
