"""The passes of lanes that may be CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from samestep.data.lane_loop import LaneSteps
from samestep.plugins.graph_choice import Action, LaneGraphs
from samestep.plugins.lane_graph import Cuts, LaneGraph, LaneValues, LaneWork, in_order
from samestep.step.gradients import Gradients, take_gradients
from samestep.step.guards import refuse_accumulated
from samestep.step.lane_pass import LanePass, LossFn, LossSpec
from samestep.step.lane_results import split_loss
from samestep.step.replicas import Replica


def graphed(
    graphs: LaneGraphs, kind: type[LanePass], loss: LossSpec, step: int
) -> Callable[..., LanePass]:
    """Begin a call of `run.backward`; return what creates its pass instead of a `kind` of pass."""
    graphs.begin(loss.fn, loss.model, step, embeds=loss.embed is not None)
    return partial(GraphedPass, graphs=graphs) if kind is LanePass else kind


@dataclass
class GraphedPass(LanePass):
    """The passes of one worker's lanes, of which graphs compute those that they can."""

    graphs: LaneGraphs = field(kw_only=True)

    def report(self, own_gradients: Sequence[Gradients]) -> dict[str, Any]:
        self.graphs.end(self.scalars.copy)
        report = super().report(own_gradients)  # waits for the comparisons, too
        self.graphs.judge()
        return report

    def _compute(
        self, lane: int, replica: Replica, batch: Any, count: float
    ) -> LaneSteps[tuple[dict[str, Tensor], Gradients]]:
        work = self._work(lane, replica, batch, self._factor(count))
        action, graph = self.graphs.advance(work)
        if graph is None:
            return (yield from super()._compute(lane, replica, batch, count))
        if action is Action.REPLAY:
            values = graph.forward(work)
            return values.scalars, self._replayed(lane, replica, count, graph, values)
        expected = graph.results(work)
        self.delay_exchange(lane)
        scalars, gradients = yield from super()._compute(lane, replica, batch, count)
        self.graphs.compare(work, expected, work.named(scalars, gradients))
        return scalars, gradients

    def _work(self, lane: int, replica: Replica, batch: Any, factor: float | None) -> LaneWork:
        context, parameters = self.context, replica.of(self.parameters)

        def restart() -> None:
            context.buffers.rewind(replica.number, lane)
            take_gradients(parameters)  # a capture that failed may have left some, without values
            self._seed(lane)

        return LaneWork(
            lane,
            replica.device,
            batch,
            factor,
            parameters,
            context.buffers.named,
            lambda n: context.manual.name_of(self.parameters[n]),
            partial(self._captured, lane, replica),
            self.overlap.groups,
            restart,
            context.round_to,
        )

    def _captured(
        self, lane: int, replica: Replica, batch: Any, factor: Tensor | None, cuts: Cuts
    ) -> LaneValues:
        """Compute forward and backward for graphs, which keep gradients out of `.grad`."""
        context, parameters = self.context, replica.of(self.parameters)
        with context.user_code():
            fn = cast(LossFn, self.loss.fn)
            loss, metrics = split_loss(fn(self.loss.model, batch), lane)
        scalars = self.scalars.named(loss, metrics)
        changes = context.buffers.changed_by_forward(replica.number) if context.lanes > 1 else []
        # rounded to the loss's dtype as `torch.full_like` does
        weight = None if factor is None else factor.to(loss.dtype).expand(loss.shape)
        cuts.cut()  # the host waits for the forward pass alone
        with context.manual.backward(parameters, lane), cuts.backward(parameters):
            gradients = torch.autograd.grad([loss], parameters, [weight], allow_unused=True)
        refuse_accumulated(parameters)
        return LaneValues(scalars, changes, list(gradients))

    def _replayed(
        self, lane: int, replica: Replica, count: float, graph: LaneGraph, values: LaneValues
    ) -> Gradients:
        """Note the results of a lane's forward pass, and compute its gradients, with graphs."""
        context, parameters = self.context, replica.of(self.parameters)
        self.scalars.note(lane, count, values.scalars)
        if context.lanes > 1:
            changes = values.changes
            context.buffers.note_changes(lane, replica.number, changes, self.scalars.copy)
        if not self.overlap.groups or lane != context.own[-1]:
            return in_order(graph.backward(parameters, context.round_to), parameters)
        with self.overlap.active(self._sums) as self._in_exchange:
            for complete in graph.backward(parameters, None):  # the exchange rounds them
                for n, gradient in complete.items():
                    parameters[n].grad = gradient
                self.overlap.take_complete()
        return take_gradients(parameters, context.round_to)
