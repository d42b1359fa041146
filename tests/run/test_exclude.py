"""A run without some samples is the same on any number of workers, and stays so when it resumes."""

from __future__ import annotations

from functools import partial
from itertools import repeat

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.data.orders import make_plan
from samestep.data.random_state import key
from tests.jobs import classify, events, fit, image_job, images, left_by, train
from tests.workers import WorkerFailedError, run_workers

PLAN = make_plan(
    *(101, 32, 8, key(0, "order train")),
    shuffle=True,
    drop_last=False,
    group_by=None,
    order=None,
)


def of_step(step):
    """Return a sample of each of two lanes of a step of the first epoch of `image_job`."""
    return [int(PLAN.indices(0, step, lane)[0]) for lane in (1, 6)]


def test_samples_can_be_left_out_until_they_are_used(tmp_path):
    """Those of step 3 of the first epoch: from step 2 on, as if they had never been there."""
    late, early, scratch = of_step(3), of_step(1), tmp_path / "scratch"
    expected = left_by(partial(image_job, exclude=late), scratch, 1, lanes=8)
    options = {"stop_after": 2}
    with pytest.raises(SystemExit):
        train(image_job, tmp_path / "run", options)
    with pytest.raises(WorkerFailedError, match="step 1 of epoch 0 of loop 'train' used one of 4"):
        run_workers(train, 2, partial(image_job, exclude=late + early), tmp_path / "run")
    (tmp_path / "late.txt").write_text("\n".join(map(str, late)))
    with pytest.raises(SystemExit):
        train(image_job, tmp_path / "run", {"exclude": tmp_path / "late.txt", "stop_after": 3})
    (tmp_path / "late.txt").unlink()  # the directory and its snapshots have the samples
    (tmp_path / "run" / "exclude.json").unlink()
    assert left_by(image_job, tmp_path / "run", 2, lanes=8) == expected
    assert (tmp_path / "run" / "exclude.json").exists()
    excluded = [event.get("excluded") for event in events(tmp_path / "run", "loop")]
    assert excluded == [None, 2, 2, 2]


def norms_job(run, *, in_lanes=False, **options):
    """Train on 24 images in order, in batches of 8, by a sharded optimizer with decay."""
    model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    if not in_lanes:
        return fit(
            run, model, optimizer, images(24), batch_size=8, epochs=1, max_norm=1.0, **options
        )
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(images(24), 8, epochs=1, **options):
        for lane in batch.lanes(model):
            batch.backward(classify(model, lane)[0])
        norm = run.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(batch.means, norm=float(norm))
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("in_lanes", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_step_without_samples_counts_but_makes_no_update(in_lanes, tmp_path):
    job = partial(norms_job, in_lanes=in_lanes, shuffle=False)
    without = partial(job, exclude=range(8, 16))
    one, two = (left_by(without, tmp_path / str(n), n, lanes=4) for n in (1, 2))
    assert one == two
    assert one["norm at step 1"] == "0.0"
    assert "loss at step 1" not in one
    assert one["loss at step 0"] == left_by(job, tmp_path / "all", 1, lanes=4)["loss at step 0"]
    # the same as a data set that does not have them, but for the numbers of steps
    assert (
        one["/optimizer/state/0/step"]
        == left_by(partial(job, order=[*range(8), *range(16, 24)]), tmp_path / "short", 1, lanes=4)[
            "/optimizer/state/0/step"
        ]
    )


def test_rows_of_a_mixture_are_left_out_by_the_name_of_their_source():
    sources = {name: TensorDataset(torch.arange(6) + first) for name, first in (("a", 0), ("b", 6))}
    with ss.init(lanes=2) as run:
        loop = run.batches(
            sources, 4, weights={"a": 1, "b": 1}, epochs=1, exclude={"a": [2], "b": {0, 5}}
        )
        used = [int(value) for batch in loop for (values,) in batch for value in values]
    assert sorted(used) == [0, 1, 3, 4, 5, 7, 8, 9, 10]


def mixture_job(run, seen, **options):
    """Note the samples of the steps of this start."""
    model = run.replicate(nn.Linear(1, 1))
    run.track(model=model)
    sources = {name: TensorDataset(torch.arange(20) + 20 * n) for n, name in enumerate("ab")}
    for batch in run.batches(sources, 4, weights={"a": 1, "b": 1}, steps=6, **options):
        run.backward(lambda model, rows: model(rows[0][:, None].float()).mean(), model, batch)
        seen += [int(value) for (values,) in batch for value in values]


def test_rows_of_a_mixture_can_be_left_out_until_they_are_used(tmp_path):
    def resumed(seen, **options):
        with ss.init(lanes=2, dir=tmp_path) as run:
            mixture_job(run, seen, **options)

    before, whole, rest = [], [], []
    with ss.init(lanes=2) as run:
        mixture_job(run, whole)
    with pytest.raises(SystemExit), ss.init(lanes=2, dir=tmp_path, stop_after=3) as run:
        mixture_job(run, before)
    late = [index for index in whole if index not in before][:2]
    with pytest.raises(ss.DataError, match="of loop 'train' used one of 3 samples"):
        resumed([], exclude=[*late, before[5]])
    resumed(rest, exclude=late)
    assert rest == [index for index in whole[len(before) :] if index not in late]


def test_streams_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("3")
    with (
        ss.init(lanes=2, exclude=tmp_path / "a.txt") as run,
        pytest.raises(ss.ConfigError, match="samples of the stream 'ones', whose items have no"),
    ):
        run.streams(lambda lane: repeat(torch.ones(2)), steps=1, name="ones")


def test_what_leaves_out_nothing_is_said(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("# none\n")
    (tmp_path / "b.json").write_text('{"trian": [1]}')
    with caplog.at_level("INFO", "samestep"):
        with ss.init(lanes=2, exclude=tmp_path / "a.txt") as run:
            run.batches(images(4), 2, exclude=[])
        with ss.init(lanes=2, exclude=tmp_path / "b.json") as run:
            run.batches(images(4), 2, exclude=[1])
    said = " ".join(caplog.messages)
    assert "a.txt is empty: no sample is left out" in said
    assert "exclude of loop 'train' is empty: no sample is left out" in said
    assert "loop 'train' leaves out 1 of 4 samples" in said
    assert "exclude names loops that the script has not: trian" in said
