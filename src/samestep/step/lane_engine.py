"""One global batch: every lane's forward and backward, and the sum of their gradients over all workers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from samestep.comm.base import World
from samestep.config import Config
from samestep.data.batch import Batch
from samestep.errors import ModelError, NonFiniteLossError
from samestep.step.buffers import Buffers
from samestep.step.exchange import Exchange, buckets
from samestep.step.gradients import Gradients, ModuleParameters, set_gradients_aside
from samestep.step.lane_pass import LanePass, Loss
from samestep.step.means import LaneResult
from samestep.step.overlap import Bucket, EarlyCopies, EarlyExchange, Overlap
from samestep.step.replicas import Replicas
from samestep.step.shard import FlatBuffer, Shard
from samestep.step.tree import carried


@dataclass(frozen=True)
class StepResult:
    """What a global batch gave: each lane's result, and the note that each worker attached."""

    results: list[LaneResult]
    notes: list[Any]


@dataclass
class LaneEngine:
    """The lanes that this worker carries: computes gradients, holds what is shared between steps."""

    world: World
    config: Config
    lanes: int
    devices: Sequence[torch.device]
    shards: list[Shard] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.carriers = [
            carried(rank, self.world.size, self.lanes) for rank in range(self.world.size)
        ]
        self.own = self.carriers[self.world.rank]
        self.replicas = Replicas(self.devices, self.own)
        self.buffers = Buffers(self.own, self.lanes, self.world, self.carriers, self.devices)
        self.compute_seconds = 0.0
        self.exchange_seconds = 0.0
        self._known: set[int] = set()
        self._parameters: WeakKeyDictionary[torch.nn.Module, ModuleParameters] = WeakKeyDictionary()
        self._overlaps: dict[tuple[int, ...], Overlap] = {}

    def add(self, module: torch.nn.Module) -> None:
        """Let a replicated module be trained."""
        self._known.update(id(parameter) for parameter in module.parameters())
        self.replicas.add(module)
        self.buffers.add(module)

    def blocks(self) -> list[FlatBuffer]:
        """Return the flat storage of every sharded optimizer."""
        return [block for shard in self.shards for block in shard.blocks]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which user code computes losses and outputs; in float32 one that it entered itself stays."""
        return (
            torch.autocast(self.devices[0].type, torch.bfloat16)
            if self.config.precision == "bfloat16"
            else nullcontext()
        )

    def backward(
        self, loss: Loss, batch: Batch, update: torch.nn.Module, seed: tuple[int, ...], note: Any
    ) -> StepResult:
        """Leave the gradient of the mean loss over all items of the global batch in `.grad` of `update`'s parameters.

        `seed` numbers this call within the run; `note` is JSON that reaches every worker with the
        same message.
        """
        started = time.perf_counter()
        data_before = batch.data_seconds
        parameters = self._trainable(update)
        overlap = self._overlap_of(parameters)
        earlier = set_gradients_aside(parameters)
        for target in overlap.targets:
            target.set_aside()
        work = LanePass(self, loss, batch, parameters, seed, overlap.watching)
        own = work.run()
        report = work.report(own)  # reads losses, so what a GPU computes has ended
        self.compute_seconds += time.perf_counter() - started - (batch.data_seconds - data_before)

        started = time.perf_counter()
        overlap.finish(own)
        # where all workers meet
        reports = self.world.all_gather_json([report, note], "exchanging losses")
        results = [
            LaneResult(lane, rank, *result)
            for rank, (report, _) in enumerate(reports)
            for lane, *result in report["lanes"]
        ]
        self._check_finite(results, seed[0])
        written = sorted({number for report, _ in reports for number in report["buffers"]})
        self.buffers.end_step(written, [result.lane for result in results])
        if overlap.targets:
            missing = set.intersection(*(set(report["missing"]) for report, _ in reports))
            for target in overlap.targets:
                target.finish(parameters, missing, work.scale(results))
        else:
            _set_gradients(parameters, own[0], work.scale(results))
        _add_earlier(parameters, earlier)
        self.exchange_seconds += time.perf_counter() - started
        return StepResult(results, [worker_note for _, worker_note in reports])

    def _trainable(self, update: torch.nn.Module) -> list[torch.nn.Parameter]:
        parameters = self._parameters.setdefault(update, ModuleParameters()).trainable(update)
        if not parameters:
            raise ModelError(
                f"{type(update).__name__} has no parameter that requires a gradient: nothing to update"
            )
        if not self._known.issuperset(map(id, parameters)):
            raise ModelError(
                f"{type(update).__name__} has parameters that are not replicated: pass it through run.replicate first"
            )
        return parameters

    def _check_finite(self, results: Iterable[LaneResult], step: int) -> None:
        if self.config.nonfinite_loss == "continue":
            return
        for result in results:
            if not math.isfinite(result.metrics["loss"]):
                raise NonFiniteLossError(
                    f"the loss is {result.metrics['loss']} at step {step} in lane {result.lane} (worker {result.rank}); expected a "
                    "finite one: lower the learning rate, clip gradients, or go on with nonfinite_loss='continue'"
                )

    def _overlap_of(self, parameters: Sequence[torch.nn.Parameter]) -> Overlap:
        """Return what gives gradients to the exchanges; once for each set of parameters. One worker exchanges nothing."""
        cache_key = (len(self.shards), *map(id, parameters)) if self.world.size > 1 else ()
        if cache_key not in self._overlaps:
            targets = self._targets_of(parameters) if self.world.size > 1 else []
            if not targets or self.lanes > self.world.size:  # several lanes are added up first
                self._overlaps[cache_key] = Overlap(targets)
            else:
                kind = EarlyCopies if self.world.shares_memory else EarlyExchange
                self._overlaps[cache_key] = kind(targets, parameters)
        return self._overlaps[cache_key]

    def _targets_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[Bucket]:
        """Divide parameters into those of each sharded block, and the rest by dtype and bucket."""
        number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        targets = []
        for block in self.blocks():
            numbers = [
                number_of.pop(id(parameter), None) for parameter in block.exchange.parameters
            ]
            if any(number is not None for number in numbers):
                targets.append(Bucket(block.exchange, numbers, block))
        return targets + [
            Bucket(
                Exchange(bucket, self.lanes, self.world),
                [number_of[id(parameter)] for parameter in bucket],
                None,
            )
            for bucket in buckets([parameters[n] for n in number_of.values()], self.world)
        ]


def _set_gradients(
    parameters: Sequence[torch.nn.Parameter], gradients: Gradients, scale: float
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if gradient is None or scale == 1.0 else gradient.mul_(scale)


def _add_earlier(parameters: Sequence[torch.nn.Parameter], earlier: Gradients) -> None:
    """Accumulate onto gradients that stood there before, as backward does in plain PyTorch."""
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
