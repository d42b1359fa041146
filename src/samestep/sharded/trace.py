"""What the units of sharded models do in a lane, which is the same on all workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Final, Literal

import torch

from samestep.comm.base import World
from samestep.errors import LossError

Kind = Literal["gather", "sum"]
Call = tuple[Kind, int]  # with the number of the unit
END: Final = ("end", -1)  # of a lane, instead of a call
DIFFERENT: Final = (
    "workers call the units of a sharded model in different orders: worker {} is {}, and worker {}"
    " is {}. All lanes have to call the same units in one order; what depends on the samples"
    " belongs into the forward of a unit"
)


class Trace:
    """Calls of units in a lane, in order: gathers of parameters and sums of gradients.

    A worker without a lane does the same, without a gradient. `senders` workers have a lane now.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        self.names: list[str] = []  # of the units of all models
        self.calls: list[Call] = []  # of the current lane
        self.senders = 0
        self.is_in_backward = False
        self._made: list[Call] = []  # in the step, also those that were served
        self._is_in_lane = self._announces = False

    def begin_step(self) -> None:
        """Begin a step."""
        self._made = []

    def begin(self, senders: int, *, announces: bool) -> None:
        """Begin a lane, whose calls are announced to workers that do not know their order yet."""
        self.calls, self.senders, self.is_in_backward = [], senders, False
        self._is_in_lane, self._announces = True, announces and self._world.size > 1

    def begin_backward(self) -> None:
        """Begin the backward pass of the lane."""
        self.is_in_backward = True

    def end(self) -> None:
        """End a lane, after which no gradient is one of a lane."""
        self.is_in_backward = self._is_in_lane = self._announces = False

    def add(self, kind: Kind, unit: int) -> None:
        """Note a call before it is made."""
        if self._announces:
            self._next(kind, unit)
        if self._is_in_lane:  # not in an evaluation
            self.calls.append((kind, unit))
            self._made.append((kind, unit))

    def end_calls(self) -> None:
        """End the calls of a lane."""
        if self._announces:
            self._next(*END)

    def follow(self, serve: Callable[[Kind, int], None]) -> None:
        """Serve what other workers announce, until the end of their lanes. It becomes `calls`.

        There are none if no worker has a lane with samples.
        """
        while (call := self._next()) not in {None, END}:
            self._announces = False  # while it is served
            serve(*call)
            self._announces = True
        self._announces = False

    def _next(self, *call: Any) -> Any:
        """Return the call that workers make next, None if none of them knows. Collective."""
        calls = self._world.all_gather_json(call, "agreeing on the next unit of a sharded model")
        announced = [(rank, tuple(call)) for rank, call in enumerate(calls) if call]
        if not announced:
            return None
        first_rank, first = announced[0]
        for rank, other in announced:
            if other != first:
                raise self._difference(first_rank, first, rank, other)
        return first

    def compare(self) -> None:
        """Raise `LossError` if GPUs of workers made different calls in a step. Collective.

        CPUs notice it in each call.
        """
        if self._world.size == 1 or self._device.type == "cpu":
            return
        what = "comparing the calls of units"
        digest = hashlib.sha256(json.dumps(self._made).encode()).hexdigest()
        if len({*self._world.all_gather_json(digest, what)}) == 1:
            return
        made = self._world.all_gather_json(self._made, what)
        rank = next(rank for rank, calls in enumerate(made) if calls != made[0])
        pairs = zip_longest(
            *([*map(tuple, calls)] for calls in (made[0], made[rank])), fillvalue=END
        )
        first, other = next((first, other) for first, other in pairs if first != other)
        raise self._difference(0, first, rank, other)

    def _difference(self, first_rank: int, first: Any, rank: int, other: Any) -> LossError:
        return LossError(
            DIFFERENT.format(first_rank, self._doing(*first), rank, self._doing(*other))
        )

    def _doing(self, kind: str, unit: int) -> str:
        if (kind, unit) == END:
            return "at the end of its lane"
        what = "gathering" if kind == "gather" else "adding up the gradients of"
        return f"{what} unit {self.names[unit]!r}"
