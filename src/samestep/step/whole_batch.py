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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from samestep.comm.base import World
from samestep.data.batch import Batch
from samestep.data.lane_loop import LaneBatch, LaneSteps, in_turn
from samestep.data.random_state import generators_restored, key, keyed
from samestep.errors import LossError, OutOfMemoryError
from samestep.step.buffer_writes import differs
from samestep.step.gradients import Gradients
from samestep.step.guards import is_out_of_memory
from samestep.step.lane_pass import LanePass, LossFn
from samestep.step.lane_results import LaneScalars, split_loss
from samestep.step.overlap import NO_OVERLAP
from samestep.step.replicas import Replica
from samestep.torch_internals import has_compiled_graphs, is_compiled

GRAPHS_OF_LOSS: Final = (
    "the loss of all embeddings is compiled in a run with CUDA graphs of torch.compile: the lanes"
    " would overwrite what its backward pass reads. Compile only what embed calls, or use another"
    ' mode than "reduce-overhead" and "max-autotune"'
)
# The container of embeddings as JSON: the names of a dict, the length of a tuple, None for a tensor
Form = list[str] | int | None


class Gathered(NamedTuple):
    """The embeddings of all lanes in lane order, and the rows of each lane in each tensor."""

    form: Form
    tensors: list[Tensor]  # [items, ...] each, on the device that computes the loss
    rows: dict[int, list[slice]]  # by lane, one per tensor


class LossOfAll(NamedTuple):
    """The loss of the embeddings of all lanes, which every worker computes."""

    loss: Tensor | None = None  # with its graph, on the worker of lane 0
    scalars: Mapping[str, Tensor] = MappingProxyType({})  # the loss and metrics
    # gradients of the embeddings of each lane, [lane_items, ...]; None if the loss does not use one
    weights: Mapping[int, Sequence[Tensor | None]] = MappingProxyType({})


@dataclass
class EmbedPass:
    """The first pass of one worker's lanes: to their embeddings."""

    lane_pass: WholeBatchPass
    form: Form = None
    embeddings: dict[int, list[Tensor]] = field(default_factory=dict)  # [lane_items, ...], no graph

    def run(self) -> LaneSteps[None]:
        """Embed all lanes that have items."""
        with generators_restored():
            yield from in_turn(map(self._run_on, self.lane_pass.context.replicas.all))

    def _run_on(self, replica: Replica) -> LaneSteps[None]:
        for lane in replica.lanes:
            if lane in self.lane_pass.inputs.batches:
                yield from self.lane_pass.explained(lane, replica, self._embed)
            yield None

    def _embed(self, lane: int, replica: Replica) -> LaneSteps[None]:
        if self.lane_pass.inputs.items(lane):
            # the graph is built and dropped: without it, torch may choose other kernels
            with self.lane_pass.embedding(lane, replica) as (self.form, embeddings):
                self.embeddings[lane] = [
                    embedding.detach().clone().requires_grad_(embedding.requires_grad)
                    for embedding in embeddings
                ]
        yield from ()  # a generator as in other passes, although no loop computes a loss


