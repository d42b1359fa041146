"""Losses of a whole batch, which compare its samples with each other, such as contrastive losses.

Every lane is embedded, each worker computes the loss of the embeddings of all lanes, and every lane
is embedded again to continue the backward pass from the gradient of its embeddings (Gao et al.
2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"). So a device holds
the activations of one lane at a time. Both passes of a lane draw the same random numbers, and only
the second one changes buffers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from samestep.comm.base import World
from samestep.data.random_state import generators_restored, key, keyed, set_generators
from samestep.errors import LossError, OutOfMemoryError
from samestep.step.buffers import INTEGERS
from samestep.step.gradients import Gradients
from samestep.step.lane_pass import (
    LanePass,
    LossFn,
    is_out_of_memory,
    no_reentrant_checkpoints,
    split_loss,
)
from samestep.step.replicas import Replica

# The container of embeddings as JSON: the names of a dict, the length of a tuple, None for a tensor
Form = list[str] | int | None


class Gathered(NamedTuple):
    """The embeddings of all lanes in lane order, and the rows of each lane in each tensor."""

    form: Form
    tensors: list[Tensor]
    rows: dict[int, list[slice]]


class WholeBatchPass(LanePass):
    """The two passes of one worker's lanes for a loss of the embeddings of all lanes.

    The loss is computed with the tensors of the first device. Parameters that it uses itself get
    their gradient with lane 0, so that it is added once.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._form: Form = None
        self._embeddings: dict[int, list[Tensor]] = {}  # of own lanes, without their graphs
        self._weights: dict[int, list[Tensor | None]] = {}  # gradients of own lanes' embeddings
        self._loss: Tensor | None = None  # with its graph, on the worker of lane 0
        self._scalars: dict[str, Tensor] = {}
        self._differences: list[tuple[int, Tensor]] = []
        self._is_second = False

    def run(self) -> list[Gradients]:
        context = self.context
        context.replicas.refresh()
        context.buffers.begin_step(self.parameters)
        with context.keep_casts():
            with generators_restored():
                for _ in zip_longest(*map(self._embed_on, context.replicas.all)):
                    pass  # devices take turns
            self._compute_loss()
            self._is_second = True
            return super().run()

    def scale(self, results: object) -> float:
        """Return 1: the loss is that of all items already."""
        return 1.0

    def report(self, own: Sequence[Gradients]) -> dict[str, Any]:
        report = super().report(own)  # waits for the differences, too
        for lane, differs in self._differences:
            if differs:
                raise LossError(
                    f"embed returned different values for lane {lane} in its second call; it must"
                    " depend only on the model, the lane batch and the global random generators,"
                    " and must not change the batch or a buffer that it reads"
                )
        return report

    def _embed_on(self, replica: Replica) -> Iterator[None]:
        for lane in replica.lanes:
            self._run_lane(lane, replica)
            yield

    def _run_lane(self, lane: int, replica: Replica) -> Gradients:
        if self._is_second and lane not in self._embeddings:  # without items
            roots = [] if lane or self._loss is None else [self._loss]
            return self._backward(lane, roots, [None] * len(roots), replica)
        return super()._run_lane(lane, replica)

    def _gradients(self, lane: int, replica: Replica) -> Gradients:
        context = self.context
        count, batch = self._count_of(lane), self._moved(lane, replica)
        gradients: Gradients = []
        if count == 0:
            return gradients
        embed = cast(LossFn, self.loss.embed)
        with context.replicas.on(replica), context.observe((self.loss, self.seed)):
            set_generators(key(context.config.seed, "lane", *self.seed, lane))
            with context.autocast(), no_reentrant_checkpoints():
                form, embeddings = split_embeddings(embed(self.loss.model, batch), lane)
            if self._is_second:
                context.buffers.end_forward(lane, replica.number, self._copies.of)
                gradients = self._continue(lane, embeddings, replica)
                self._results.append((lane, count, self._scalars))
            else:  # the graph is built and dropped: without it, torch may choose other kernels
                self._form = form
                self._embeddings[lane] = [
                    one.detach().clone().requires_grad_(one.requires_grad) for one in embeddings
                ]
            context.buffers.end_lane(lane, replica.number)
        return gradients

    def _continue(self, lane: int, embeddings: Sequence[Tensor], replica: Replica) -> Gradients:
        """Return the gradients of a lane, given those of its embeddings."""
        if self.context.config.deterministic or replica.device.type == "cpu":
            for one, first in zip(embeddings, self._embeddings[lane], strict=True):
                (differs,) = self._copies.of([_differs(one.detach(), first.detach())])
                self._differences.append((lane, differs))
        roots: list[Tensor] = []
        weights: list[Tensor | None] = []
        for one, weight in zip(embeddings, self._weights.pop(lane), strict=True):
            if weight is not None and one.requires_grad:
                roots.append(one)
                weights.append(weight.to(one.device))
        if lane == 0 and self._loss is not None:
            roots.append(self._loss)
            weights.append(None)
        return self._backward(lane, roots, weights, replica)

    def _backward(
        self,
        lane: int,
        roots: Sequence[Tensor],
        weights: Sequence[Tensor | None],
        replica: Replica,
    ) -> Gradients:
        if not roots:
            return [None] * len(self.parameters)
        if any(root is self._loss for root in roots):
            self._loss = None  # its graph ends with this pass
        return self._differentiate(lane, roots, weights, replica.of(self.parameters))

    def _compute_loss(self) -> None:
        """Compute the loss of all embeddings, and its gradient for those of this worker's lanes."""
        context = self.context
        device = context.replicas.all[0].device
        own = {lane: [one.to(device) for one in some] for lane, some in self._embeddings.items()}
        started = time.perf_counter()
        gathered = gather(context.world, self._form, own, device)
        self.exchange_seconds += time.perf_counter() - started
        if gathered is None:
            return
        context.world.status.set_activity("computing the loss of all lanes")
        inputs = [one for one in gathered.tensors if one.requires_grad]
        has_lane_0 = 0 in context.own
        with (
            context.replicas.on(context.replicas.all[0]),
            keyed(key(context.config.seed, "whole batch", *self.seed)),
        ):
            try:
                with context.autocast(), no_reentrant_checkpoints():
                    # cloned, because a loss function may write to them, but not to leaves
                    copies = [one.clone() for one in gathered.tensors]
                    embeddings = joined(gathered.form, copies)
                    returned = self.loss.fn(self.loss.model, embeddings)
                    loss, metrics = split_loss(returned, None)
                found = (
                    torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=has_lane_0)
                    if inputs
                    else ()
                )
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemoryError(
                    f"the loss of all embeddings does not fit in the memory of {device} on worker"
                    f" {context.world.rank} at step {self.seed[0]}; use a smaller batch_size, or"
                    " compute the loss in parts with activation checkpointing"
                ) from error
        self._scalars = self._copied({"loss": loss.detach(), **metrics})
        self._loss = loss if has_lane_0 else None
        gradients = dict(zip(map(id, inputs), found, strict=True))
        for lane in own:
            rows = zip(gathered.tensors, gathered.rows[lane], strict=True)
            # cloned, because kernels may round by the alignment of their memory
            self._weights[lane] = [
                None if (one := gradients.get(id(whole))) is None else one[some].clone()
                for whole, some in rows
            ]


