"""What the graph of a loss shows: parameters that nothing trains, and means of other items.

A learned weight of a loss, or the temperature of a policy, gets no gradient unless a module that
has it is named, so that its optimizer would step without one. A mean over labels that are not
ignored is no mean over the samples of a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from samestep.errors import OptimizerError
from samestep.guards.reach import code_of
from samestep.step.gradients import parameters_of
from samestep.step.guards import check_divisors
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import LanePass, StepPlugin
from samestep.torch_internals import leaves_of

LOOKS: Final = 2  # at a loss function, with the modules that it trains


class UnnamedParameters(StepPlugin):
    """Refuses the step of an optimizer with parameters that losses use, but no call names.

    A call may leave some to another one, as the losses of a generator and a critic do. So they are
    refused a step later than they were used.
    """

    def __init__(self, engine: LaneEngine) -> None:
        self._modules = engine.models.modules
        self._looks: dict[Any, int] = {}  # by loss function and modules
        self._named: set[int] = set()  # the ids of parameters that some call names
        # others by id, with their first steps; a lane's inputs may be among them
        self._unnamed: dict[int, tuple[ref[Tensor], int]] = {}
        self._looks_now = False
        self._step = 0
        engine.optimizers.checks.append(self._check)

    def begin(self, lane_pass: LanePass) -> None:
        """Look at the first calls of a loss function."""
        self._step = lane_pass.seed[0]
        key = code_of(lane_pass.loss.fn), tuple(map(id, lane_pass.parameters[:1]))
        looks = self._looks.get(key, 0)
        self._looks_now = looks < LOOKS
        if self._looks_now:
            self._looks[key] = looks + 1
            self._named.update(map(id, lane_pass.parameters))
            for number in self._named & self._unnamed.keys():
                del self._unnamed[number]

    def loss(self, lane_pass: LanePass, lane: int, loss: Tensor) -> None:
        """Note the parameters that a loss uses and no call names."""
        if not self._looks_now:
            return
        self._looks_now = False  # each lane uses the same ones
        covered, named = set(self._named), {*map(id, lane_pass.parameters)}
        for module in self._modules:
            parameters = {*map(id, module.parameters())}
            if not named.isdisjoint(parameters):  # a script may train a part of it
                covered |= parameters
        for leaf in leaves_of([loss]):
            if id(leaf) not in covered:
                self._unnamed.setdefault(id(leaf), (ref(leaf), self._step))

    def _check(self, optimizer: Optimizer) -> None:
        if not self._unnamed:
            return
        for parameter in parameters_of(optimizer):
            if id(parameter) not in self._unnamed or parameter.grad is not None:
                continue
            leaf, step = self._unnamed[id(parameter)]
            if leaf() is parameter and step < self._step:
                raise OptimizerError(
                    f"{type(optimizer).__name__}.step() would not train a parameter of shape"
                    f" {list(parameter.shape)} that the loss uses, because it belongs to no module"
                    " that run.backward or batch.lanes names. Make it a parameter of a module, such"
                    " as one of the loss, call run.replicate with that, track it, and name it as"
                    " well: batch.lanes(model, criterion), or run.backward(...,"
                    " update=torch.nn.ModuleList([model, criterion]))"
                )


class DivisorCheck(StepPlugin):
    """Compares what means in the losses of all lanes are divided by with the lanes' samples."""

    def __init__(self) -> None:
        self._pass: LanePass | None = None

    def begin(self, lane_pass: LanePass) -> None:
        """Note the pass, which notes the divisors."""
        self._pass = lane_pass

    def report(self) -> Callable[[], list[Any]]:
        """Return what returns (lane, samples, kinds, divisors) of this worker's lanes."""
        lane_pass, self._pass = self._pass, None
        return lambda: [] if lane_pass is None else lane_pass.divisors()

    def compare(self, reports: Sequence[Any]) -> None:
        """Raise `LossError` if means, weighted by samples, would not give the mean of all."""
        check_divisors([*chain.from_iterable(reports)])
