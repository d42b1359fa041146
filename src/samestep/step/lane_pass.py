"""The forward and backward passes of one worker's lanes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from typing import Any, Final, Literal

import torch
from torch import Tensor

from samestep.comm.base import World
from samestep.config import Config
from samestep.data.batch import Batch, items_in, to_device
from samestep.data.random_state import generators_restored, key, set_generators
from samestep.errors import DataError, LossError, OutOfMemoryError
from samestep.step.buffers import Buffers
from samestep.step.gradients import Gradients, Parameters, add_gradients, take_gradients
from samestep.step.means import LaneResult
from samestep.step.replicas import Replica, Replicas
from samestep.step.tree import Span, lanes_of, subtrees, tree_steps, tree_sum

LossFn = Callable[[Any, Any], Any]
Count = Callable[[Any], Any]
Reduction = Literal["mean", "sum"]

# in messages of the CPU allocator and of GPU libraries, which have no exception class for this
NO_MEMORY: Final = re.compile(r"(can't allocate|not enough|out of) memory|_ALLOC_FAILED")


@dataclass(frozen=True)
class LossSpec:
    """The loss of a lane: a mean over its items, or a sum to divide by the items of all lanes.

    `count` counts the items of a lane batch (default: its samples).
    """

    fn: LossFn
    model: Any
    count: Count | None = None
    reduction: Reduction = "mean"


@dataclass
class LaneContext:
    """The lanes of one worker, with the devices, replicas and buffers that their passes use."""

    world: World
    config: Config
    lanes: int
    devices: Sequence[torch.device]

    def __post_init__(self) -> None:
        self.own = lanes_of(self.world.rank, self.world.size, self.lanes)
        self.replicas = Replicas(self.devices, self.own)
        self.buffers = Buffers(self.world, self.lanes, self.devices)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for user code; in float32 a user's own autocast stays in effect."""
        if self.config.precision == "bfloat16":
            return torch.autocast(self.devices[0].type, torch.bfloat16)
        return nullcontext()


@dataclass
class LanePass:
    """The forward and backward passes of one worker's lanes for one global batch.

    `seed` numbers the pass within the run. `overlap` is entered around each backward.
    """

    context: LaneContext
    loss: LossSpec
    batch: Batch
    parameters: Parameters
    seed: tuple[int, ...]
    overlap: Callable[[], AbstractContextManager[None]]

    def __post_init__(self) -> None:
        counts = self.batch.counts
        self._total = sum(counts) if self.loss.count is None and counts is not None else None
        self.context.world.status.set_activity("loading data")
        self._batches = dict(self.batch.lane_batches())
        self._results: list[tuple[int, int, dict[str, Tensor]]] = []

    def run(self) -> list[Gradients]:
        """Return the gradients of this worker's subtrees, in lane order, on its first device."""
        self.context.buffers.begin_step()
        replicas = self.context.replicas
        replicas.refresh()
        sums: dict[Span, Gradients] = {}
        with generators_restored():
            for _ in zip_longest(*(self._run_on(replica, sums) for replica in replicas.all)):
                pass  # devices take turns, one lane each, so that all get work early
        if len(replicas.all) > 1:
            first = replicas.all[0].device
            for span, some in sums.items():
                sums[span] = [None if gradient is None else gradient.to(first) for gradient in some]
        own_spans = subtrees(self.context.own, self.context.lanes)
        return [tree_sum(span, sums.get, add_gradients) for span in own_spans]

    def _run_on(self, replica: Replica, sums: dict[Span, Gradients]) -> Iterator[None]:
        """Compute the gradients of one device's subtrees into `sums`; yield after each lane."""

        def gradients(span: Span) -> Gradients | None:
            return self._run_lane(span[0], replica) if span[1] - span[0] == 1 else None

        for span in subtrees(replica.lanes, self.context.lanes):
            sums[span] = yield from tree_steps(span, gradients, add_gradients)

    def scale(self, results: Iterable[LaneResult]) -> float:
        """Return the factor from the sum of gradients to the gradient of the mean."""
        if self._total is not None or self.context.lanes == 1:
            return 1.0
        return 1.0 / max(1, sum(result.count for result in results))

    def report(self, own: Sequence[Gradients]) -> dict[str, Any]:
        """Return JSON: lane results, parameters without a gradient, and written buffers."""
        scalars = [value for _, _, metrics in self._results for value in metrics.values()]
        numbers = iter(_numbers(scalars))
        results = [
            (lane, count, {name: next(numbers) for name in metrics})
            for lane, count, metrics in self._results
        ]
        missing = ({n for n, gradient in enumerate(some) if gradient is None} for some in own)
        return {
            "lanes": sorted(results, key=itemgetter(0)),
            "missing": sorted(set.intersection(*missing)),
            "buffers": self.context.buffers.written(),
        }

    def _run_lane(self, lane: int, replica: Replica) -> Gradients:
        if lane not in self._batches:
            return [None] * len(self.parameters)
        self.context.world.status.set_activity(f"computing lane {lane}")
        try:
            return self._gradients(lane, replica)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            counts = self.batch.counts
            samples = items_in(self._batches[lane]) if counts is None else counts[lane]
            where = f"{replica.device} on worker {self.context.world.rank} at step {self.seed[0]}"
            raise _lane_too_large(lane, samples, self.context.lanes, where) from error

    def _gradients(self, lane: int, replica: Replica) -> Gradients:
        context = self.context
        batch = to_device(self._batches[lane], replica.device)
        count = self._count_of(batch, lane)
        if count == 0 and self.loss.reduction == "mean":
            return [None] * len(self.parameters)
        parameters = replica.of(self.parameters)
        with context.replicas.on(replica):
            set_generators(key(context.config.seed, "lane", *self.seed, lane))
            with context.autocast():
                loss, metrics = split_loss(self.loss.fn(self.loss.model, batch), lane)
            with self.overlap():
                torch.autograd.backward(loss, self._weight(loss, count), inputs=parameters)
            if context.lanes > 1:
                context.buffers.end_lane(lane, replica.number)
        self._results.append((lane, count, {"loss": loss.detach(), **metrics}))
        return take_gradients(parameters)

    def _weight(self, loss: Tensor, count: int) -> Tensor | None:
        """Return the factor of a lane's gradient before it is added; `scale` is the rest."""
        share = count if self.loss.reduction == "mean" else 1
        if self.context.lanes == 1:
            return None if share == count else torch.full_like(loss, share / max(1, count))
        return torch.full_like(loss, share / (self._total or 1))

    def _count_of(self, batch: Any, lane: int) -> int:
        if self.loss.count is None:
            return items_in(batch) if self.batch.counts is None else self.batch.counts[lane]
        count = self.loss.count(batch)
        if not math.isfinite(count) or int(count) != count or count < 0:
            expected = "count must return a whole number of at least 0"
            raise DataError(f"{expected}, got {count!r} for lane {lane}")
        return int(count)


