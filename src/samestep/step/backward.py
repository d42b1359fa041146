"""One global batch: every lane's forward and backward, and the sum of their gradients over all workers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from samestep.errors import ModelError, NonFiniteLossError
from samestep.step.buffers import Buffers
from samestep.step.gradients import Exchange, Gradients, set_gradients_aside
from samestep.step.lanework import LaneWork
from samestep.step.means import LaneResult
from samestep.step.replicas import Replicas
from samestep.step.tree import carried

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from samestep.config import Config
    from samestep.data.batch import Batch
    from samestep.step.lanework import Loss
    from samestep.step.shard import Block, Shard
    from samestep.world import World


@dataclass(frozen=True)
class Answer:
    """What a global batch gave: each lane's result, and the note that each worker attached."""

    results: list[LaneResult]
    notes: list[Any]


@dataclass
class Target:
    """Some parameters whose gradients are exchanged together, by their numbers among the updated ones."""

    exchange: Exchange
    numbers: list[int | None]  # None: a parameter of a sharded optimizer that is not updated now
    block: Block | None


@dataclass
class Lanes:
    """The lanes that this worker carries: computes gradients, holds what is shared between steps."""

    world: World
    config: Config
    lanes: int
    devices: Sequence[torch.device]
    shards: list[Shard] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.carriers = [carried(rank, self.world.size, self.lanes) for rank in range(self.world.size)]
        self.own = self.carriers[self.world.rank]
        self.replicas = Replicas(self.devices, self.own)
        self.buffers = Buffers(self.own, self.lanes, self.world, self.carriers, self.devices)
        self.compute_seconds = 0.0
        self.exchange_seconds = 0.0
        self._known: set[int] = set()
        self._targets: dict[tuple[int, ...], list[Target]] = {}

    def add(self, module: torch.nn.Module) -> None:
        """Let a replicated module be trained."""
        self._known.update(id(parameter) for parameter in module.parameters())
        self.replicas.add(module)
        self.buffers.add(module)

    def blocks(self) -> list[Block]:
        """Return the flat storage of every sharded optimizer."""
        return [block for shard in self.shards for block in shard.blocks]

    def autocast(self) -> torch.autocast:
        """Return the context in which user code computes losses and outputs."""
        return torch.autocast(self.devices[0].type, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def backward(self, loss: Loss, batch: Batch, update: torch.nn.Module, seed: tuple[int, ...], note: Any) -> Answer:
        """Leave the gradient of the mean loss over all items of the global batch in `.grad` of `update`'s parameters.

        `seed` numbers this call within the run; `note` is JSON that reaches every worker with the same message.
        """
        started = time.perf_counter()
        data_before = batch.data_seconds
        parameters = self._trainable(update)
        holders = [parameters, *(block.own_parameters for block in self.blocks())]
        earlier = [set_gradients_aside(some) for some in holders]
        work = LaneWork(self, loss, batch, parameters, seed)
        own = work.run()
        self.compute_seconds += time.perf_counter() - started - (batch.data_seconds - data_before)

        started = time.perf_counter()
        reports = self.world.all_gather_json([work.report(own), note], "exchanging losses")
        results = [LaneResult(lane, rank, *result) for rank, (report, _) in enumerate(reports) for lane, *result in report["lanes"]]
        self._check_finite(results, seed[0])
        present = [any(flags) for flags in zip(*(report["present"] for report, _ in reports), strict=True)]
        written = sorted({number for report, _ in reports for number in report["buffers"]})
        self.buffers.end_step(written, [result.lane for result in results])
        self._exchange(parameters, own, present, work.scale(results))
        _add_earlier(holders, earlier)
        self.exchange_seconds += time.perf_counter() - started
        return Answer(results, [worker_note for _, worker_note in reports])

    def _trainable(self, update: torch.nn.Module) -> list[torch.nn.Parameter]:
        parameters = [parameter for parameter in update.parameters() if parameter.requires_grad]
        if not parameters:
            raise ModelError(f"{type(update).__name__} has no parameter that requires a gradient: nothing to update")
        if not all(id(parameter) in self._known for parameter in parameters):
            raise ModelError(f"{type(update).__name__} has parameters that are not replicated: pass it through run.replicate first")
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

    def _exchange(self, parameters: Sequence[torch.nn.Parameter], own: Sequence[Gradients], present: Sequence[bool], scale: float) -> None:
        if self.world.size == 1:
            for parameter, gradient in zip(parameters, own[0], strict=True):
                parameter.grad = gradient if gradient is None or scale == 1.0 else gradient.mul_(scale)
            return
        for target in self._targets_of(parameters):
            total = target.exchange.sum([[None if n is None else gradients[n] for n in target.numbers] for gradients in own])
            if scale != 1.0:
                total.mul_(scale)
            there = [n is not None and present[n] for n in target.numbers]
            if target.block is not None:
                target.block.set_gradients(total, there)
                continue
            for n, gradient in zip(target.numbers, target.exchange.gather(total), strict=True):
                if n is not None and present[n]:
                    parameters[n].grad = gradient

    def _targets_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[Target]:
        """Divide parameters into those of each sharded block, and the rest by dtype; made once for each set of parameters."""
        cache_key = (len(self.shards), *map(id, parameters))
        if cache_key not in self._targets:
            number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
            targets = []
            for block in self.blocks():
                numbers = [number_of.pop(id(parameter), None) for parameter in block.exchange.parameters]
                if any(number is not None for number in numbers):
                    targets.append(Target(block.exchange, numbers, block))
            rest = list(number_of.values())
            for dtype in dict.fromkeys(parameters[n].dtype for n in rest):
                numbers_of_dtype: list[int | None] = [n for n in rest if parameters[n].dtype == dtype]
                exchange = Exchange([parameters[n] for n in rest if parameters[n].dtype == dtype], self.lanes, self.world)
                targets.append(Target(exchange, numbers_of_dtype, None))
            self._targets[cache_key] = targets
        return self._targets[cache_key]


def _add_earlier(holders: Sequence[Sequence[torch.Tensor]], earlier: Sequence[Gradients]) -> None:
    """Accumulate onto gradients that stood there before, as backward does in plain PyTorch."""
    for some, gradients in zip(holders, earlier, strict=True):
        for holder, gradient in zip(some, gradients, strict=True):
            if gradient is not None:
                holder.grad = gradient if holder.grad is None else gradient.add_(holder.grad)