def split_embeddings(returned: Any, lane: int) -> tuple[Form, list[Tensor]]:
    """Return the container and the tensors of what a function returned for a lane.

    Raises `LossError` unless it is a tensor [items, ...], or a tuple, list or dict of them.
    """
    form: Form = None
    tensors = [returned]
    if isinstance(returned, Mapping):
        form, tensors = list(returned), list(returned.values())
    elif isinstance(returned, (tuple, list)):
        form, tensors = len(returned), list(returned)
    for one in tensors:
        if not isinstance(one, Tensor) or one.ndim == 0:
            kind = "a scalar tensor" if isinstance(one, Tensor) else type(one).__name__
            raise LossError(
                "embed must return a tensor [items, ...], or a tuple or dict of them, got"
                f" {kind} in lane {lane}"
            )
    return form, tensors


def joined(form: Form, tensors: Sequence[Tensor]) -> Any:
    """Return tensors in their container: a dict, a tuple, or the only tensor itself."""
    if isinstance(form, list):
        return dict(zip(form, tensors, strict=True))
    return tensors[0] if form is None else tuple(tensors)


def loss_of_one_lane(loss_fn: LossFn, embed: LossFn) -> LossFn:
    """Return the loss as a function of a batch that is one lane: nothing has to be gathered."""

    def fn(model: Any, batch: Any) -> Any:
        return loss_fn(model, joined(*split_embeddings(embed(model, batch), 0)))

    return fn


