"""A model whose parameters are sharded: FSDP2 gathers its units, and gradients go to the owners.

FSDP2 (`torch.distributed.fsdp.fully_shard`) divides each parameter by rows, gathers those of a unit
for its forward and backward pass, and frees them. It reduces nothing: a hook takes each gradient
when autograd has completed it, so it is that of one lane. When backward has left a unit for the
last time in a lane, each worker gets its part of the gradients of all workers' lanes, and adds them
in lane order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter, Sequential
from torch.utils._pytree import tree_flatten, tree_unflatten

from samestep.comm.base import World
from samestep.errors import ModelError
from samestep.sharded.memory import Boxes, Gather, GatherMemory
from samestep.sharded.parameter import guard
from samestep.sharded.parts import Part
from samestep.sharded.unit import Trace, Unit
from samestep.torch_internals import fully_shard_all, parameters_in, without_fsdp

Keep = Literal["forward", "lane", "step"]
Units = Sequence[type[Module]] | Callable[[str, Module], bool]
LEAST_BYTES: Final = 1 << 20  # of a repeated block
MOST_ROOT_BYTES: Final = 64 << 20  # of a model without units


class ShardedModel:
    """A model that is sharded over the workers of a run, in units, the last of which is itself."""

    def __init__(
        self,
        model: Module,
        units: Units | None,
        world: World,
        mesh: Any,
        memory: GatherMemory,
        boxes: Boxes,
        trace: Trace,
        *,
        keep: Keep,
        round_to: torch.dtype | None,
    ) -> None:
        self.model, self.keep = model, keep
        self._world, self._trace, self._boxes, self._round_to = world, trace, boxes, round_to
        named = [*units_of(model, units), (type(model).__name__, model)]
        self.units: list[Unit] = []
        fully_shard_all([module for _, module in named], mesh, keep=keep)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for number, (name, module) in enumerate(named):
            # weakly, because what a module holds is searched for state of user code
            note = _Weak(self, ShardedModel._note, number)
            gather = Gather(memory, note, f"gathering unit {name!r}")
            self.units.append(self._unit(name, module, gather, names))
        places = {name: place for place, name in enumerate(names.values())}
        parts = [part for unit in self.units for part in [*unit.parts, *unit.frozen]]
        self.parts = sorted(parts, key=lambda part: places[part.name])
        self.by_id = {id(part.sharded): part for part in self.parts}  # of the sharded ones
        for part in self.parts:
            guard(part.sharded)
        # the root's parameters may be used outside of its forward: it ends with the lane
        for number, unit in enumerate(self.units[:-1]):
            # after FSDP2's own hook, so in backward before it frees the parameters
            hook = _Weak(self, ShardedModel._before_forward, number)
            unit.module.register_forward_pre_hook(hook, with_kwargs=True)

    def _unit(self, name: str, module: Any, gather: Gather, names: Mapping[int, str]) -> Unit:
        """Return a unit, whose parts have the module's values."""
        module.set_custom_all_gather(gather)
        sharded = dict(module.named_parameters())
        module.unshard()
        rank, workers = self._world.rank, self._world.size
        parts = []
        for path, whole in module.named_parameters():
            if whole is not sharded[path]:
                full_name = names[id(sharded[path])]
                parts.append(Part(full_name, sharded[path], whole, rank, workers))
                parts[-1].take(whole)
        module.reshard()
        return Unit(name, module, parts, self._world, self._trace, self._boxes, self._round_to)

    def _note(self, number: int) -> None:
        if number < len(self.units):
            self._trace.calls.append(("gather", self.units[number]))

    def _before_forward(self, number: int, _: Module, args: Any, kwargs: Any) -> Any:
        """Let the unit know when backward has left it."""
        if self._trace.is_in_backward or not torch.is_grad_enabled():  # a checkpoint repeats it
            return None
        leaves, spec = tree_flatten((args, kwargs))
        places = [
            n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        unit = self.units[number]
        unit.enter()  # without such inputs, backward does not come back, and it ends with the lane
        if not places:
            return None
        watched = Left.apply(unit.leave, *[leaves[n] for n in places])  # type: ignore[no-untyped-call]
        for n, leaf in zip(places, watched, strict=True):
            leaves[n] = leaf
        return tree_unflatten(leaves, spec)

    def free(self) -> None:
        """Free what is gathered: before parameters change, and at the end of a step."""
        for unit in self.units:
            unit.free()

    @contextmanager
    def full(self) -> Iterator[None]:
        """Let the model have its whole parameters in this block; take what is written. Collective.

        All workers have to write the same.
        """
        self.free()
        whole: dict[int, Parameter] = {}  # by id of the sharded one
        for unit in self.units:
            unit.gather(frees=False)
            for part in [*unit.parts, *unit.frozen]:
                values = part.whole.detach().clone()
                whole[id(part.sharded)] = Parameter(values, part.whole.requires_grad)
            unit.free()
        places = [
            (registry, name, parameter)
            for registry in map(parameters_in, self.model.modules())
            for name, parameter in registry.items()
            if id(parameter) in whole
        ]
        with without_fsdp(self.model):
            for registry, name, parameter in places:
                registry[name] = whole[id(parameter)]
            try:
                yield
                for part in self.parts:
                    part.take(whole[id(part.sharded)])
            finally:
                for registry, name, parameter in places:
                    registry[name] = parameter
        self._world.barrier("leaving run.full_parameters")


class Left(torch.autograd.Function):
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


class _Weak:
    """A call of a function with an object that it does not keep alive."""

    def __init__(self, owner: object, function: Callable[..., Any], *first: Any) -> None:
        self._owner, self._function, self._first = ref(owner), function, first

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        return None if owner is None else self._function(owner, *self._first, *args)


def units_of(model: Module, units: Units | None) -> list[tuple[str, Module]]:
    """Return the modules whose parameters are gathered at once, by name, the inner ones first.

    `units` has their classes, or tells which ones they are. By default, they are the repeated
    blocks: members of a `ModuleList` or `Sequential` of one class that have at least 1 MiB.
    """
    is_unit: Callable[[str, Module], bool]
    if units is None:
        blocks = {id(block) for owner in model.modules() for block in _blocks_of(owner)}
        is_unit = lambda _, module: id(module) in blocks  # noqa: E731
    elif isinstance(units, Sequence):
        kinds = tuple(units)
        is_unit = lambda _, module: isinstance(module, kinds)  # noqa: E731
    else:
        is_unit = units
    named = [(name, module) for name, module in model.named_modules() if name]
    found = [(name, module) for name, module in named if is_unit(name, module)]
    if not found and (units is not None or _bytes(model) > MOST_ROOT_BYTES):
        raise ModelError(
            f"shard='full' found no units in {type(model).__name__}: pass the classes of its"
            " blocks, as in units=(Block,), whose parameters are gathered at once"
        )
    return found[::-1]


def _blocks_of(owner: Module) -> list[Module]:
    """Return the large members of a list of modules whose class has several of them."""
    members = [*owner.children()] if isinstance(owner, (ModuleList, Sequential)) else []
    numbers = Counter(map(type, members))
    return [m for m in members if numbers[type(m)] > 1 and _bytes(m) >= LEAST_BYTES]


def _bytes(module: Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
