"""The sharded models of a run, and what makes them and their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_args
from weakref import ref

import torch
from torch import Tensor, optim
from torch.nn import Module

from samestep.comm.connect import mesh_of_workers
from samestep.errors import ConfigError, ModelError, OptimizerError
from samestep.sharded.choice import Units
from samestep.sharded.lane_pass import StreamedSums
from samestep.sharded.memory import Boxes, GatherMemory
from samestep.sharded.model import Keep, ShardedModel, materialize
from samestep.sharded.model_state import ModelState
from samestep.sharded.optimizer import ShardedOptimizer
from samestep.sharded.parts import Part
from samestep.sharded.trace import Trace
from samestep.sharded.unit import Sharding
from samestep.sharded.weights import Weights, open_together
from samestep.step.buffer_rules import Rule
from samestep.step.gradients import Parameters, parameters_of
from samestep.step.lane_engine import LaneEngine
from samestep.step.overlap import Overlap
from samestep.torch_internals import can_shard_fully

KEEPS: Final = get_args(Keep)


class ShardedModels:
    """The models that `run.replicate(..., shard="full")` has divided, and their copies, by id."""

    def __init__(self, engine: LaneEngine) -> None:
        self._engine, self._world = engine, engine.world
        self._models: dict[int, ShardedModel] = {}
        self._parts: dict[int, Part] = {}  # by id of the sharded parameter

    @cached_property
    def _sharding(self) -> Sharding:
        world, device = self._world, self._engine.devices[0]
        mesh = mesh_of_workers(world, device, self._engine.config.timeout)
        memory = GatherMemory(world, device)
        trace, round_to = Trace(world, device), self._engine.round_to
        return Sharding(world, device, mesh, memory, Boxes(world), trace, round_to)

    def check(self, model: object, keep: Keep) -> None:
        """Raise `ConfigError` or `ModelError` if a model cannot be sharded here, or is already."""
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
        if isinstance(model, Module) and self._inside(model):
            raise ModelError(
                f"this {type(model).__name__} is sharded already, or a copy of a sharded model: to"
                " train a copy, make it in `with run.full_parameters(model):`"
            )

    def add(
        self,
        model: Module,
        rules: Mapping[str, Rule] | None,
        units: Units | None,
        keep: Keep,
        weights: Weights | None,
    ) -> None:
        """Shard a model that is replicated, and register it for training."""
        engine = self._engine
        if not self._models:
            if engine.optimizers.seals:
                raise ModelError(
                    "run.replicate(..., shard='full') changes which worker computes which lanes:"
                    " call it before run.shard and before the first step"
                )
            engine.take_turns(self._sums, self._sharding.free)
            engine.optimizers.checks.append(self._refuse_unsharded)
        sharded = self._divide(model, units, keep, None if weights is None else weights.of)
        engine.add(model, rules)
        engine.manual.watch_named(model, ((part.name, part.unsharded) for part in sharded.parts))
        unsharded = {number: part.unsharded for number, part in sharded.by_id.items()}
        engine.models.divide(unsharded, {n: part.segment for n, part in sharded.by_id.items()})

    def _divide(
        self,
        model: Module,
        units: Units | None,
        keep: Keep,
        values_of: Callable[[Part], Tensor] | None,
    ) -> ShardedModel:
        for number, earlier in list(self._models.items()):
            if earlier.model is None:  # a copy that has ended
                del self._models[number]
                for part in earlier.parts:
                    del self._parts[id(part.sharded)]
                for unit in earlier.units:
                    del self._sharding.units[unit.number]
        owner = ref(self)  # a module is searched for state of user code

        def copy(module: Module, memo: dict[int, Any]) -> Module:
            models = owner()
            if models is None:
                raise ModelError("a sharded model cannot be copied after its run has ended")
            return models._copy(module, memo)  # noqa: SLF001

        sharded = ShardedModel(model, units, self._sharding, keep, copy, values_of)
        self._models[id(model)] = sharded
        self._parts |= sharded.by_id
        self._sharding.units.update({unit.number: unit for unit in sharded.units})
        return sharded

    def _copy(self, model: Module, memo: dict[int, Any]) -> Module:
        """Return a copy of a sharded model, of which each worker has the same rows. Collective."""
        source = self._models[id(model)]
        copied = source.plain_copy(memo)
        segments = {part.name: part.segment.detach() for part in source.parts}
        units = (lambda name, _: name in source.names) if source.names else None
        self._divide(copied, units, source.keep, lambda part: segments[part.name])
        return copied

    def open(self, model: Module, path: str | Path) -> Weights:
        """Return the values of a model in a file, and fill its buffers. Collective."""
        return open_together(path, model, self._engine.devices[0], self._world)

    def fill(self, model: Module, weights: Weights) -> None:
        """Let a model have the values of a file, whole: for `samestep replay`."""
        materialize(model, self._engine.devices[0])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                values = weights.rows(name, 0, parameter.numel())
                parameter.copy_(values.view_as(parameter))

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
        return ShardedOptimizer(optimizer, self._parts, self._world, self._sharding.await_readers)

    def state_of(self, item: object) -> ModelState | None:
        """Return what saves and loads a module with sharded parameters, None for other objects."""
        if not isinstance(item, Module) or not self._inside(item):
            return None
        return ModelState(item, self._parts, self._sharding.await_readers)

    @contextmanager
    def full(self, model: Module) -> Iterator[None]:
        """Let the sharded models in a module have their whole parameters. Collective."""
        inside = self._inside(model)
        if inside and not any(inside):
            raise ModelError("run.full_parameters needs the module that run.replicate got")
        with ExitStack() as stack:
            for sharded in filter(None, inside):
                stack.enter_context(sharded.full())
            yield

    def _inside(self, model: Module) -> list[ShardedModel | None]:
        """Return the sharded models in a module, [None] if it is only a part of one."""
        inside = [
            sharded
            for module in model.modules()
            if (sharded := self._models.get(id(module))) is not None and sharded.model is module
        ]
        is_part = not inside and any(id(p) in self._parts for p in model.parameters())
        return [None] if is_part else [*inside]

    def _sums(self, parameters: Parameters, new: Callable[[Parameters], Overlap]) -> Overlap:
        """Return the sums of parameters; `new` returns those of replicated ones."""
        model_of = {id(p.unsharded): model for model in self._models.values() for p in model.parts}
        others = [n for n, parameter in enumerate(parameters) if id(parameter) not in model_of]
        used = {id(m): m for m in (model_of.get(id(p)) for p in parameters) if m is not None}
        if not used:
            return new(parameters)
        inner = new([parameters[n] for n in others]) if others else None
        return StreamedSums([*used.values()], others, inner, self._sharding)

    def _refuse_unsharded(self, optimizer: optim.Optimizer) -> None:
        seals = self._engine.optimizers.seals
        if self.holds(optimizer) and all(seal.optimizer is not optimizer for seal in seals):
            name = type(optimizer).__name__
            raise OptimizerError(
                f"this {name} has parameters of a sharded model, of which it would update nothing:"
                f" write optimizer = run.shard({name}(model.parameters(), ...))"
            )