def split_loss(returned: Any, lane: int) -> tuple[Tensor, dict[str, Any]]:
    """Return (loss, metrics) from the result of a loss function for a lane.

    Raises `LossError` unless the loss is a scalar with a gradient, and metrics a dict of scalars.
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    loss, metrics = returned if is_pair else (returned, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise LossError(
            f"the loss function must return a scalar tensor, got {_kind(loss)} in lane {lane};"
            " return the mean over the lane's items"
        )
    if not loss.requires_grad:
        raise LossError(
            f"the loss of lane {lane} has no gradient; is the model frozen, or the loss detached or"
            " computed under no_grad?"
        )
    if not isinstance(metrics, Mapping):
        raise LossError(
            "the loss function must return (loss, dict of scalars by name), got"
            f" {type(metrics).__name__} instead of the dict"
        )
    return loss, {name: _detached(name, value) for name, value in metrics.items()}


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__


def _detached(name: str, value: Any) -> Tensor:
    with suppress(TypeError, ValueError):
        if not isinstance(value, Tensor):
            return torch.tensor(float(value), dtype=torch.float64)
        if value.numel() == 1:
            return value.detach()
    advice = "return the mean over the lane's items"
    raise LossError(f"metric {name!r} must be a scalar, got {_kind(value)}; {advice}")


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of scalar tensors, with one wait per device instead of one per scalar."""
    values: dict[int, float] = {}
    for device in dict.fromkeys(scalar.device for scalar in scalars):
        there = [n for n, scalar in enumerate(scalars) if scalar.device == device]
        stacked = torch.stack([scalars[n].double().reshape(()) for n in there])
        values.update(zip(there, stacked.tolist(), strict=True))
    return [values[n] for n in range(len(scalars))]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the memory of the host or of a device was exhausted."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or NO_MEMORY.search(str(error)) is not None


def _lane_too_large(lane: int, samples: int, lanes: int, where: str) -> OutOfMemoryError:
    with_samples = f"with {samples} sample{'s' * (samples != 1)}"
    if samples > 1:
        advice = (
            f"lanes={2 * lanes} would halve it. The number of lanes affects the result, like the"
            " batch size, and snapshots fix it: start a new run with resume='never'. Or use"
        )
    else:
        advice = "more lanes would not make it smaller: use"
    return OutOfMemoryError(
        f"lane {lane} of {lanes}, {with_samples}, does not fit the memory of {where}; {advice}"
        " precision='bfloat16', activation checkpointing or a smaller model"
    )
