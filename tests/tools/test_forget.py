"""A run that forgets samples has the bits of one from scratch without them."""

from __future__ import annotations

import json
import re
from contextlib import closing
from functools import cache

import numpy as np
import pytest

from samestep.cli import main
from samestep.record import read_events
from samestep.record.chain import Chain
from samestep.tools.plans import History
from tests.jobs import snapshots
from tests.tools.branches import SIZE
from tests.tools.test_fork import SCRIPT, call, means, start, state  # noqa: F401  a fixture
from tests.tools.test_replay import content

LONG = pytest.mark.long


def used_at(directory, step):
    """Return two samples of a step of a run, which no earlier step has used."""
    (stretch, *_) = History(directory).stretches
    plan = stretch.plan()
    before = [plan.indices(0, n, lane) for n in range(step) for lane in range(plan.lanes)]
    new = np.setdiff1d(np.concatenate([plan.indices(0, step, n) for n in range(4)]), before[0])
    return sorted({*new.tolist()} - {*np.concatenate(before).tolist()})[:2]


@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=LONG)])
def test_a_run_that_forgets_has_the_bits_of_one_without(epochs, tmp_path, call):  # noqa: F811
    trunk, forgets, scratch = (tmp_path / name for name in ("trunk", "new", "scratch"))
    workers, arguments = 2, ("shuffled", "1.0", str(epochs))
    start(trunk, 2, "--snapshot-every", 4, arguments=arguments)
    numbers = used_at(trunk, 6)
    (tmp_path / "samples.txt").write_text("\n".join(map(str, numbers)))
    before = content(trunk)
    words = "--samples", tmp_path / "samples.txt", "--dir", forgets, "--no-start"
    status, printed = call("forget", trunk, *words, "-n", workers, SCRIPT, *arguments)
    assert status == 0, printed
    end = History(trunk).end
    repeated = f"goes back to the snapshot of step 4, and repeats {end - 4} steps of {end}"
    assert f"step 6 used them first: the new run {repeated}" in printed
    assert "It cannot undo" in printed
    start(forgets, workers, "--stop-after", 5, arguments=arguments)
    start(forgets, workers, arguments=arguments)
    start(scratch, 1, "--exclude", tmp_path / "samples.txt", arguments=arguments)
    assert state(forgets) == state(scratch) != state(trunk)
    with closing(Chain.open(forgets)) as rows, closing(Chain.open(scratch)) as of_scratch:
        assert [rows[step] for step in range(end)] == [of_scratch[step] for step in range(end)]
    assert content(trunk) == before
    (forked,) = [event for event in read_events(forgets) if event["event"] == "forked"]
    assert (forked["step"], forked["forgets"]) == (4, len(numbers))
    loops = [event for event in read_events(forgets) if event["event"] == "loop"]
    assert [event.get("excluded") for event in loops] == [None, 2, 2]


SETS = {  # by the plan and its number of steps
    "of the first step": lambda plan, _: plan.indices_of_step(0, 0)[::5],
    "of the last step": lambda plan, steps: plan.indices(0, steps - 1, 0),
    "a whole lane": lambda plan, _: plan.indices(0, 5, 1),
    "one of each later step": lambda plan, steps: [
        plan.indices(0, step, step % 4)[0] for step in range(5, steps - 1)
    ],
    "every twentieth": lambda *_: range(3, SIZE, 20),  # BatchNorm needs two of each lane
}


@pytest.fixture(scope="module")
def trunks(tmp_path_factory):
    """Return a function that returns a run of two workers with an order."""

    @cache
    def trunk(order):
        directory = tmp_path_factory.mktemp("trunks") / order
        start(directory, 2, "--snapshot-every", 4, arguments=(order, "1.0"))
        return directory

    return trunk