def gather(
    world: World, form: Form, own: Mapping[int, Sequence[Tensor]], device: torch.device
) -> Gathered | None:
    """Return the embeddings of all lanes on every worker; None if no lane has any.

    The tensors are leaves, which require a gradient if those of any lane do. Raises `LossError` if
    lanes differ in more than the number of rows.
    """
    specs = [
        [lane, form, [[list(one.shape), str(one.dtype), one.requires_grad] for one in own[lane]]]
        for lane in sorted(own)
    ]
    by_rank = world.all_gather_json(specs, "comparing embeddings")
    everyone = list(chain.from_iterable(by_rank))
    if not everyone:
        return None
    _check(everyone)
    _, form, first = everyone[0]
    tensors = []
    rows: dict[int, list[slice]] = {lane: [] for lane, _, _ in everyone}
    for number, (shape, dtype, _) in enumerate(first):
        row = torch.empty(
            [0, *shape[1:]], dtype=getattr(torch, dtype.removeprefix("torch.")), device=device
        )
        mine = torch.cat([row, *(own[lane][number].detach() for lane in sorted(own))])
        sizes = [sum(spec[number][0][0] for _, _, spec in specs) for specs in by_rank]
        whole = _all_gather(world, mine, sizes)
        requires_grad = any(spec[number][2] for _, _, spec in everyone)
        tensors.append(whole.requires_grad_(requires_grad))
        start = 0
        for lane, _, spec in everyone:
            stop = start + spec[number][0][0]
            rows[lane].append(slice(start, stop))
            start = stop
    return Gathered(form, tensors, rows)


def _check(specs: Sequence[Any]) -> None:
    """Raise `LossError` if the embeddings of two lanes cannot be concatenated."""

    def described(form: Form, spec: Sequence[Any]) -> str:
        texts = [f"{dtype} [{', '.join(map(str, ['items', *of[1:]]))}]" for of, dtype, _ in spec]
        if isinstance(form, list):
            texts = [f"{name!r}: {text}" for name, text in zip(form, texts, strict=True)]
        return ", ".join(texts)

    lane, *first = specs[0]
    for other, *spec in specs:
        if spec[0] != first[0] or described(*spec) != described(*first):
            raise LossError(
                "embed must return tensors of the same shape, except for the number of items, and"
                f" of the same dtype for every lane, got {described(*first)} in lane {lane} and"
                f" {described(*spec)} in lane {other}"
            )


def _all_gather(world: World, mine: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows of all workers, of which each has `sizes[rank]`."""
    most = max(sizes)
    if world.size == 1:
        return mine
    if not math.prod([most, *mine.shape[1:]]):
        return mine.new_empty([sum(sizes), *mine.shape[1:]])
    # [workers, rows, ...], padded with zeros
    out = mine.new_zeros([world.size, most, *mine.shape[1:]])
    out[world.rank, : len(mine)] = mine
    data = out.view(world.size, -1).view(torch.uint8)
    world.all_gather(data.view(-1), data[world.rank], "gathering embeddings")
    return torch.cat([rows[:size] for rows, size in zip(out, sizes, strict=True)])


def _differs(left: Tensor, right: Tensor) -> Tensor:
    """Return whether any bit differs, as a tensor, to avoid waiting for a GPU."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return torch.tensor(data=True)
    words = INTEGERS[min(left.element_size(), 8)]
    right = right.to(left.device)
    return (left.reshape(-1).view(words) != right.reshape(-1).view(words)).any()
