"""`samestep which` finds what the steps of a run have used, from its record alone."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep.cli import main
from samestep.data.plan import array_digest
from samestep.errors import ConfigError, RecordError
from samestep.record import FileRecord, orders, read_events
from samestep.tools.plans import History, Use, uses
from samestep.tools.which import _index
from tests.workers import run_workers

LANES = 4
SIZE = 37


class Indices:
    """Samples that are their own index, which begins at `first`."""

    def __init__(self, size=SIZE, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        return torch.tensor([float(self.first + row)])


LENGTHS = [1 + 7 * n % 11 for n in range(SIZE)]
SOURCES = {"code": Indices(20), "prose": Indices(9, 20)}


def changing(step):
    return {"code": 1 + step, "prose": 2}


def stages(run):
    """Yield a loop, one with an order of its own for each epoch, and the first one again."""
    yield run.batches(Indices(), 8, epochs=1, name="first")
    for epoch in range(run.epoch, 2):
        order = np.random.default_rng(epoch).permutation(SIZE)[:20]
        yield run.batches(Indices(), 8, order=order, name="own")
    yield run.batches(Indices(), 8, epochs=2, name="first").limit(3)


# a list of loops, or a function of the run that yields them
CASES = {
    "shuffled": lambda run: [run.batches(Indices(), 8, epochs=3)],
    "in order, the last batch dropped": lambda run: [
        run.batches(Indices(), 8, epochs=3, shuffle=False, drop_last=True)
    ],
    "limited": lambda run: [run.batches(Indices(), 8, epochs=4).limit(3)],
    "weighted": lambda run: [
        run.batches(Indices(), 8, epochs=3, order=ss.Weighted([n % 3 for n in range(SIZE)]))
    ],
    "a list": lambda run: [run.batches(Indices(), 8, epochs=3, order=[5, 1, 36, 5] * 7)],
    "a function": lambda run: [
        run.batches(Indices(), 8, epochs=3, order=lambda epoch: np.arange(20) + epoch)
    ],
    "grouped": lambda run: [
        run.batches(Indices(), 8, epochs=3, group_by=[n * n % 5 for n in range(SIZE)])
    ],
    "by length": lambda run: [
        run.batches(Indices(), epochs=3, order=ss.ByLength(LENGTHS, max_tokens=22))
    ],
    "shards": lambda run: [
        run.batches(Indices(), 6, epochs=3, order=ss.ShardOrder([9, 4, 0, 11, 8, 5], window=2))
    ],
    "a mixture": lambda run: [
        run.batches(SOURCES, 7, weights={"code": 3, "prose": 1}, epochs=3).limit(4)
    ],
    "a mixture that changes": lambda run: [
        run.batches(SOURCES, lambda step: 4 + step, weights=changing, epochs=2).limit(5)
    ],
    "growing batches": lambda run: [
        run.batches(Indices(), lambda step: 4 + step // 2, epochs=2).limit(5)
    ],
    "several loops": stages,
}
SHORT = ("shuffled", "shards", "a mixture that changes", "several loops")


def train(directory, loops_of, **options):
    """Train; return [step, loop, epoch, lane, sample] of all that this worker's steps use."""
    used = []
    with suppress(SystemExit), ss.init(lanes=LANES, dir=directory, **options) as run:  # stop_after
        model = run.replicate(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        run.track(model=model, optimizer=optimizer)
        for loop in loops_of(run):
            for batch in loop:
                lanes = {lane: rows.flatten().tolist() for lane, rows in batch.lane_batches()}
                used += [
                    (run.step, loop._name, run.epoch, lane, int(row))
                    for lane, rows in lanes.items()
                    for row in rows
                ]
                run.backward(lambda model, rows: model(rows).mean(), model, batch)
                optimizer.step()
                optimizer.zero_grad()
    return used


def both(case, directory, workers):
    """Return what a run uses that is resumed in the middle, the second time by one worker."""
    loops_of = CASES[case]
    flags = {"stop_after": 4, "system_every": None}
    if workers == 1:
        first = train(directory, loops_of, **flags)
    else:  # a worker that stops returns nothing

        def body():
            text = json.dumps(train(directory, loops_of, **flags))
            (directory.parent / f"used-{os.environ['RANK']}").write_text(text)

        run_workers(body, workers)
        first = [
            tuple(use)
            for path in directory.parent.glob("used-*")
            for use in json.loads(path.read_text())
        ]
    return sorted([*first, *train(directory, loops_of, system_every=None)])


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        *((case, 1) for case in CASES),
        *(pytest.param(case, 3, marks=[] if case in SHORT else pytest.mark.long) for case in CASES),
    ],
)
def test_all_uses_of_all_samples_are_found(case, workers, tmp_path, capsys):
    directory = tmp_path / "run"
    expected = both(case, directory, workers)
    history = History(directory)
    size = 29 if "mixture" in case else SIZE
    found = list(uses(history, range(size)))
    assert sorted(map(tuple, found)) == expected
    assert [use.step for use in found] == sorted(use.step for use in found)
    last = expected[-1]
    assert next(uses(history, [last[-1]])) == min(u for u in expected if u[-1] == last[-1])
    capsys.readouterr()
    for step in (3, last[0]):
        assert main(["which", str(directory), "--step", str(step)]) == 0
        lanes = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[1:]]
        rows = [[int(word) for word in lane.split() if word.isdigit()] for lane in lanes]
        if "mixture" not in case:  # whose rows are named by their source
            used = [sorted(u[-1] for u in expected if u[0] == step and u[3] == n) for n in range(4)]
            assert [sorted(row) for row in rows] == used


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The directory of a run that fails in step 5 and goes on from step 3 with other batches."""
    directory = tmp_path_factory.mktemp("run")
    options = {"snapshot_every": 3, "system_every": None, "skip_batches": "4:5"}

    with pytest.raises(ZeroDivisionError):
        _train_plain(directory, 8, 5, **options)
    _train_plain(directory, 5, 99, **options)
    return directory


def _train_plain(directory, batch_size, fails_at, **options):
    with ss.init(lanes=2, dir=directory, **options) as run:
        model = run.replicate(nn.Linear(1, 1))
        run.track(model=model)
        for batch in run.batches(Indices(), batch_size, epochs=2).limit(3):
            run.backward(lambda model, rows: model(rows).mean(), model, batch)
            assert run.step != fails_at or 1 / 0


def test_steps_that_were_repeated_count_as_the_last_start_made_them(changed, capsys):
    history = History(changed)
    assert [(each.first, each.stop, each.start) for each in history.stretches] == [
        (0, 3, 0),
        (3, 6, 1),
    ]
    assert [len(list(chain(*lanes))) for lanes in _steps(history)] == [8, 8, 8, 5, 5, 5]
    sample = history.at(4).plan().indices(1, 1, 1)[0]
    assert main(["which", str(changed), "--sample", str(sample)]) == 0
    printed = capsys.readouterr().out
    assert "start 2 (resumed at step 3), 1 worker, skipped: no gradient was used" in printed


def _steps(history):
    for each in history.stretches:
        plan = each.plan()
        for step in each.steps:
            yield [plan.indices(each.epoch, step, lane).tolist() for lane in range(plan.lanes)]


def test_a_limited_epoch_is_recorded_with_the_samples_of_its_steps(changed):
    loops = [event for event in read_events(changed) if event["event"] == "loop"]
    assert [(loop["samples"], loop["batch_size"]) for loop in loops] == [(24, 8), (15, 5)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sample", "x"], "expected indices such as 96 or 96,97, .* got 'x'"),
        (["--sample=-1"], "expected indices"),
        (["--sample", "1.5"], "expected indices"),
        (["--sample", ""], "expected indices"),
        (["--sample", "³"], "expected indices"),
        (["--sample", "9" * 5000], "expected indices"),
        (["--sample", "37"], "a sample must be from 0 to 36, as in the data, got 37"),
        (["--sample", "1,99999999999999999999"], "a sample must be from 0 to 36"),
        (["--sample", "code:3"], "the run has no source with a row 'code:3'"),
        (["--sample", "3", "--loop", "test"], "no step of loop 'test'; its loops are: train"),
        (["--step", "6"], "--step must be a step from 0 to 5, as in the record, got 6"),
        (["--step", "-1"], "--step must be a step from 0 to 5"),
        (["--step", "3", "--loop", "test"], "step 3 is one of loop 'train', not of 'test'"),
    ],
)
def test_unusable_arguments_are_refused(changed, arguments, message, capsys):
    assert main(["which", str(changed), *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(message, error), error


def test_a_run_without_a_step_is_refused(tmp_path, capsys):
    with ss.init(lanes=2, dir=tmp_path, system_every=None):
        pass
    for arguments in (["--sample", "1"], ["--step", "0"]):
        assert main(["which", str(tmp_path), *arguments]) == 2
        assert f"the run in {tmp_path} has made no step\n" in capsys.readouterr().err


def test_streams_and_earlier_records_are_refused(tmp_path, capsys):
    with ss.init(lanes=2, dir=tmp_path / "stream", system_every=None) as run:
        model = run.replicate(nn.Linear(1, 1))
        for batch in run.streams(lambda lane: iter([torch.ones(2, 1)] * 3), steps=2, name="play"):
            run.backward(lambda model, rows: model(rows).mean(), model, batch)
    with pytest.raises(RecordError, match="loop 'play' reads streams, whose items have no number"):
        list(uses(History(tmp_path / "stream"), [1]))
    loop = {"name": "train", "step": 0, "epoch": 0, "steps_per_epoch": 4}
    write(tmp_path / "old", loop, done=2)
    with pytest.raises(RecordError, match="was recorded by an earlier version"):
        list(uses(History(tmp_path / "old"), [1]))
    with pytest.raises(RecordError, match="cannot read a record"):
        History(tmp_path / "nothing")
    write(tmp_path / "damaged", {**loop, "name": None, "epoch": "x"}, done=2)
    with pytest.raises(RecordError, match=r"the record in .* is damaged"):
        History(tmp_path / "damaged")
    for plan in ({"kind": "shuffled"}, {"kind": "shuffled", "size": "x"}, {"size": 8}, []):
        write(tmp_path / "odd", {**loop, "plan": plan}, done=2)
        for asked in (["--sample", "1"], ["--step", "1"]):
            assert main(["which", str(tmp_path / "odd"), *asked]) > 0
            assert re.search("the record in .* is damaged", capsys.readouterr().err)


def write(directory, loop, done):
    """Write a record of `done` steps of a loop."""
    record = FileRecord(directory)
    record.event("started", step=0, workers=[{}], lanes=2)
    record.event("loop", **loop)
    record.timing(done - 1, [{}])
    record.close()


def test_a_sample_of_a_billion_is_found_at_once(tmp_path):
    size, batch_size = 10**9, 4096
    plan = {"kind": "shuffled", "size": size, "batch_size": batch_size, "lanes": 8, "seed": 3}
    loop = {"name": "train", "step": 0, "epoch": 0, "epoch_step": 0, "done": 0}
    steps = -(-size // batch_size)
    write(
        tmp_path,
        {**loop, "steps_per_epoch": steps, "plan": {**plan, "shuffle": True, "drop_last": False}},
        done=50 * steps,
    )
    history = History(tmp_path)
    found = list(uses(history, [96]))
    assert [use.epoch for use in found] == list(range(50))
    for use in found[::7]:
        stretch = history.at(use.step)
        at = use.step - stretch.first
        assert 96 in stretch.plan().indices(use.epoch, at, use.lane)


def test_samples_that_a_loop_leaves_out_are_not_used(tmp_path, capsys):
    plan = {"kind": "shuffled", "size": 8, "batch_size": 4, "lanes": 2, "seed": 3, "shuffle": False}
    excluded = np.array([1, 5])
    digest = array_digest(excluded)
    assert orders.write_order(tmp_path, excluded, digest)
    loop = {"name": "train", "step": 0, "epoch": 0, "epoch_step": 0, "done": 0}
    write(tmp_path, {**loop, "steps_per_epoch": 2, "plan": {**plan, "exclude": digest}}, done=2)
    assert list(uses(History(tmp_path), [5])) == []
    assert list(uses(History(tmp_path), [5, 6])) == [Use(1, "train", 0, 1, 6)]
    assert main(["which", str(tmp_path), "--step", "1"]) == 0
    assert "lane 0: 4\nlane 1: 6 7\n" in capsys.readouterr().out


def test_an_order_that_is_damaged_or_not_kept_is_named(tmp_path, monkeypatch):
    train(tmp_path / "run", CASES["a list"], stop_after=2, system_every=None)
    (path,) = (tmp_path / "run/record").glob("order-*.bin")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\0")
    with pytest.raises(RecordError, match="is damaged: its content does not have the digest"):
        list(uses(History(tmp_path / "run"), [5]))
    for damaged in (
        content[:-3],
        content[:8],
        b"",
        b"<f9     " + content[8:],
        b"|O      " + content[8:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(RecordError, match="is damaged: "):
            list(uses(History(tmp_path / "run"), [5]))
    path.unlink()
    with pytest.raises(RecordError, match="cannot read the order of samples in"):
        list(uses(History(tmp_path / "run"), [5]))
    monkeypatch.setattr(orders, "ORDER_BYTES", 10)
    train(tmp_path / "large", CASES["a list"], stop_after=2, system_every=None)
    with pytest.raises(RecordError, match="the order of epoch 0 of loop 'train' is not in the rec"):
        list(uses(History(tmp_path / "large"), [5]))


def test_a_mixture_names_rows_by_source(tmp_path, capsys):
    train(tmp_path, CASES["a mixture"], stop_after=6, system_every=None)
    history = History(tmp_path)
    (first, *_) = uses(history, [23])
    assert main(["which", str(tmp_path), "--sample", "prose:3"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].split()[:4] == ["step", "epoch", "lane", "sample"]
    assert printed.splitlines()[2].split()[:4] == [str(first.step), "0", str(first.lane), "prose:3"]
    assert isinstance(first, Use)
    assert main(["which", str(tmp_path), "--step", str(first.step)]) == 0
    assert "prose:3" in capsys.readouterr().out.splitlines()[1 + first.lane]
    with pytest.raises(ConfigError, match="no source with a row 'prose:9'"):
        _index("prose:9", history.stretches)
