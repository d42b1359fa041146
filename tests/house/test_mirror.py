"""Each module has a test file of its name, or a line here that says which file tests it."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "samestep"
# modules whose behavior shows only in what uses them
ELSEWHERE = {
    "step/across_hosts.py": "step/test_exchange.py",
    "step/flat_buffer.py": "step/test_shard.py",
    "data/lane_body.py": "run/test_lane_body.py",
    "data/lane_flow.py": "run/test_lane_body.py",
    "guards/metric_guard.py": "step/test_guards.py",
    "data/lane_loop.py": "run/test_lane_loop.py",
    "data/mixture_plan.py": "data/test_mixture.py",
    "data/orders.py": "data/test_plan.py",
    "data/search.py": "data/test_generators.py",
    "cluster/network.py": "cluster/test_interfaces.py",
    "cluster/process.py": "cluster/test_cluster.py",
    "comm/base.py": "comm/test_world.py",
    "comm/distributed.py": "comm/test_world.py",
    "comm/token_store.py": "comm/test_store.py",
    "errors.py": "house/test_public.py",
    "handoff.py": "launch/test_restarts.py",
    "integrations/common.py": "integrations/test_huggingface.py",
    "launch/attempt.py": "launch/test_membership.py",
    "launch/coordinator_client.py": "launch/test_supervisor.py",
    "launch/screen.py": "launch/test_output.py",
    "launch/worker_group.py": "launch/test_restarts.py",
    "record/sinks/trackers.py": "record/sinks/test_mlflow.py",
    "run/environment.py": "run/test_resume.py",
    "run/loop_states.py": "run/test_resume.py",
    "run/loops.py": "run/test_resume.py",
    "run/mixins.py": "run/test_log.py",
    "plugins/observer.py": "tools/test_verify.py",
    "run/process.py": "run/test_system.py",
    "run/progress.py": "run/test_resume.py",
    "plugins/replay.py": "tools/test_replay.py",
    "plugins/values.py": "tools/test_values.py",
    "run/run.py": "run/test_same_bits.py",
    "plugin.py": "run/test_resume.py",
    "run/session.py": "run/test_resume.py",
    "run/start.py": "run/test_resume.py",
    "run/training.py": "run/test_gradient.py",
    "snapshot/manifest.py": "snapshot/test_part.py",
    "snapshot/memory_slot.py": "snapshot/test_in_memory.py",
    "sharded/lane_pass.py": "sharded/test_models.py",
    "sharded/memory.py": "sharded/test_models.py",
    "sharded/model.py": "sharded/test_models.py",
    "sharded/model_state.py": "sharded/test_models.py",
    "sharded/optimizer.py": "sharded/test_models.py",
    "sharded/parameter.py": "sharded/test_models.py",
    "sharded/trace.py": "sharded/test_models.py",
    "sharded/unit.py": "sharded/test_models.py",
    "step/buffer_rules.py": "step/test_buffers.py",
    "step/buffer_sums.py": "step/test_buffers.py",
    "step/buffer_writes.py": "step/test_buffers.py",
    "step/hidden.py": "guards/test_lane_state.py",
    "plugins/data_agreement.py": "data/test_agreement.py",
    "plugins/graph_choice.py": "gpu/test_lane_graph.py",
    "plugins/graphed_pass.py": "gpu/test_lane_graph.py",
    "plugins/lane_graph.py": "gpu/test_lane_graph.py",
    "step/lane_pass.py": "step/test_lane_engine.py",
    "step/lane_results.py": "step/test_lane_engine.py",
    "step/optimizer_state.py": "run/test_sharded_scripts.py",
    "step/overlap.py": "step/test_lane_engine.py",
    "tools/plans.py": "tools/test_which.py",
    "tools/adopt/batches.py": "tools/test_adopt.py",
    "tools/adopt/entries.py": "tools/test_adopt.py",
    "tools/adopt/places.py": "tools/test_adopt.py",
    "tools/adopt/ranks.py": "tools/test_adopt.py",
    "tools/adopt/roles.py": "tools/test_adopt.py",
    "tools/adopt/rules.py": "tools/test_adopt.py",
    "tools/adopt/scan.py": "tools/test_adopt.py",
    "tools/adopt/source.py": "tools/test_adopt.py",
    "tools/adopt/syntax.py": "tools/test_adopt.py",
    "tools/scale/report.py": "tools/scale/test_study.py",
    "tools/submit.py": "tools/test_slurm.py",
    "tools/trace.py": "tools/test_verify.py",
    "torchmetrics.py": "test_metrics.py",
}
MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for path in PACKAGE.rglob("*.py")
    if not path.name.startswith("__")
)


def test_every_module_has_a_test_file():
    paths = map(Path, MODULES)
    mirrors = {str(path): str(path.with_name(f"test_{path.name}")) for path in paths}
    assert mirrors
    assert [file for file in (mirrors | ELSEWHERE).values() if not (TESTS / file).is_file()] == []


def test_no_line_is_about_a_module_that_is_gone():
    assert ELSEWHERE.keys() <= set(MODULES)
