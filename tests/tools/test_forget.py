"""A run that forgets samples has the bits of one from scratch without them."""

from __future__ import annotations

import json
import re
from contextlib import closing

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


@pytest.mark.parametrize(
    ("order", "workers", "epochs"),
    [
        ("shuffled", 2, 1),
        pytest.param("shuffled", 2, 2, marks=LONG),
        *(pytest.param("shuffled", workers, 1, marks=LONG) for workers in (1, 4)),
        *(pytest.param("weighted", workers, 1, marks=LONG) for workers in (1, 2, 4)),
        *(pytest.param("length", workers, 1, marks=LONG) for workers in (1, 2, 4)),
    ],
)
def test_a_run_that_forgets_has_the_bits_of_one_without(order, workers, epochs, tmp_path, call):  # noqa: F811
    trunk, forgets, scratch = (tmp_path / name for name in ("trunk", "new", "scratch"))
    arguments = order, "1.0", str(epochs)
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
