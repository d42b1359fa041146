"""The sharded models of a run, and what makes them and their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Final, get_args

import torch
from torch import optim
from torch.nn import Module

from samestep.comm.connect import mesh_of_workers
from samestep.errors import ConfigError, ModelError, OptimizerError
from samestep.sharded.lane_pass import StreamedSums
from samestep.sharded.memory import Boxes, GatherMemory
from samestep.sharded.model import Keep, ShardedModel, Units
from samestep.sharded.model_state import ModelState
from samestep.sharded.optimizer import ShardedOptimizer
from samestep.sharded.parts import Part
from samestep.sharded.unit import Trace
from samestep.step.buffer_rules import Rule
from samestep.step.gradients import Parameters, parameters_of
from samestep.step.lane_engine import LaneEngine
from samestep.step.overlap import Overlap
from samestep.torch_internals import can_shard_fully

KEEPS: Final = get_args(Keep)


class ShardedModels:
    """The models that `run.replicate(..., shard="full")` has divided, by id."""

    def __init__(self, engine: LaneEngine) -> None:
        self._engine, self._world = engine, engine.world
        self._memory, self._boxes = GatherMemory(engine.world), Boxes(engine.world)
        self._trace = Trace()
        self._models: dict[int, ShardedModel] = {}
        self._parts: dict[int, Part] = {}  # by id of the sharded parameter

    def add(
        self, model: Module, rules: Mapping[str, Rule] | None, units: Units | None, keep: Keep
    ) -> None:
        """Shard a model that is replicated, and register it for training."""
        engine = self._engine
        self._check(keep)
        if not self._models:
            if engine.optimizers.seals:
                raise ModelError(
                    "run.replicate(..., shard='full') changes which worker computes which lanes:"
                    " call it before run.shard and before the first step"
                )
            engine.take_turns(self._sums, self._free)
            engine.optimizers.checks.append(self._refuse_unsharded)
        sharded = ShardedModel(
            model,
            units,
            self._world,
            mesh_of_workers(self._world, engine.devices[0], engine.config.timeout),
            self._memory,
            self._boxes,
            self._trace,
            keep=keep,
            round_to=engine.round_to,
        )
        self._models[id(model)] = sharded
        self._parts |= sharded.by_id
        engine.add(model, rules)
        engine.manual.watch_named(model, ((part.name, part.whole) for part in sharded.parts))
        whole = {number: part.whole for number, part in sharded.by_id.items()}
        engine.models.divide(whole, {n: part.segment for n, part in sharded.by_id.items()})

    def _check(self, keep: Keep) -> None:
        """Raise `ConfigError` if models cannot be sharded here."""
        config = self._engine.config
        if not can_shard_fully():
            raise ConfigError(
                f"shard='full' needs PyTorch 2.9 or later, got {torch.__version__}: upgrade it, or"
                " replicate the model and use run.shard"
            )
        if keep not in KEEPS:
            raise ConfigError(f"keep must be one of {', '.join(KEEPS)}, got {keep!r}")
        if len(self._engine.devices) > 1:
            raise ConfigError(
                "shard='full' needs one device per worker: start a worker for each GPU"
            )
        if config.recheck_every is not None:
            raise ConfigError(
                "shard='full' cannot be used with recheck_every, which repeats lanes and updates"
                " on one worker; leave one of them out"
            )

    def holds(self, optimizer: optim.Optimizer) -> bool:
        """Return whether the optimizer has parameters of a sharded model."""
        return not self._parts.keys().isdisjoint(map(id, parameters_of(optimizer)))

    def shard(self, optimizer: optim.Optimizer) -> ShardedOptimizer:
        """Let an optimizer update the rows of this worker."""
        others = [p for p in parameters_of(optimizer) if id(p) not in self._parts]
        if others:
            raise OptimizerError(
                f"this {type(optimizer).__name__} has parameters of a sharded model and others, of"
                f" shape {tuple(others[0].shape)}: make an optimizer for each"
            )
        return ShardedOptimizer(optimizer, self._parts, self._world, self._free)

    def state_of(self, item: object) -> ModelState | None:
        """Return what saves and loads a sharded model, None for other objects."""
        sharded = self._models.get(id(item))
        return None if sharded is None else ModelState(sharded, is_main=self._world.rank == 0)

    @contextmanager
    def full(self, model: Module) -> Iterator[None]:
        """Let a model have its whole parameters in this block. Collective."""
        sharded = self._models.get(id(model))
        if sharded is None and any(id(part) in self._models for part in model.modules()):
            raise ModelError("run.full_parameters needs the module that run.replicate got")
        with nullcontext() if sharded is None else sharded.full():
            yield

    def _sums(self, parameters: Parameters, new: Callable[[Parameters], Overlap]) -> Overlap:
        """Return the sums of parameters; `new` returns those of replicated ones."""
        model_of = {id(p.whole): model for model in self._models.values() for p in model.parts}
        others = [n for n, parameter in enumerate(parameters) if id(parameter) not in model_of]
        used = {id(m): m for m in (model_of.get(id(p)) for p in parameters) if m is not None}
        if not used:
            return new(parameters)
        inner = new([parameters[n] for n in others]) if others else None
        return StreamedSums([*used.values()], others, inner, self._world, self._trace)

    def _free(self) -> None:
        """Free gathered parameters, which are no longer the current ones."""
        for model in self._models.values():
            model.free()

    def _refuse_unsharded(self, optimizer: optim.Optimizer) -> None:
        seals = self._engine.optimizers.seals
        if self.holds(optimizer) and all(seal.optimizer is not optimizer for seal in seals):
            name = type(optimizer).__name__
            raise OptimizerError(
                f"this {name} has parameters of a sharded model, of which it would update nothing:"
                f" write optimizer = run.shard({name}(model.parameters(), ...))"
            )