class WholeBatchPass(LanePass):
    """The second pass of one worker's lanes, from the gradients of their embeddings.

    `run` computes these before: with an `EmbedPass`, and the loss of the embeddings of all lanes.
    Parameters that the loss itself uses get their gradient with lane 0, so that it is added once.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # of this worker's lanes, and of the one that is watched: [lane_items, ...], no graph
        self.embeddings: dict[int, list[Tensor]] = {}
        self.of_all = LossOfAll()
        self._differences: list[tuple[int, Tensor]] = []

    def run(self) -> LaneSteps[list[Gradients]]:
        context, first = self.context, EmbedPass(self)
        self._prepare()
        with context.keep_casts():
            yield from first.run()
            self.embeddings = first.embeddings
            started = time.perf_counter()
            gathered = gather(context.world, first, context.replicas.all[0].device)
            self.exchange_seconds += time.perf_counter() - started
            if gathered is not None:  # else no lane of any worker has items
                if self.watched is not None and self.watched in gathered.rows:
                    parts = zip(gathered.tensors, gathered.rows[self.watched], strict=True)
                    watched = [tensor[rows].detach() for tensor, rows in parts]
                    self.embeddings = {self.watched: watched, **self.embeddings}
                self.of_all = yield from loss_of_all(self, gathered)
                yield None
            return (yield from super().run())

    def repeat(self, lane: int, batch: Batch) -> tuple[Gradients, LaneScalars]:
        """Return what a lane gives, given the gradients of its embeddings, but not a new loss.

        Loss functions may keep what they have seen.
        """
        repeated = replace(self, batch=batch, overlap=NO_OVERLAP)
        repeated.begin_second(lane, self.embeddings, self.of_all)
        return repeated.compute(lane), repeated.scalars

    def begin_second(
        self, lane: int, embeddings: dict[int, list[Tensor]], of_all: LossOfAll
    ) -> None:
        """Continue with the second pass of a lane, from the first pass of all workers."""
        self.watched, self.embeddings, self.of_all = lane, embeddings, of_all

    def scale(self, results: object) -> float:
        """Return 1: the loss is that of all items already."""
        return 1.0

    def report(self, own_gradients: Sequence[Gradients]) -> dict[str, Any]:
        report = super().report(own_gradients)  # waits for the differences, too
        for lane, is_different in self._differences:
            if is_different:
                raise LossError(
                    f"embed returned different values for lane {lane} in its second call; it must"
                    " depend only on the model, the lane batch and the global random generators,"
                    " and must not change the batch or a buffer that it reads"
                )
        return report

    @contextmanager
    def embedding(self, lane: int, replica: Replica) -> Iterator[tuple[Form, list[Tensor]]]:
        """Embed a lane, with the same random numbers in both passes, and continue in the block."""
        context, embed = self.context, cast(LossFn, self.loss.embed)
        batch = self.inputs.moved(lane, replica)
        with context.replicas.on(replica), context.plugins.lane(self, lane, batch):
            self._seed(lane)
            with context.user_code():
                embedded = split_embeddings(embed(self.loss.model, batch), lane)
            yield embedded
            context.buffers.end_lane(lane, replica.number)

    def _run_lane(self, lane: int, replica: Replica) -> LaneSteps[Gradients]:
        if lane in self.embeddings:
            return (yield from super()._run_lane(lane, replica))
        return self._backward(lane, [], [], replica)  # without items

    def _gradients(self, lane: int, replica: Replica) -> LaneSteps[Gradients]:
        count = self.inputs.items(lane)
        with self.embedding(lane, replica) as (_, embeddings):
            self.context.buffers.end_forward(lane, replica.number, self.scalars.copy)
            gradients = self._continue(lane, embeddings, replica)
            self.scalars.add(lane, count, self.of_all.scalars)
        yield from ()  # a generator as in other passes, although no loop computes a loss
        return gradients

    def _continue(self, lane: int, embeddings: Sequence[Tensor], replica: Replica) -> Gradients:
        """Return the gradients of a lane, given those of its embeddings."""
        # kernels of GPUs may differ in the last bits unless the run is deterministic
        if self.context.config.deterministic or replica.device.type == "cpu":
            for embedding, first in zip(embeddings, self.embeddings[lane], strict=True):
                (flag,) = self.scalars.copy([differs(embedding.detach(), first.detach())])
                self._differences.append((lane, flag))
        roots: list[Tensor] = []  # [lane_items, ...] each
        weights: list[Tensor | None] = []
        for embedding, weight in zip(embeddings, self.of_all.weights[lane], strict=True):
            if weight is not None and embedding.requires_grad:
                roots.append(embedding)
                weights.append(weight.to(embedding.device))
        return self._backward(lane, roots, weights, replica)

    def _backward(
        self, lane: int, roots: list[Tensor], weights: list[Tensor | None], replica: Replica
    ) -> Gradients:
        if lane == 0 and self.of_all.loss is not None:  # for parameters that the loss itself uses
            roots, weights = [*roots, self.of_all.loss], [*weights, None]
        if not roots:
            return [None] * len(self.parameters)
        parameters, retain_graph = replica.of(self.parameters), self.watched == lane == 0
        return self._differentiate(lane, roots, weights, parameters, retain_graph=retain_graph)


def loss_of_all(lane_pass: WholeBatchPass, gathered: Gathered) -> LaneSteps[LossOfAll]:
    """Compute the loss of all embeddings, and its gradients for lanes that the pass continues.

    Or the body of a loop computes the loss, once on each worker.
    """
    context, spec, step = lane_pass.context, lane_pass.loss, lane_pass.seed[0]
    first = context.replicas.all[0]
    context.world.status.set_activity("computing the loss of all lanes")
    inputs = [tensor for tensor in gathered.tensors if tensor.requires_grad]
    # this worker needs the graph again, in lane 0
    has_lane_0 = 0 in context.own or lane_pass.watched == 0
    with (
        context.replicas.on(first),
        # every worker draws the same random numbers, so it gets the same loss
        keyed(key(context.config.seed, "whole batch", *lane_pass.seed)),
    ):
        try:
            with context.user_code():
                # cloned, because a loss function may write to them, but not to leaves
                copies = [tensor.clone() for tensor in gathered.tensors]
                embeddings = joined(gathered.form, copies)
                if spec.fn is None:
                    returned = yield LaneBatch(None, embeddings)
                else:
                    returned = spec.fn(spec.model, embeddings)
                loss, metrics = split_loss(returned, None)
            context.plugins.loss(lane_pass, context.own[0], loss)
            if has_compiled_graphs(context.devices) and is_compiled(loss):
                raise LossError(GRAPHS_OF_LOSS)
            of_inputs = (  # [items, ...] each, None if the loss does not use it
                torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=has_lane_0)
                if inputs
                else ()
            )
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"the loss of all embeddings does not fit in the memory of {first.device} on worker"
                f" {context.world.rank} at step {step}; use a smaller batch_size, or compute the"
                " loss in parts with activation checkpointing"
            ) from error
    scalars = {"loss": loss.detach(), **metrics}
    copied = lane_pass.scalars.copy([*scalars.values()])
    gradients = dict(zip(map(id, inputs), of_inputs, strict=True))
    ordered = [gradients.get(id(tensor)) for tensor in gathered.tensors]
    weights = {  # cloned, because kernels may round by the alignment of their memory
        lane: [
            None if gradient is None else gradient[rows].clone()
            for gradient, rows in zip(ordered, gathered.rows[lane], strict=True)
        ]
        for lane in lane_pass.embeddings
    }
    graph = loss if has_lane_0 else None
    return LossOfAll(graph, dict(zip(scalars, copied, strict=True)), weights)


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
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.ndim == 0:
            kind = "a scalar tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
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
    embed = embeddings_of_one_lane(embed)

    def fn(model: Any, batch: Any) -> Any:
        return loss_fn(model, embed(model, batch))

    return fn


def embeddings_of_one_lane(embed: LossFn) -> LossFn:
    """Return a function that checks what `embed` returns, as for several lanes."""

    def fn(model: Any, batch: Any) -> Any:
        return joined(*split_embeddings(embed(model, batch), 0))

    return fn


def gather(world: World, first: EmbedPass, device: torch.device) -> Gathered | None:
    """Return the embeddings of all lanes on every worker; None if no lane has any.

    The tensors are leaves, which require a gradient if those of any lane do. Raises `LossError` if
    lanes differ in more than the number of rows.
    """
    own_embeddings = {
        lane: [embedding.to(device) for embedding in embeddings]
        for lane, embeddings in first.embeddings.items()
    }
    # of this worker's lanes, as JSON: [lane, form, [[shape, dtype, requires_grad], ...]]
    specs = [
        [
            lane,
            first.form,
            [
                [list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
                for tensor in own_embeddings[lane]
            ],
        ]
        for lane in sorted(own_embeddings)
    ]
    by_rank = world.all_gather_json(specs, "comparing embeddings")
    # ranks have contiguous lanes, so this is in lane order
    all_specs = list(chain.from_iterable(by_rank))
    if not all_specs:
        return None
    _check(all_specs)
    _, form, first_spec = all_specs[0]  # this worker's lanes may be without items
    tensors = []
    rows: dict[int, list[slice]] = {lane: [] for lane, _, _ in all_specs}
    for number, (shape, dtype, _) in enumerate(first_spec):
        row = torch.empty(  # none, so that a worker without items has a shape and a dtype, too
            [0, *shape[1:]], dtype=getattr(torch, dtype.removeprefix("torch.")), device=device
        )
        own_rows = torch.cat(  # [own_items, ...]
            [row, *(own_embeddings[lane][number].detach() for lane in sorted(own_embeddings))]
        )
        sizes = [sum(spec[number][0][0] for _, _, spec in specs) for specs in by_rank]
        all_rows = _all_gather(world, own_rows, sizes)  # [items, ...]
        requires_grad = any(spec[number][2] for _, _, spec in all_specs)
        tensors.append(all_rows.requires_grad_(requires_grad))
        start = 0
        for lane, _, spec in all_specs:
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


def _all_gather(world: World, own_rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows of all workers, of which each has `sizes[rank]`."""
    largest = max(sizes)
    if world.size == 1:
        return own_rows
    if not math.prod([largest, *own_rows.shape[1:]]):  # nothing to send, and no -1 for `view`
        return own_rows.new_empty([sum(sizes), *own_rows.shape[1:]])
    # [workers, rows, ...], padded with zeros
    out = own_rows.new_zeros([world.size, largest, *own_rows.shape[1:]])
    out[world.rank, : len(own_rows)] = own_rows
    data = out.view(world.size, -1).view(torch.uint8)  # [workers, nbytes], as NCCL knows few dtypes
    world.all_gather(data.view(-1), data[world.rank], "gathering embeddings")
    # without the padding: [items, ...]
    return torch.cat([rows[:size] for rows, size in zip(out, sizes, strict=True)])
