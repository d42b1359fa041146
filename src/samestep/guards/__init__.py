"""Refusals of what lanes must not do, each a plugin of the step."""

from __future__ import annotations

from samestep.guards.blocks import BlockState
from samestep.guards.kept_attributes import KeptAttributes
from samestep.guards.lane_state import LaneState
from samestep.guards.loss_graph import DivisorCheck, UnnamedParameters
from samestep.guards.metric_guard import MetricGuard
from samestep.guards.reach import Reach
from samestep.plugins.recheck import Recheck
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import StepPlugin


def plugins_of(engine: LaneEngine) -> list[StepPlugin]:
    """Return what watches the steps of an engine; a single lane may do almost anything."""
    modules = engine.models.modules
    plugins: list[StepPlugin] = [UnnamedParameters(engine), KeptAttributes(engine)]
    if engine.config.recheck_every:
        plugins.append(Recheck(engine, modules, engine.shards))
    if engine.lanes == 1:  # it has all samples, on the only worker
        return plugins
    reach = Reach(
        modules,
        engine.config.check_every,
        engine.buffers.places,
        engine.world.wait_for_gpu,
    )
    # metrics are compared first, because their error says more than that of their tensors
    return [*plugins, reach, MetricGuard(reach), LaneState(reach), DivisorCheck(), BlockState()]
