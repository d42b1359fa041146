"""A model whose parameters are sharded: FSDP2 gathers its units, and gradients go to the owners.

FSDP2 (`torch.distributed.fsdp.fully_shard`) divides each parameter by rows, gathers those of a unit
for its forward and backward pass, and frees them. It reduces nothing: a hook takes each gradient
when autograd has completed it, so it is that of one lane. When backward has left a unit for the
last time in a lane, each worker gets its part of the gradients of all workers' lanes, and adds them
in lane order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_flatten, tree_unflatten

from samestep.errors import ModelError
from samestep.sharded.choice import Units, units_of
from samestep.sharded.memory import Gather
from samestep.sharded.parameter import READ, guard
from samestep.sharded.parts import Part
from samestep.sharded.trace import Trace
from samestep.sharded.unit import Sharding, Unit
from samestep.torch_internals import copy_with, fully_shard_all, parameters_in, without_fsdp

Keep = Literal["forward", "lane", "step"]
Copy = Callable[[Module, dict[int, Any]], Module]
NO_COPY = (
    "a part of a sharded model cannot be copied alone: copy the module that run.replicate got, or"
    " copy the part in `with run.full_parameters(model):`"
)


class ShardedModel:
    """A model that is sharded over the workers of a run, in units, the last of which is itself.

    If its parameters are on the meta device, `values_of` returns those of the segment of each part,
    and no worker has more than a unit of them. `copy` makes a copy that `copy.deepcopy` returns.
    """

    def __init__(
        self,
        model: Module,
        units: Units | None,
        sharding: Sharding,
        keep: Keep,
        copy: Copy,
        values_of: Callable[[Part], Tensor] | None = None,
    ) -> None:
        self._model = ref(model)  # a copy of a model may end before the run
        self.keep, self._sharding = keep, sharding
        named = units_of(model, units)
        self.names = {name for name, _ in named[:-1]}
        self.units: list[Unit] = []

        modules = [module for _, module in named]
        fully_shard_all(
            modules,
            sharding.mesh,
            before=lambda module: materialize(module, sharding.device),
            after=lambda: sharding.memory.share([*model.parameters()]),
        )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, module in named:
            self.units.append(self._unit(name, module, names, values_of))
            copy_with(module, copy if module is model else _refuse_copy)
        places = {name: place for place, name in enumerate(names.values())}
        parts = [part for unit in self.units for part in unit.all_parts]
        self.parts = sorted(parts, key=lambda part: places[part.name])
        self.by_id = {id(part.sharded): part for part in self.parts}  # of the sharded ones
        for module in modules:
            module.register_state_dict_pre_hook(_refuse_state)
        # the root's parameters may be used outside of its forward: it ends with the lane
        for number, unit in enumerate(self.units[:-1]):
            # after FSDP2's own hook, so in backward before it frees the parameters
            hook = _WeakCall(self, ShardedModel._before_forward, number)
            unit.module.register_forward_pre_hook(hook, with_kwargs=True)

    @property
    def model(self) -> Any:
        """The module, None if nothing holds it any more."""
        return self._model()

    def _unit(
        self,
        name: str,
        module: Any,
        names: Mapping[int, str],
        values_of: Callable[[Part], Tensor] | None,
    ) -> Unit:
        """Return a unit, whose parts have the module's values unless there are others."""
        sharding = self._sharding
        # weakly, because what a module holds is searched for state of user code
        note = _WeakCall(sharding.trace, Trace.add, "gather", len(sharding.trace.names))
        module.set_custom_all_gather(Gather(sharding.memory, note, f"gathering unit {name!r}"))
        sharded = dict(module.named_parameters())
        module.unshard()
        rank, workers = sharding.world.rank, sharding.world.size
        parts = []
        for path, unsharded in module.named_parameters():
            if unsharded is not sharded[path]:
                part = Part(names[id(sharded[path])], sharded[path], unsharded, rank, workers)
                parts.append(part)
                if values_of is None:
                    part.take(unsharded)
        module.reshard()
        if values_of is not None:
            for part in parts:
                part.set(values_of(part))
        unit = Unit(name, module, parts, sharding)
        for part in parts:
            guard(part, sharding.await_readers)
        return unit

    def _before_forward(self, number: int, _: Module, args: Any, kwargs: Any) -> Any:
        """Let the unit know when backward has left it."""
        if self._sharding.trace.is_in_backward or not torch.is_grad_enabled():
            return None  # a checkpoint repeats it
        leaves, spec = tree_flatten((args, kwargs))
        places = [
            n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        unit = self.units[number]
        unit.enter()  # without such inputs, backward does not come back, and it ends with the lane
        if not places:
            return None
        watched = EndOfBackward.apply(unit.leave, *[leaves[n] for n in places])  # type: ignore[no-untyped-call]
        for n, leaf in zip(places, watched, strict=True):
            leaves[n] = leaf
        return tree_unflatten(leaves, spec)

    def hold(self) -> None:
        """Keep units gathered as long as `keep` says, in the lanes of a step."""
        for unit in self.units:
            unit.hold(in_lane=self.keep != "forward", in_step=self.keep == "step")

    def release(self) -> None:
        """Free each unit from now on after each forward pass."""
        for unit in self.units:
            unit.hold(in_lane=False, in_step=False)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Let the model have its whole parameters in this block; take what is written. Collective.

        All workers have to write the same.
        """
        if self.units[0] in self._sharding.whole:  # a block in a block
            yield
            return
        self._sharding.free()
        unsharded: dict[int, Parameter] = {}  # by id of the sharded one
        for unit in self.units:
            unit.gather()
            for part in unit.all_parts:
                values = part.unsharded.detach().clone()
                unsharded[id(part.sharded)] = Parameter(values, part.unsharded.requires_grad)
            unit.free()
        with self._having(unsharded):
            yield
            self._sharding.world.barrier("leaving run.full_parameters")  # others may still read
            for part in self.parts:
                part.take(unsharded[id(part.sharded)])

    @contextmanager
    def _having(self, unsharded: Mapping[int, Parameter]) -> Iterator[None]:
        """Let the model be a plain one, with these parameters by id of the sharded ones."""
        places = [
            (registry, name, parameter)
            for registry in map(parameters_in, self.model.modules())
            for name, parameter in registry.items()
            if id(parameter) in unsharded
        ]
        with without_fsdp(self.model):
            for registry, name, parameter in places:
                registry[name] = unsharded[id(parameter)]
            self._sharding.whole.update(self.units)
            try:
                yield
            finally:
                self._sharding.whole.difference_update(self.units)
                for registry, name, parameter in places:
                    registry[name] = parameter

    def plain_copy(self, memo: dict[int, Any]) -> Module:
        """Return a plain copy of the model, with parameters on the meta device."""
        self._sharding.free()
        unsharded = {
            id(part.sharded): Parameter(
                torch.empty(part.shape, dtype=part.segment.dtype, device="meta"),
                part.unsharded.requires_grad,
            )
            for part in self.parts
        }
        with self._having(unsharded):
            copied: Module = deepcopy(self.model, memo)
            return copied


def materialize(module: Module, device: torch.device) -> None:
    """Give parameters on the meta device memory, without values; those that are tied stay so."""
    made: dict[int, Parameter] = {}
    for registry in map(parameters_in, module.modules()):
        for name, parameter in registry.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    made[id(parameter)] = Parameter(values, parameter.requires_grad)
                registry[name] = made[id(parameter)]


def _refuse_state(_: Module, __: str, keep_vars: bool) -> None:
    if not keep_vars:
        raise ModelError(READ.format("state_dict"))


def _refuse_copy(_: Module, __: dict[int, Any]) -> Module:
    raise ModelError(NO_COPY)


class EndOfBackward(torch.autograd.Function):
    """Calls a function when backward has passed all that follows in a unit, as FSDP2 does."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs."""
        ctx.function = function
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Call the function, and return the gradients."""
        ctx.function()
        return None, *gradients


class _WeakCall:
    """A call of a function with an object that it does not keep alive."""

    def __init__(self, owner: object, function: Callable[..., Any], *first: Any) -> None:
        self._owner, self._function, self._first = ref(owner), function, first

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        return None if owner is None else self._function(owner, *self._first, *args)
