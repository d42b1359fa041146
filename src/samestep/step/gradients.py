"""The sum of lanes' gradients along the tree: inside a worker, and between workers.

A parameter that a lane did not use has no gradient there (None), which counts as zeros; one that no lane used
has none at all, so that the optimizer leaves it alone as in plain PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samestep.errors import LossError
from samestep.step.layout import Layout
from samestep.step.slices import flattened
from samestep.step.tree import carried, subtrees, tree_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samestep.step.tree import Span
    from samestep.world import World

Gradients = list[torch.Tensor | None]


def take_gradients(parameters: Sequence[torch.Tensor]) -> Gradients:
    """Return the parameters' gradients and leave none behind."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout != torch.strided:
            raise LossError(f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient; expected dense ones: use sparse=False")
        parameter.grad = None
    return gradients


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return left + right, in the memory of `left` where it has any."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    if len(both) == len(left):
        return left
    return [_plus_zeros(a if b is None else b) if a is None or b is None else a for a, b in zip(left, right, strict=True)]


def _plus_zeros(gradient: torch.Tensor | None) -> torch.Tensor | None:
    # Zeros are added for real, because -0.0 + 0.0 is 0.0: what is missing travels between workers as zeros.
    return None if gradient is None else gradient.add_(0.0)


class Exchange:
    """Adds gradients of parameters of one dtype over all workers: an all-to-all of slices and a local tree sum.

    Each worker ends with the slice of the flat gradient that `layout` gives it; `gather` completes it everywhere.
    What both return lives in memory that the next call reuses.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], lanes: int, world: World) -> None:
        self.parameters = list(parameters)
        self.layout = Layout(tuple(parameter.numel() for parameter in parameters), world.size)
        self._world = world
        self._lanes = lanes
        self._spans = [subtrees(carried(rank, world.size, lanes), lanes) for rank in range(world.size)]
        self._sent = [self.storage() for _ in self._spans[world.rank]]
        self._sent_views = [self.views(flat) for flat in self._sent]
        self._received = parameters[0].new_empty((sum(map(len, self._spans)), self.layout.slice_size))
        self._whole = self.storage()
        self._whole_views = self.views(self._whole)

    def storage(self) -> torch.Tensor:
        """Return flat storage of zeros for this layout."""
        return self.parameters[0].new_zeros(self.layout.flat_size)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of flat storage for each parameter, with its shape and storage order."""
        return [_view_like(flat, offset, like) for offset, like in zip(self.layout.offsets, self.parameters, strict=False)]

    def sum(self, own: Sequence[Gradients]) -> torch.Tensor:
        """Return this worker's slice, 1-D, of the sum over all lanes; `own` has the gradients of its subtrees in lane order."""
        for views, gradients in zip(self._sent_views, own, strict=True):
            copy_gradients(views, gradients)
        received: dict[Span, torch.Tensor] = {}
        size, workers = self.layout.slice_size, self._world.size
        for number in range(max(map(len, self._spans))):  # one round for every worker's first subtree, one for every second, …
            senders = [rank for rank, spans in enumerate(self._spans) if number < len(spans)]
            out = self._received[len(received) : len(received) + len(senders)]
            sent = self._sent[number] if self._world.rank in senders else self._whole[:0]
            self._world.all_to_all(
                out.view(-1),
                [size if rank in senders else 0 for rank in range(workers)],
                sent,
                [len(sent) // workers] * workers,
                "exchanging gradients",
            )
            received.update({self._spans[rank][number]: part for rank, part in zip(senders, out, strict=True)})
        return tree_sum((0, self._lanes), received.get, torch.Tensor.add_)

    def gather(self, own_slice: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole gradient of every parameter, in its shape, from all workers' slices."""
        self._world.all_gather(self._whole, own_slice, "gathering gradients")
        return self._whole_views


def copy_gradients(views: Sequence[torch.Tensor], gradients: Gradients) -> None:
    """Copy gradients into views of flat storage, zeros for missing ones."""
    pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()


def _view_like(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    dense = flattened(like).data_ptr() == like.data_ptr()
    return flat.as_strided(like.shape, (like if dense else like.contiguous()).stride(), offset)