@pytest.mark.long
@pytest.mark.parametrize("order", ["shuffled", "weighted", "length"])
@pytest.mark.parametrize("chosen", SETS)
def test_any_samples_are_forgotten_at_any_number_of_workers(order, chosen, trunks, tmp_path, call):  # noqa: F811
    """The script has BatchNorm, dropout, a moving average, a sharded optimizer and a schedule."""
    trunk, arguments = trunks(order), (order, "1.0")
    history = History(trunk)
    plan, steps = history.stretches[0].plan(), history.end
    numbers = sorted({*map(int, SETS[chosen](plan, steps))})
    first = next(n for n in range(steps) if {*numbers} & {*plan.indices_of_step(0, n).tolist()})
    (tmp_path / "samples.txt").write_text("\n".join(map(str, numbers)))
    scratch = tmp_path / "scratch"
    start(scratch, 1, "--exclude", tmp_path / "samples.txt", arguments=arguments)
    assert state(scratch) != state(trunk)
    for workers in (1, 2, 4):
        forgets = tmp_path / str(workers)
        words = "--samples", tmp_path / "samples.txt", "--dir", forgets, "--no-start"
        status, printed = call("forget", trunk, *words, "-n", workers, SCRIPT, *arguments)
        assert status == 0, printed
        assert f"step {first} used them first" in printed
        assert f"and repeats {steps - first // 4 * 4} steps of {steps} " in printed
        start(forgets, workers, arguments=arguments)
        assert state(forgets) == state(scratch)
        with closing(Chain.open(forgets)) as rows, closing(Chain.open(scratch)) as expected:
            assert [rows[n] for n in range(steps)] == [expected[n] for n in range(steps)]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The directory of a run of two steps."""
    directory = tmp_path_factory.mktemp("runs") / "trunk"
    start(directory, 1, "--stop-after", 2)
    return directory


def test_samples_of_the_first_step_are_forgotten_by_a_new_start(short, tmp_path, call):  # noqa: F811
    trunk, forgets = short, tmp_path / "new"
    (tmp_path / "samples.txt").write_text(str(used_first(trunk)))
    words = "forget", trunk, "--samples", tmp_path / "samples.txt", "--dir", forgets
    status, printed = call(*words, "--no-start", SCRIPT, "shuffled", "1.0")
    assert status == 0, printed
    assert "step 0 used them first: the new run begins anew, and repeats 2 steps of 2" in printed
    assert (snapshots(forgets), means(forgets)) == ([], {})
    start(forgets, 1, "--stop-after", 1)
    assert means(forgets).keys() == {"step 0"}
    assert means(forgets) != {name: means(trunk)[name] for name in ["step 0"]}


def used_first(directory):
    (stretch, *_) = History(directory).stretches
    return int(stretch.plan().indices(0, 0, 0)[0])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "", "--samples .*a.txt has no samples"),
        ("a.txt", str(SIZE), f"a sample must be from 0 to {SIZE - 1}, as in the data, got {SIZE}"),
        ("a.txt", "96\n3,4", "--samples: .*a.txt, line 2: expected the index of a sample"),
        ("a.json", '{"tune": [3]}', "no step of loop 'tune'; its loops are: train"),
        ("a.json", "[96", "--samples: .*a.json is no .json file"),
        ("a.json", "[-1]", "--samples: .*a.json must have indices of at least 0, got -1"),
        ("a.npy", "96", "--samples: .*a.npy is no .npy file"),
        ("a.json", json.dumps([*range(SIZE)]), f"has all {SIZE} samples of loop 'train'"),
        ("b.txt", None, "b.txt cannot be read: No such file"),
    ],
)
def test_samples_that_the_run_does_not_have_are_refused(short, tmp_path, capfd, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    command = "forget", short, "--samples", tmp_path / name, "--dir", tmp_path / "new"
    assert main([*map(str, (*command, SCRIPT, "shuffled", "1.0"))]) == 2
    printed = capfd.readouterr().err
    assert re.search(words, printed), printed
    assert not (tmp_path / "new").exists()
