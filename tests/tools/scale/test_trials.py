"""The workload and the memory that trial runs show."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep as ss
from samestep.snapshot.read import inspect, list_snapshots
from samestep.tools.scale.timing import PARTS, StepTiming
from samestep.tools.scale.trials import (
    Trial,
    Workload,
    fit_memory,
    parameter_bytes,
    read_workload,
)
from tests import jobs
from tests.workers import run_workers

STARTED = {"event": "started", "lanes": 4, "devices": ["cpu"], "config": {"threads": 1}}


def _train(make_optimizer, directory, workers, *, shard):
    """Train for one step and return the manifest of the snapshot."""

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
def test_optimizer_state_shows_the_trained_parameters(shard, tmp_path):
    manifest = _train(torch.optim.AdamW, tmp_path, 2, shard=shard)
    assert parameter_bytes(manifest) == PARAMETER_BYTES
    loop = {"event": "loop", "batch_size": 12}
    assert read_workload([STARTED, loop], manifest) == Workload(4, PARAMETER_BYTES, 12, "cpu", 1)
    stream = {"event": "loop", "batch_size": None}
    assert read_workload([STARTED, stream], manifest).batch_size is None


def test_parameters_are_those_of_the_model_if_the_optimizer_has_no_state(tmp_path):
    manifest = _train(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), tmp_path, 1, shard=False
    )
    assert parameter_bytes(manifest) == PARAMETER_BYTES


def _trial(lanes, peak_bytes, *, batch_size=64, nbytes=1000):
    timing = StepTiming(1.0, dict.fromkeys(PARTS, 0.0), 0.0)
    return Trial(1, timing, peak_bytes, Workload(lanes, nbytes, batch_size, "cpu", 1))


@given(
    st.integers(1, 10**9),
    st.integers(1, 10**8),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 10**6),
)
def test_the_line_through_two_lane_batches_gives_the_largest_that_fits(
    fixed, per_sample, lanes, nbytes
):
    def peak(lanes):
        return fixed + nbytes * int(math.log2(lanes)) + per_sample * 64 // lanes

    memory = fit_memory(
        _trial(lanes, peak(lanes), nbytes=nbytes), _trial(2 * lanes, peak(2 * lanes), nbytes=nbytes)
    )
    if memory is None:
        assert per_sample * 32 // lanes < 0.03 * peak(lanes)
        return
    assert memory.per_sample == pytest.approx(per_sample, rel=1e-6, abs=1)
    available = peak(lanes) * 3
    largest = memory.largest_lane_batch(available)
    assert memory.fixed + largest * memory.per_sample <= available
    assert available < memory.fixed + (largest + 1) * memory.per_sample + 1
    assert memory.largest_lane_batch(0) == 0


@pytest.mark.parametrize(
    ("batch_size", "more_lanes_bytes"),
    [(64, 1_000_500), (None, 500_000), (1, 500_000), (64, 100_000)],
)
def test_no_line_without_growth_or_batch_size_or_below_zero(batch_size, more_lanes_bytes):
    trial = _trial(2, 1_000_000, batch_size=batch_size)
    assert fit_memory(trial, _trial(4, more_lanes_bytes, batch_size=batch_size)) is None
