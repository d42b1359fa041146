"""The gradient of a global batch: the passes of all lanes, and the sum over all workers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module, Parameter

from samestep.data.batch import Batch
from samestep.errors import ModelError, NonFiniteLossError
from samestep.step.exchange import Exchange, buckets
from samestep.step.gradients import Gradients, ModuleParameters, Parameters, stash_gradients
from samestep.step.lane_pass import LaneContext, LanePass, LossSpec
from samestep.step.means import LaneResult
from samestep.step.overlap import Bucket, EarlyCopies, EarlyExchange, Overlap
from samestep.step.shard import FlatBuffer, Shard


@dataclass(frozen=True)
class StepResult:
    """The results of all lanes of a global batch, and the notes that the workers attached."""

    results: list[LaneResult]
    notes: list[Any]


class LaneEngine(LaneContext):
    """Computes gradients over all lanes, and holds the state shared between steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shards: list[Shard] = []
        self.compute_seconds = 0.0
        self.exchange_seconds = 0.0
        self._replicated: set[int] = set()
        self._parameters: WeakKeyDictionary[Module, ModuleParameters] = WeakKeyDictionary()
        self._overlaps: dict[tuple[int, ...], Overlap] = {}

    def add(self, module: Module) -> None:
        """Register a replicated module for training."""
        self._replicated.update(id(parameter) for parameter in module.parameters())
        self.replicas.add(module)
        self.buffers.add(module)

    def flat_buffers(self) -> list[FlatBuffer]:
        """Return the flat buffers of every sharded optimizer."""
        return [flat_buffer for shard in self.shards for flat_buffer in shard.flat_buffers]

    def backward(
        self, loss: LossSpec, batch: Batch, update: Module, seed: tuple[int, ...], note: Any
    ) -> StepResult:
        """Set `.grad` in `update` to the gradient of the mean loss over the global batch.

        `seed` numbers this call in the run. `note` is JSON that is sent to all workers.
        """
        started = time.perf_counter()
        data_before = batch.data_seconds
        parameters = self._trainable(update)
        overlap = self._overlap_of(parameters)
        earlier = stash_gradients(parameters)
        for bucket in overlap.buckets:
            if bucket.flat_buffer is not None:
                bucket.flat_buffer.stash_gradients()
        lane_pass = LanePass(self, loss, batch, parameters, seed, overlap.active)
        own = lane_pass.run()
        report = lane_pass.report(own)  # reads losses, so it waits until a GPU has computed them
        self.compute_seconds += time.perf_counter() - started - (batch.data_seconds - data_before)

        started = time.perf_counter()
        overlap.finish(own)
        # all workers synchronize here
        reports = self.world.all_gather_json([report, note], "exchanging losses")
        results = [
            LaneResult(lane, rank, *result)
            for rank, (report, _) in enumerate(reports)
            for lane, *result in report["lanes"]
        ]
        self._check_finite(results, seed[0])
        written = sorted({number for report, _ in reports for number in report["buffers"]})
        self.buffers.end_step(written, [result.lane for result in results])
        if overlap.buckets:
            missing = set.intersection(*(set(report["missing"]) for report, _ in reports))
            for bucket in overlap.buckets:
                bucket.finish(parameters, missing, lane_pass.scale(results))
        else:
            _set_gradients(parameters, own[0], lane_pass.scale(results))
        _add_earlier(parameters, earlier)
        self.exchange_seconds += time.perf_counter() - started
        return StepResult(results, [worker_note for _, worker_note in reports])

    def _trainable(self, update: Module) -> list[Parameter]:
        parameters = self._parameters.setdefault(update, ModuleParameters()).trainable(update)
        if not parameters:
            issue = "no parameter that requires a gradient; call requires_grad_() or change update="
        elif not self._replicated.issuperset(map(id, parameters)):
            issue = "parameters that are not replicated; pass it to run.replicate first"
        else:
            return parameters
        raise ModelError(f"{type(update).__name__} has {issue}")

    def _check_finite(self, results: Iterable[LaneResult], step: int) -> None:
        if self.config.nonfinite_loss == "continue":
            return
        for result in results:
            if not math.isfinite(result.metrics["loss"]):
                raise NonFiniteLossError(
                    f"the loss is {result.metrics['loss']} at step {step} in lane {result.lane}"
                    f" (worker {result.rank}); lower the learning rate, clip gradients, or set"
                    " nonfinite_loss='continue'"
                )

    def _overlap_of(self, parameters: Parameters) -> Overlap:
        """Return the exchanges of these parameters, created once; a single worker has none."""
        cache_key = (len(self.shards), *map(id, parameters)) if self.world.size > 1 else ()
        if cache_key not in self._overlaps:
            own_buckets = self._buckets_of(parameters) if self.world.size > 1 else []
            if not own_buckets or self.lanes > self.world.size:  # several lanes are added first
                self._overlaps[cache_key] = Overlap(own_buckets)
            else:
                kind = EarlyCopies if self.world.shares_memory else EarlyExchange
                self._overlaps[cache_key] = kind(own_buckets, parameters)
        return self._overlaps[cache_key]

    def _buckets_of(self, parameters: Parameters) -> list[Bucket]:
        """Group sharded parameters by flat buffer, and the others by dtype and size."""
        number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        found = []
        for flat_buffer in self.flat_buffers():
            numbers = [number_of.pop(id(one), None) for one in flat_buffer.exchange.parameters]
            if set(numbers) != {None}:
                found.append(Bucket(flat_buffer.exchange, numbers, flat_buffer))
        for group in buckets([parameters[n] for n in number_of.values()], self.world):
            exchange = Exchange(group, self.lanes, self.world)
            found.append(Bucket(exchange, [number_of[id(parameter)] for parameter in group], None))
        return found


def _set_gradients(parameters: Parameters, gradients: Gradients, scale: float) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if gradient is None or scale == 1.0 else gradient.mul_(scale)


def _add_earlier(parameters: Parameters, earlier: Gradients) -> None:
    """Accumulate onto earlier gradients, as backward does in plain PyTorch."""
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
