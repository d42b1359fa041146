"""A unit of a sharded model: a module whose parameters are gathered at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from samestep.comm.base import World
from samestep.errors import LossError, ModelError
from samestep.sharded.carry import Carry
from samestep.sharded.memory import Boxes, GatherMemory, is_shared
from samestep.sharded.parts import Part
from samestep.sharded.trace import Trace
from samestep.step.gradients import sum_dtype
from samestep.torch_internals import end_passes


@dataclass(frozen=True)
class Sharding:
    """What the units of a run have in common.

    `mesh` is FSDP2's, of all workers. Gradients and sums are rounded to `round_to`, None for the
    parameters' own dtype. `units` are those of all models, by their numbers, and `whole` those of
    them whose modules have whole parameters now.
    """

    world: World
    device: torch.device
    mesh: Any
    memory: GatherMemory
    boxes: Boxes
    trace: Trace
    round_to: torch.dtype | None
    units: dict[int, Unit] = field(default_factory=dict)
    whole: set[Unit] = field(default_factory=set)

    def free(self) -> None:
        """Free what is gathered of all models, of which a copy may have ended."""
        for unit in self.units.values():
            if unit not in self.whole and unit.module is not None:
                unit.free()

    def await_readers(self) -> None:
        """Let no worker compute with parameters that are about to change. Collective."""
        if self.whole:
            raise ModelError(
                "rows of sharded models cannot be changed in `with run.full_parameters(...)`, which"
                " keeps what the whole parameters have at its end: leave the block before"
            )
        self.free()
        self.memory.await_readers()


class Unit:
    """A module whose parameters are gathered at once; `parts` are those that are trained.

    Gradients of a lane are added to those of the other lanes when backward has left the module as
    often as forward has entered it.
    """

    def __init__(self, name: str, module: Module, parts: list[Part], sharding: Sharding) -> None:
        self.name, self._module = name, ref(module)
        self._sharding, self._world = sharding, sharding.world
        self._trace = sharding.trace
        self.number = len(self._trace.names)
        self._trace.names.append(name)
        self.all_parts = parts  # also those that are not trained
        self.parts = [part for part in parts if part.unsharded.requires_grad]
        dtypes = {part.unsharded.dtype for part in self.parts}
        if len(dtypes) > 1:
            raise ModelError(
                f"unit {name!r} has trained parameters of several dtypes: "
                f"{', '.join(sorted(map(str, dtypes)))}; make each a unit of its own"
            )
        self._dtype = sum_dtype(min(dtypes, default=torch.float32, key=str), sharding.round_to)
        # elements of each lane that each worker gets, by rank
        self._sizes = [
            sum(high - low for low, high in (part.wide[rank] for part in self.parts))
            for rank in range(self._world.size)
        ]
        self._is_held = False
        self._gradients: dict[int, Tensor] = {}  # of the current lane, by number of the part
        self._entered = 0  # times that forward has entered it and backward has not left it
        self._is_added = True  # unless a lane trains it whose gradients are not added yet
        self._used: set[int] = set()  # parts with a gradient in any lane of this worker
        self._sums = Carry()  # of this worker's elements of all parts, 1-D
        for number, part in enumerate(self.parts):
            hook = partial(self._arrived, number)
            part.unsharded.register_post_accumulate_grad_hook(hook)

    @property
    def module(self) -> Any:
        """The module."""
        return self._module()

    def gather(self) -> None:
        """Gather the parameters."""
        self.module.unshard()

    def serve_gather(self) -> None:
        """Take part in a gather of others, and free the parameters if others do."""
        self.gather()
        if not self._is_held:
            self.free()

    def hold(self, *, in_lane: bool, in_step: bool) -> None:
        """Keep what is gathered between forward and backward, and from lane to lane, or free it.

        Outside of steps it is freed, because user code then has to see sharded parameters.
        """
        self._is_held = in_step
        self.module.set_reshard_after_forward(not in_lane, recurse=False)
        self.module.set_reshard_after_backward(not in_step, recurse=False)

    def free(self) -> None:
        """Free the parameters if they are gathered, outside of passes."""
        end_passes(self.module)

    def begin_step(self) -> None:
        """Forget what a step that failed has left."""
        self._sums.total()
        self._used = set()

    def begin_lane(self) -> None:
        """Begin a lane that trains the unit; forget what one that failed has left."""
        self._gradients, self._entered, self._is_added = {}, 0, False

    def close_lane(self) -> None:
        """Add nothing until the next lane that trains the unit: others may call it as well."""
        self._is_added = True

    def enter(self) -> None:
        """Note that forward enters the module."""
        self._entered += 1

    def leave(self) -> None:
        """Note that backward has left the module."""
        self._entered -= 1
        if self._entered == 0 and self._trace.is_in_backward:
            self.end_lane()

    def end_lane(self) -> None:
        """Add the gradients of this lane, unless that is done."""
        if not self._is_added and self.parts:
            self._is_added = True
            self.add_lane()

    def _arrived(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if not self._trace.is_in_backward or gradient is None:  # a hook of user code took it
            return
        if self._is_added:
            raise LossError(
                f"a gradient of {self.parts[number].name!r} came after those of its unit"
                f" {self.name!r} were complete: a parameter of a sharded model may only be used in"
                " the forward of its unit"
            )
        earlier = self._gradients.get(number)  # of a backward pass of its own in the lane
        self._gradients[number] = gradient if earlier is None else earlier.add_(gradient)
        parameter.grad = None
        self._used.add(number)

    def add_lane(self) -> None:
        """Give each worker its elements of the lane's gradients; add those of all lanes here.

        A parameter that a lane did not use has zeros.
        """
        if not self.parts:
            return
        rank, workers, senders = self._world.rank, self._world.size, self._trace.senders
        self._trace.add("sum", self.number)
        gradients = self._take() if rank < senders else [[] for _ in range(workers)]
        size, what = self._sizes[rank], f"adding up the gradients of unit {self.name!r}"
        if is_shared(self._world, self._sharding.device):
            pieces = self._sharding.boxes.pieces(self._sizes, gradients, senders, self._dtype, what)
            self._sums.add(size, pieces)
            return
        none = torch.empty(0, dtype=self._dtype, device=self._sharding.device)
        sent = torch.cat([none, *chain.from_iterable(gradients)])
        gradients.clear()
        received = sent.new_empty(senders * size)
        self._world.all_to_all(
            received,
            [size * (sender < senders) for sender in range(workers)],
            sent,
            [size * (rank < senders) for size in self._sizes],
            what,
        )
        if size:
            self._sums.add(size, [(0, size, received.split(size))])  # in lane order

    def _take(self) -> list[list[Tensor]]:
        """Return the parts of this lane's gradients, 1-D, by the worker that gets them."""
        gradients, self._gradients = self._gradients, {}
        flat = [
            gradients[number].reshape(-1).to(self._dtype)
            if number in gradients
            else part.unsharded.new_zeros(part.numel, dtype=self._dtype)
            for number, part in enumerate(self.parts)
        ]
        return [
            [flat[number][slice(*part.wide[owner])] for number, part in enumerate(self.parts)]
            for owner in range(self._world.size)
        ]

    def totals(self) -> list[tuple[Part, Tensor]]:
        """Return the sum over all lanes of each part that this worker has a part of."""
        total = self._sums.total()
        if total is None:
            return []
        return list(zip(self.parts, total.split([part.size for part in self.parts]), strict=True))

    def used(self) -> set[int]:
        """Return the ids of whole parameters that lanes of this worker used."""
        return {id(self.parts[number].unsharded) for number in self._used}
