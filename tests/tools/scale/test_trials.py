"""What a run's snapshot tells of its job."""

from __future__ import annotations

import pytest
import torch

import samestep as ss
from samestep.errors import RecordError
from samestep.snapshot.read import inspect, list_snapshots
from samestep.tools.scale.trials import job_of, last_manifest, parameters_of, started_events
from tests import jobs
from tests.workers import run_workers

STARTED = {"event": "started", "lanes": 4, "devices": ["cpu"], "config": {"threads": 1}}


def _left_by(make_optimizer, directory, workers, *, shard):
    """Return the manifest of a job of one step."""

    def body():
        with ss.init(dir=directory, lanes=4) as run:
            model = run.replicate(
                torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Linear(100, 10))
            )
            optimizer = make_optimizer(model.parameters())
            run.track(model=model, optimizer=run.shard(optimizer) if shard else optimizer)
            for batch in run.batches(jobs.images(24), 12, steps=1):
                run.backward(
                    lambda model, batch: model(batch[0].flatten(1)).square().mean(), model, batch
                )
                optimizer.step()

    run_workers(body, workers)
    return inspect(list_snapshots(directory)[-1])


PARAMETER_BYTES = 4 * (64 * 100 + 100 + 100 * 10 + 10)


@pytest.mark.parametrize("shard", [False, True])
def test_parameters_are_what_the_optimizer_keeps_something_of_and_sharding_shows_in_how_it_is_cut(
    shard, tmp_path
):
    manifest = _left_by(torch.optim.AdamW, tmp_path, 2, shard=shard)
    assert parameters_of(manifest) == (PARAMETER_BYTES, shard)
    two, one = (
        {**STARTED, "workers": [{"rank": rank} for rank in range(workers)]} for workers in (2, 1)
    )
    assert job_of([two], manifest).sharded is shard
    assert job_of([one], manifest).sharded is None
    assert job_of([two], manifest).batch_size == 12
    assert job_of([two, {"event": "loop", "batch_size": 48}], manifest).batch_size == 48


def test_parameters_are_those_of_the_model_where_the_optimizer_keeps_nothing(tmp_path):
    manifest = _left_by(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), tmp_path, 1, shard=False
    )
    assert parameters_of(manifest) == (PARAMETER_BYTES, False)


def test_a_script_that_tracks_nothing_is_told_so(tmp_path):
    with pytest.raises(
        RecordError, match=r"left no snapshot: it must track its model and optimizer \(run.track\)"
    ):
        last_manifest(tmp_path)


def test_a_script_that_starts_no_run_is_told_so(tmp_path):
    with pytest.raises(RecordError, match="the script started no run"):
        started_events(tmp_path)
