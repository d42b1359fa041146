"""Runs over several data sets, and over batches that grow, at any number of workers and resumed."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss
from samestep.cli import main
from tests.faults import kill_at
from tests.jobs import events, fit, left_by, train
from tests.run.test_resume import snapshot_now_and_fail
from tests.workers import run_workers, try_workers

STEPS = 12
SCRIPT = str(Path(__file__).with_name("mixture_script.py"))


class Numbers:
    """Samples of a source, with a file name each."""

    def __init__(self, size, shift):
        self.size, self.shift = size, shift
        self.names = [f"{shift}-{row}.txt" for row in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        noise = torch.rand(3)
        return {"x": torch.full((3,), self.shift) + noise, "y": torch.tensor(row / self.size)}


def sources(big=40):
    return {"code": Numbers(big, 0.0), "prose": Numbers(17, 1.0), "math": Numbers(5, 2.0)}


def by_source(model, batch):
    """Return the loss, and that of each source."""
    errors = F.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="none")
    losses = {}
    for number, name in enumerate(("code", "prose", "math")):
        mask = batch["source"] == number
        losses[name] = (errors.detach() * mask).sum(), mask.sum()
    return errors.mean(), losses


def annealed(step):
    """Return weights that change in every step, and leave out a source at first."""
    return {"code": 3 - step / 10, "prose": 1 + step / 10, "math": 0 if step < 5 else 0.5}


def growing(step):
    return 5 + step // 2


def mixture_job(run, *, hook=lambda step: None, loader_workers=0, **options):
    torch.manual_seed(0)
    model = run.replicate(nn.Linear(3, 1))
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), 1e-2))
    usual = {"batch_size": 9, "epochs": None, "steps": STEPS, "weights": annealed, **options}
    return fit(
        run,
        model,
        optimizer,
        sources(),
        loss_fn=by_source,
        loader_workers=loader_workers,
        after_step=lambda _: hook(run.step),
        **usual,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": growing},
        pytest.param(
            {"weights": {"code": 2, "prose": 1, "math": 0.5}, "shuffle": False},
            marks=pytest.mark.long,
        ),
    ],
    ids=["functions", "numbers"],
)
def test_a_killed_run_resumes_on_another_number_of_workers(options, tmp_path):
    job = partial(mixture_job, **options)
    expected = left_by(job, tmp_path / "whole", 1, lanes=4)
    killed = partial(job, hook=kill_at(7, 1), loader_workers=2)
    try_workers(train, 2, killed, tmp_path / "parts", {"lanes": 4})
    assert left_by(job, tmp_path / "parts", 3) == expected
    assert 4 < events(tmp_path / "parts", "resumed")[0]["step"] < STEPS
    values = [event["values"] for event in events(tmp_path / "whole", "scalars")]
    batches = [growing(step) if "batch_size" in options else 9 for step in range(STEPS)]
    rows = [sum(value[f"{name}/rows"] for name in sources()) for value in values]
    assert rows == [sum(batches[: step + 1]) for step in range(STEPS)]
    assert values[-1]["math/epochs"] == values[-1]["math/rows"] / 5
    if "batch_size" in options:
        has_math = ["math" in value for value in values]  # the mean over its samples in the step
        assert not any(has_math[:5])
        assert any(has_math[5:])


def test_a_snapshot_in_the_body_has_the_rows_of_its_step(tmp_path):
    job = partial(mixture_job, batch_size=growing)
    expected = left_by(job, tmp_path / "whole", 1, lanes=4)
    failing = partial(snapshot_now_and_fail, job=job, at=5)
    with pytest.raises(RuntimeError, match="after the updates of a step"):
        train(failing, tmp_path / "parts", {"lanes": 4, "snapshot_every": 100})
    left = left_by(job, tmp_path / "parts", 2, lanes=4)
    assert events(tmp_path / "parts", "resumed")[0]["step"] == 6
    assert left == {name: value for name, value in expected.items() if "at step 5" not in name}


def samples_of(batch):
    """Return the samples of all lanes, as alerts name them."""
    return [text for lane in range(4) for text in batch.origin.describe(lane)]


def indices_of(batch):
    return [index for lane in range(4) for index in batch.origin.indices(lane)]


EQUAL = {"a": 1, "b": 1}


def test_weights_and_batches_may_change_at_a_resume(tmp_path):
    two = {"a": Numbers(40, 0.0), "b": Numbers(24, 1.0)}
    with ss.init(dir=tmp_path, lanes=4) as run:
        run.track(model=nn.Linear(1, 1))
        loop = run.batches(two, 8, weights=EQUAL, steps=3)
        assert (loop.step, loop.sources, loop.steps_per_epoch) == (0, {"a": 0, "b": 0}, 8)
        samples = [text for batch in loop for text in samples_of(batch)]
        assert loop.sources == {"a": 12, "b": 12}
    more = {**two, "c": Numbers(9, 2.0)}
    with ss.init(dir=tmp_path, lanes=4) as run:
        run.track(model=nn.Linear(1, 1))
        loop = run.batches(more, lambda step: 4 * step, weights={**EQUAL, "c": 2}, steps=5)
        assert (loop.step, len(loop), loop.steps_per_epoch) == (3, 2, 8)
        counts = []
        for batch in loop:
            samples += samples_of(batch)
            counts.append((loop.step, loop.sources))
        assert counts == [(4, {"a": 15, "b": 15, "c": 6}), (5, {"a": 19, "b": 19, "c": 14})]
    rows = [text.split("(")[1] for text in samples]
    for name, size in (("a ", 40), ("b ", 24)):
        own = [row for row in rows if row.startswith(name)]
        assert len({*own}) == len(own) == 19 < size  # none twice
    with (
        ss.init(dir=tmp_path, lanes=4) as run,
        pytest.raises(ss.DataError, match="source 'b' had size=24 in the snapshot and has size=23"),
    ):
        run.batches({**more, "b": Numbers(23, 1.0)}, 8, weights={**EQUAL, "c": 2}, steps=9)


def test_a_limit_makes_epochs_and_skips_no_row():
    data = {"a": Numbers(20, 0.0), "b": Numbers(20, 1.0)}
    with ss.init(lanes=4) as run:
        rows = []
        for limit in (3, 2, 20):
            loop = run.batches(data, 4, weights=EQUAL).limit(limit)
            assert (loop.steps_per_epoch, loop.steps) == (limit, len(rows) // 4 + limit)
            rows += [index for batch in loop for index in indices_of(batch)]
        assert run.epoch == 3
    assert len(rows) == 100
    assert [sorted(rows[:40]), sorted(rows[40:80])] == [list(range(40))] * 2


def test_a_batch_that_grows_uses_each_row_once(tmp_path):
    with ss.init(lanes=4, dir=tmp_path) as run:
        loop = run.batches(Numbers(30, 0.0), lambda step: 2 + step, steps=8)
        assert loop.steps_per_epoch == 15
        rows = []
        for batch in loop:
            indices = indices_of(batch)
            assert len(indices) == 1 + loop.step
            assert all("source" not in lane for lane in batch)
            rows += indices
            run.log({"size": len(indices)})
        assert loop.sources == {"train": 44}
    assert sorted(rows[:30]) == list(range(30))
    assert len({*rows[30:]}) == 14
    (planned,) = events(tmp_path, "loop")
    assert (planned["batch_size"], planned["samples"], planned["steps"]) == (None, None, 8)
    last = events(tmp_path, "scalars")[-1]["values"]
    assert last == {"size": 9, "train/rows": 44, "train/epochs": 44 / 30}


def test_loops_with_and_without_a_mixture_may_follow_each_other(tmp_path):
    weights = {"code": 1, "prose": 1, "math": 0}
    with ss.init(lanes=4, dir=tmp_path) as run:
        run.track(model=nn.Linear(1, 1))
        mixed = run.batches(sources(), 8, weights=weights, steps=6)
        names = {text.split("(")[1].split()[0] for batch in mixed for text in samples_of(batch)}
        assert names == {"code", "prose"}
        (planned,) = events(tmp_path, "loop")
        assert (planned["batch_size"], planned["samples"]) == (8, 56)  # rows of seven steps
        with pytest.raises(ss.DataError, match=r"expected batch_size=None.* got batch_s"):
            run.batches(sources()["code"], 8, steps=9)
        assert len([*run.batches(sources(), 8, weights=weights, epochs=2)]) == 8
        run.log({"other": 1})
        for _ in run.batches(sources()["code"], 8, name="plain", epochs=1):
            run.log({"value": 1})
    scalars = [event["values"] for event in events(tmp_path, "scalars")]
    assert scalars[0]["code/rows"] == scalars[0]["prose/rows"] == 56
    assert scalars[-1] == {"value": 1}


def unequal(how):
    rank = {"weights": 0, "batch_size": 0}
    with ss.init(lanes=4) as run:
        rank[how] = run.rank
        loop = run.batches(
            sources(),
            lambda step: 8 + (step == 2) * rank["batch_size"],
            weights=lambda step: {"code": 1 + (step == 2) * rank["weights"], "prose": 1, "math": 1},
            steps=5,
        )
        model = run.replicate(nn.Linear(3, 1))
        for batch in loop:
            run.backward(by_source, model, batch)
            assert run.step < 2, "compared before an update"


@pytest.mark.parametrize("how", ["weights", "batch_size"])
def test_functions_that_differ_between_workers_are_refused_in_their_step(how):
    outcomes = try_workers(unequal, 2, how)
    assert {type(outcome.error) for outcome in outcomes} == {ss.DataError}
    words = "plan of loop 'train' in epoch 0 is .*on worker 0 .* on worker 1"
    assert all(re.search(words, str(outcome.error), re.DOTALL) for outcome in outcomes)


def test_a_function_that_follows_the_training_is_refused():
    losses = []

    def weights(step):
        return {"code": 1 + len(losses), "prose": 1, "math": 1}

    def train(run):
        losses.extend(len(batch.counts) for batch in run.batches(sources(), 8, weights=weights))

    with ss.init(lanes=2) as run, pytest.raises(ss.DataError, match=r"weights\(0\) returned ano"):
        train(run)


def test_weights_of_one_data_set_have_another_option():
    with (
        ss.init(lanes=2) as run,
        pytest.raises(ss.ConfigError, match=r"weights= are .* write order=ss"),
    ):
        run.batches(Numbers(4, 0.0), 2, weights=[1, 2, 3, 4])
    with (
        ss.init(lanes=2) as run,
        pytest.raises(ss.ConfigError, match="evaluate has no option weights: write order=ss"),
    ):
        run.evaluate(by_source, None, Numbers(4, 0.0), 2, weights=[1, 2, 3, 4])


def test_loader_processes_load_the_same():
    def body(loader_workers):
        with ss.init(lanes=4) as run:
            loop = run.batches(
                sources(), growing, weights=annealed, steps=9, loader_workers=loader_workers
            )
            return [(lane["x"].tolist(), lane["source"].tolist()) for b in loop for lane in b]

    (expected,) = run_workers(body, 1, 0)
    assert run_workers(body, 1, 2) == [expected]


@pytest.mark.long
def test_verify_and_replay_know_mixtures(tmp_path, capfd):
    arguments = ["-n", "1,2", "--lanes", "4", "--steps", "4", "--kill", SCRIPT]
    assert main(["verify", *arguments]) == 0
    directory = str(tmp_path / "run")
    flags = ["--dir", directory, "--lanes", "4", "--snapshot-every", "4"]
    assert main(["run", "-n", "2", *flags, SCRIPT]) == 0
    capfd.readouterr()
    assert main(["replay", directory, "--step", "6", SCRIPT]) == 0
    printed = "".join(capfd.readouterr())
    assert re.search(r"sample \d+, (code|prose|math) \d+ \d\.0-\d+\.txt", printed), printed
    assert "means: the same bits" in printed
    assert len(events(Path(directory), "finished")) == 1
