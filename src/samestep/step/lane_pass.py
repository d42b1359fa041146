"""The forward and backward passes of the lanes that one worker carries."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from samestep.data.batch import Batch, items_in, to_device
from samestep.data.random_state import generators_kept, key, set_generators
from samestep.errors import DataError, LossError, OutOfMemoryError
from samestep.step.gradients import Gradients, add_gradients, take_gradients
from samestep.step.means import LaneResult
from samestep.step.replicas import Replica
from samestep.step.tree import Span, subtrees, tree_steps, tree_sum

if TYPE_CHECKING:
    from samestep.step.lane_engine import LaneEngine

LossFn = Callable[[Any, Any], Any]
Count = Callable[[Any], Any]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Loss:
    """What a lane computes: a mean over its items, or a sum that the items of all lanes divide; `count` counts them."""

    fn: LossFn
    model: Any
    count: Count | None = None
    reduction: Reduction = "mean"


class LanePass:
    """The forward and backward passes of one worker's lanes for one global batch."""

    def __init__(
        self,
        lanes: LaneEngine,
        loss: Loss,
        batch: Batch,
        parameters: Sequence[torch.nn.Parameter],
        seed: tuple[int, ...],
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._lanes, self._loss, self._parameters, self._seed, self._watching = (
            lanes,
            loss,
            parameters,
            seed,
            watching,
        )
        self._counts = batch.counts
        self._total = sum(batch.counts) if loss.count is None and batch.counts is not None else None
        lanes.world.status.set_activity("loading data")
        self._batches = dict(batch.lane_batches())
        self._results: list[tuple[int, int, dict[str, torch.Tensor]]] = []

    def run(self) -> list[Gradients]:
        """Return the gradients of this worker's subtrees of lanes, in lane order, on its first device."""
        self._lanes.buffers.begin_step()
        replicas = self._lanes.replicas
        replicas.refresh()
        sums: dict[Span, Gradients] = {}
        with generators_kept():
            for _ in zip_longest(*(self._on(replica, sums) for replica in replicas.all)):
                pass  # devices take turns, a lane each: so all of them have work soon
        if len(replicas.all) > 1:
            first = replicas.all[0].device
            sums = {
                span: [None if gradient is None else gradient.to(first) for gradient in some]
                for span, some in sums.items()
            }
        return [
            tree_sum(span, sums.get, add_gradients)
            for span in subtrees(self._lanes.own, self._lanes.lanes)
        ]

    def _on(self, replica: Replica, sums: dict[Span, Gradients]) -> Iterator[None]:
        """Leave in `sums` the gradients of the subtrees of one device's lanes; pauses after each lane."""

        def gradients(span: Span) -> Gradients | None:
            return self._lane(span[0], replica) if span[1] - span[0] == 1 else None

        for span in subtrees(replica.lanes, self._lanes.lanes):
            sums[span] = yield from tree_steps(span, gradients, add_gradients)

    def scale(self, results: Iterable[LaneResult]) -> float:
        """Return what the sum of gradients is still to be multiplied with to be that of the mean."""
        if self._total is not None or self._lanes.lanes == 1:
            return 1.0
        return 1.0 / max(1, sum(result.count for result in results))

    def report(self, own: Sequence[Gradients]) -> dict[str, Any]:
        """Return, as JSON, the results of lanes, the numbers of parameters without a gradient, and which buffers were written."""
        numbers = iter(
            _numbers([value for _, _, metrics in self._results for value in metrics.values()])
        )
        results = [
            (lane, count, {name: next(numbers) for name in metrics})
            for lane, count, metrics in self._results
        ]
        return {
            "lanes": sorted(results, key=lambda result: result[0]),
            "missing": sorted(
                set.intersection(
                    *({n for n, gradient in enumerate(some) if gradient is None} for some in own)
                )
            ),
            "buffers": self._lanes.buffers.written(),
        }

    def _lane(self, lane: int, replica: Replica) -> Gradients:
        if lane not in self._batches:
            return [None] * len(self._parameters)
        self._lanes.world.status.set_activity(f"computing lane {lane}")
        try:
            return self._gradients(lane, replica)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            samples = items_in(self._batches[lane]) if self._counts is None else self._counts[lane]
            where = (
                f"of {replica.device} on worker {self._lanes.world.rank} at step {self._seed[0]}"
            )
            raise does_not_fit(lane, samples, self._lanes.lanes, where) from error

    def _gradients(self, lane: int, replica: Replica) -> Gradients:
        batch = to_device(self._batches[lane], replica.device)
        count = self._count_of(batch, lane)
        if count == 0 and self._loss.reduction == "mean":
            return [None] * len(self._parameters)
        parameters = replica.of(self._parameters)
        with self._lanes.replicas.on(replica):
            set_generators(key(self._lanes.config.seed, "lane", *self._seed, lane))
            with self._lanes.autocast():
                loss, metrics = split_loss(self._loss.fn(self._loss.model, batch), lane)
            with self._watching():
                torch.autograd.backward(loss, self._weight(loss, count), inputs=parameters)
            if self._lanes.lanes > 1:
                self._lanes.buffers.end_lane(lane, replica.number)
        self._results.append((lane, count, {"loss": loss.detach(), **metrics}))
        return take_gradients(parameters)

    def _weight(self, loss: torch.Tensor, count: int) -> torch.Tensor | None:
        """Return what a lane's gradient is multiplied with before the others' are added; the rest is for `scale`."""
        share = count if self._loss.reduction == "mean" else 1
        if self._lanes.lanes == 1:
            return None if share == count else torch.full_like(loss, share / max(1, count))
        return torch.full_like(loss, share / (self._total or 1))

    def _count_of(self, batch: Any, lane: int) -> int:
        if self._loss.count is None:
            return items_in(batch) if self._counts is None else self._counts[lane]
        count = self._loss.count(batch)
        if not math.isfinite(count) or int(count) != count or count < 0:
            raise DataError(
                f"count returned {count!r} for lane {lane}; expected a whole number of items, 0 or more"
            )
        return int(count)


def split_loss(returned: Any, lane: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return (loss, metrics) from what a loss function returned. Raises `LossError` unless the loss is a scalar with a gradient."""
    # (loss, dict)
    loss, metrics = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"{type(loss).__name__}"
        )
        raise LossError(
            f"the loss function returned {given} in lane {lane}; expected a scalar tensor: the mean over the lane's items"
        )
    if not loss.requires_grad:
        raise LossError(
            f"the loss of lane {lane} has no gradient; expected one that depends on a parameter: is the model frozen, "
            "or the loss detached or computed under no_grad?"
        )
    if not isinstance(metrics, Mapping):
        raise LossError(
            f"the loss function returned {type(metrics).__name__} beside the loss; expected a dict of scalars by name"
        )
    return loss, {name: _detached(name, value) for name, value in metrics.items()}


def _detached(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.tensor(float(value), dtype=torch.float64)
        except (TypeError, ValueError):
            raise LossError(
                f"metric {name!r} is {type(value).__name__}; expected a scalar: the mean over the lane's items"
            ) from None
    tensor: torch.Tensor = value.detach()
    if tensor.numel() != 1:
        raise LossError(
            f"metric {name!r} has shape {tuple(tensor.shape)}; expected a scalar: the mean over the lane's items"
        )
    return tensor


def _numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalar tensors. Those of one device arrive together: reading each would wait for the device each time."""
    values: dict[int, float] = {}
    for device in dict.fromkeys(scalar.device for scalar in scalars):
        there = {
            n: scalar.double().reshape(())
            for n, scalar in enumerate(scalars)
            if scalar.device == device
        }
        values.update(zip(there, torch.stack(list(there.values())).tolist(), strict=True))
    return [values[n] for n in range(len(scalars))]


# Of the CPU's allocator and of GPU libraries, which have no exception of their own for it.
_WORDS: Final = re.compile(r"can't allocate memory|not enough memory|out of memory|_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that there is not enough memory, of the host or of a device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or bool(
        _WORDS.search(str(error))
    )


def does_not_fit(lane: int, samples: int, lanes: int, where: str) -> OutOfMemoryError:
    """Return the error of a lane of so many samples for which memory ended, with the number of lanes to use instead."""
    what = f"lane {lane} of {lanes}, with {samples} sample{'s' * (samples != 1)}, does not fit the memory {where}"
    others = "precision='bfloat16', activation checkpointing or a smaller model"
    if samples <= 1:
        return OutOfMemoryError(f"{what}; more lanes would not make it smaller: expected {others}")
    return OutOfMemoryError(
        f"{what}; expected one that does: lanes={2 * lanes} would halve it. The number of lanes belongs to the result, like the batch "
        f"size, and snapshots keep it: start anew with it (resume='never'). What also needs less memory: {others}"
    )
