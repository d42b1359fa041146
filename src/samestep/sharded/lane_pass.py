"""The lanes of a worker if a model is sharded: turns, in which all workers compute neighbors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from samestep.data.lane_loop import LaneSteps
from samestep.sharded.model import ShardedModel
from samestep.sharded.parts import Part
from samestep.sharded.trace import Call, Kind
from samestep.sharded.unit import Sharding
from samestep.step.finite import size_of_flats
from samestep.step.gradients import Gradients, Parameters
from samestep.step.lane_pass import LanePass
from samestep.step.overlap import Overlap
from samestep.step.replicas import Replica
from samestep.step.scaling import scaled


class StreamedSums(Overlap):
    """The sums of sharded models, whose gradients are added lane by lane, and of other parameters.

    `others` are the numbers of those, in the updated list, and `inner` has their sums.
    """

    def __init__(
        self,
        models: Sequence[ShardedModel],
        others: Sequence[int],
        inner: Overlap | None,
        sharding: Sharding,
    ) -> None:
        super().__init__([])
        self.kind_of_pass = ShardedPass
        self._models, self._others, self._inner = models, others, inner
        self._units = [unit for model in models for unit in model.units]
        self._sharding, self.trace = sharding, sharding.trace
        self._order: list[Call] = []  # of a lane, none yet
        self._totals: list[tuple[Part, Tensor]] = []

    @contextmanager
    def turn(self, first: int, lanes: int) -> Iterator[None]:
        """Compute this worker's lane of a turn in this block, or serve after it.

        The turn begins with lane `first`. A worker without a lane in it, or with one that has no
        samples, does what the others do in the order of a lane before.
        """
        senders = min(self._sharding.world.size, lanes - first)
        self.trace.begin(senders, announces=not self._order)
        for unit in self._units:
            unit.begin_lane()
        try:
            yield
            if not (self.trace.calls or self.trace.is_in_backward):
                self._serve_lane()
                return
            for unit in self._units if self.trace.is_in_backward else ():
                unit.end_lane()  # roots, and those whose inputs need no gradient
            self.trace.end_calls()
            if first == 0 or not self._order:  # later ones may gather nothing
                self._order = self.trace.calls
        finally:
            self.trace.end()
            for unit in self._units:
                unit.close_lane()

    def _serve_lane(self) -> None:
        """Do what other workers do in a lane, without a gradient."""
        if not self._order and self._sharding.world.size > 1:
            self.trace.follow(self._serve)
            self._order = [*self.trace.calls]
            if self._order:
                return
        for kind, number in self._order:
            self._serve(kind, number)
        if not self._order:  # a lane of zeros on all workers has its place in the tree, too
            for unit in self._units:
                unit.add_lane()

    def _serve(self, kind: Kind, number: int) -> None:
        unit = self._sharding.units[number]
        if kind == "sum":
            unit.add_lane()
        else:
            unit.serve_gather()

    def begin_step(self) -> None:
        """Forget what a step that failed has left."""
        self.trace.begin_step()
        self._sharding.free()
        for unit in self._units:
            unit.begin_step()
        for model in self._models:
            model.hold()

    def end_lanes(self) -> None:
        """Free what is gathered, after the last lane."""
        for model in self._models:
            model.release()
        self._sharding.free()

    def used_parameters(self) -> set[int]:
        """Return the ids of parameters with a gradient in a lane of this worker."""
        return set[int]().union(*(unit.used() for unit in self._units))

    def finish(self, own_gradients: Sequence[Gradients]) -> None:
        self.trace.compare()
        self._totals = [pair for unit in self._units for pair in unit.totals()]
        totals = [total for _, total in self._totals if total.numel()]
        self.sizes = [size_of_flats(totals)] if totals else []
        if self._inner is not None:
            self._inner.finish([[of_span[n] for n in self._others] for of_span in own_gradients])
            self.sizes += self._inner.sizes

    def start(self) -> None:
        if self._inner is not None:
            self._inner.start()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def set_gradients(self, parameters: Parameters, missing: Collection[int], scale: float) -> None:
        present = {id(p) for n, p in enumerate(parameters) if n not in missing}
        for model in self._models:
            for part in model.parts:
                if id(part.unsharded) in present:
                    part.use()
        for part, total in self._totals:
            if id(part.unsharded) in present and part.size:
                part.add_gradient(scaled(total, part.unsharded.dtype, scale))
        self._totals = []
        if self._inner is not None:
            of_inner = [place for place, n in enumerate(self._others) if n in missing]
            self._inner.set_gradients([parameters[n] for n in self._others], of_inner, scale)


class ShardedPass(LanePass):
    """The lanes of a worker, in turns with those of the others."""

    overlap: StreamedSums

    def run(self) -> LaneSteps[list[Gradients]]:
        self.overlap.begin_step()
        try:
            own_gradients = yield from super().run()
            world, lanes = self.context.world, self.context.lanes
            left = lanes % world.size
            if left and world.rank >= left:  # others have another lane
                with self.overlap.turn(lanes - left, lanes):
                    pass
        finally:
            self.overlap.end_lanes()
        return own_gradients

    def _run_lane(self, lane: int, replica: Replica) -> LaneSteps[Gradients]:
        workers = self.context.world.size
        with self.overlap.turn(lane // workers * workers, self.context.lanes):
            return (yield from super()._run_lane(lane, replica))

    def _differentiate(self, *args: Any, **options: Any) -> Gradients:
        self.overlap.trace.begin_backward()
        return super()._differentiate(*args, **options)

    def report(self, own_gradients: Sequence[Gradients]) -> dict[str, Any]:
        report, used = super().report(own_gradients), self.overlap.used_parameters()
        missing = [n for n in report["missing"] if id(self.parameters[n]) not in used]
        return {**report, "missing": missing}
