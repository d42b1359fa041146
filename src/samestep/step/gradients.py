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


def set_gradients_aside(parameters: Sequence[torch.Tensor]) -> Gradients:
    """Return copies of the parameters' gradients and leave none behind; the memory they were in may be that of an exchange."""
    return [None if gradient is None else gradient.clone() for gradient in take_gradients(parameters)]


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
    """Adds gradients of parameters of one dtype over all workers, each slice along the tree by one worker.

    Each worker ends with the slice of the flat gradient that `layout` gives it; `gather` completes it everywhere. What
    both return may live in memory that the next call reuses. Workers that share memory read each other's gradients where
    they are; others exchange slices in an all-to-all.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], lanes: int, world: World) -> None:
        self.parameters = list(parameters)
        self.layout = Layout(tuple(parameter.numel() for parameter in parameters), world.size)
        self._world = world
        self._lanes = lanes
        self._spans = [subtrees(carried(rank, world.size, lanes), lanes) for rank in range(world.size)]
        most = max(map(len, self._spans))
        self._sums = self._shared(most, self.layout.flat_size)  # of each worker, its subtrees'
        self._passed = self._shared(2, self.layout.slice_size)  # of each worker, its slice: two in turn
        own = self._sums[world.rank] if self._sums else [self.storage() for _ in self._spans[world.rank]]
        self._sent = own[: len(self._spans[world.rank])]
        self._sent_views = [self.views(flat) for flat in self._sent]
        self._whole = self.storage()
        self._whole_views = self.views(self._whole)

    def storage(self) -> torch.Tensor:
        """Return flat storage of zeros for this layout."""
        return self.parameters[0].new_zeros(self.layout.flat_size)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of flat storage for each parameter, with its shape and storage order."""
        return [_view_like(flat, offset, like) for offset, like in zip(self.layout.offsets, self.parameters, strict=False)]

    def _shared(self, rows: int, size: int) -> list[list[torch.Tensor]] | None:
        """Return `rows` rows of every worker in memory that all see; None where they share none."""
        like = self.parameters[0]
        buffers = self._world.shared(rows * size * like.element_size()) if like.device.type == "cpu" else None
        return None if buffers is None else [list(buffer.view(like.dtype).split(size)) for buffer in buffers]

    def sum(self, own: Sequence[Gradients]) -> torch.Tensor:
        """Return this worker's slice, 1-D, of the sum over all lanes; `own` has the gradients of its subtrees in lane order."""
        for views, gradients in zip(self._sent_views, own, strict=True):
            copy_gradients(views, gradients)
        parts = self._exchanged() if self._sums is None else self._seen(self._sums)
        return tree_sum((0, self._lanes), parts.get, torch.add)

    def _seen(self, sums: Sequence[Sequence[torch.Tensor]]) -> dict[Span, torch.Tensor]:
        """Return this worker's slice of every subtree's sum, in the memory of whoever made it."""
        # Nobody writes again before all have read: a next sum comes after an exchange of losses, which all take part in.
        self._world.barrier("exchanging gradients")
        size = self.layout.slice_size
        own = slice(self._world.rank * size, (self._world.rank + 1) * size)
        return {span: flat[own] for spans, flats in zip(self._spans, sums, strict=True) for span, flat in zip(spans, flats, strict=False)}

    def _exchanged(self) -> dict[Span, torch.Tensor]:
        """Return this worker's slice of every subtree's sum, sent by whoever made it."""
        received: dict[Span, torch.Tensor] = {}
        size, workers = self.layout.slice_size, self._world.size
        for number in range(max(map(len, self._spans))):  # one round for every worker's first subtree, one for every second, …
            senders = [rank for rank, spans in enumerate(self._spans) if number < len(spans)]
            out = self._whole.new_empty((len(senders), size))
            sent = self._sent[number] if self._world.rank in senders else self._whole[:0]
            self._world.all_to_all(
                out.view(-1),
                [size if rank in senders else 0 for rank in range(workers)],
                sent,
                [len(sent) // workers] * workers,
                "exchanging gradients",
            )
            received.update({self._spans[rank][number]: part for rank, part in zip(senders, out, strict=True)})
        return received

    def gather(self, own_slice: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole gradient of every parameter, in its shape, from all workers' slices."""
        self.complete(self._whole, own_slice, "gathering gradients")
        return self._whole_views

    def complete(self, flat: torch.Tensor, own_slice: torch.Tensor, what: str) -> None:
        """Fill flat storage with every worker's slice; `own_slice` may be its part."""
        if self._passed is None or not self.layout.slice_size:
            self._world.all_gather(flat, own_slice, what)
            return
        for slices in self._passed:
            slices.reverse()  # whoever is late still reads from the other one
        self._passed[self._world.rank][0].copy_(own_slice)
        self._world.barrier(what)
        for part, slices in zip(flat.split(self.layout.slice_size), self._passed, strict=True):
            part.copy_(slices[0])


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
    return flat.as_strided(like.shape, (like if dense else like.contiguous()).stride(), flat.storage_offset() + offset)
