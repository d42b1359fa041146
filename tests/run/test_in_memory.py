"""Workers that were killed, and successors that resume from the in-memory snapshot, with the bits of a run that nobody disturbed."""

from __future__ import annotations

import os
import signal
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random

import pytest

import samestep as ss
from samestep.handoff import open_launcher_state
from samestep.launch import launch
from samestep.snapshot import in_memory
from tests.faults import kill_at
from tests.jobs import (
    STEPS,
    events,
    fingerprint,
    image_job,
    left_by,
    left_in,
    snapshots,
    steps_of,
    train,
)
from tests.run.kinds import streams_job
from tests.seccomp import refuse
from tests.workers import run_workers, try_workers

AGAIN = {"SAMESTEP_INTERNAL_ATTEMPT": "1"}


def kill(kept, workers, job, directory, step, rank=0, **options):
    """Run a job until one of its workers is killed in `step`; only in-memory snapshots are made, after every step."""
    options = {"snapshot_every": None, "hot_every": 1, **options}
    outcomes = try_workers(
        train,
        workers,
        partial(job, hook=kill_at(step, rank)),
        directory,
        options,
        environment=kept.environment,
    )
    assert outcomes[rank].exitcode == -signal.SIGKILL


def take_up(kept, workers, job, directory, **options):
    """Run the job to its end in a second attempt; return where it continued from."""
    options = {"snapshot_every": None, "hot_every": 1, **options}
    run_workers(train, workers, job, directory, options, environment={**kept.environment, **AGAIN})
    return [event for event in events(directory) if event["event"] in {"started", "resumed"}][-1][
        "snapshot"
    ]


def test_the_first_copy_is_made_after_the_first_step(tmp_path):
    with open_launcher_state(1) as kept:
        kill(kept, 1, image_job, tmp_path, 1, hot_every="auto")
        assert (kept.directory, kept.step) == (str(tmp_path), 1)
        assert take_up(kept, 1, image_job, tmp_path) == "in-memory-snapshot-of-step-1"
        assert kept.step == STEPS


def test_a_run_is_known_again_by_a_relative_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_launcher_state(1) as kept:
        kill(kept, 1, image_job, Path("run"), 3)
        assert kept.directory == str(tmp_path / "run")
        assert take_up(kept, 1, image_job, Path("run")) == "in-memory-snapshot-of-step-3"


@pytest.mark.parametrize(
    ("job", "before", "after"),
    [(image_job, 2, 2), (image_job, 2, 3), (streams_job, 3, 1), (streams_job, 1, 2)],
)
def test_replacement_workers_resume_from_the_in_memory_snapshot(job, before, after, tmp_path):
    draw = Random(before + 10 * after)
    step, rank = draw.randint(2, STEPS - 1), draw.randrange(before)
    undisturbed = left_by(job, tmp_path / "undisturbed", 1, lanes=8)
    with open_launcher_state(max(before, after)) as kept:
        kill(kept, before, job, tmp_path / "run", step, rank)
        assert snapshots(tmp_path / "run") == []
        assert take_up(kept, after, job, tmp_path / "run") == f"in-memory-snapshot-of-step-{step}"
    assert left_in(job, tmp_path / "run", lanes=8) == undisturbed


def damage(kept, slot):
    """Invert a byte of the tensors in one slot of every worker."""
    for pair in kept.slots:
        byte = os.pread(pair[slot], 1, 5000)[0]
        os.pwrite(pair[slot], bytes([byte ^ 0xFF]), 5000)


def test_a_damaged_copy_is_passed_over_for_the_one_before_and_that_for_a_snapshot(tmp_path):
    undisturbed = left_by(image_job, tmp_path / "undisturbed", 1, lanes=8)
    snapshot = str(tmp_path / "1" / "step-00000003")
    for number, (slots, expected) in enumerate(
        (([0], "in-memory-snapshot-of-step-4"), ([0, 1], snapshot))
    ):
        directory = tmp_path / str(number)
        with open_launcher_state(2) as kept:
            kill(kept, 2, image_job, directory, 5, snapshot_every=3)
            # the copy of step 1 is in slot 0, that of step 2 in slot 1, and so on
            for slot in slots:
                damage(kept, slot)
            assert take_up(kept, 2, image_job, directory) == expected
        reasons = [event["reason"] for event in events(directory, "in_memory_snapshot_rejected")]
        assert [reason.partition(" cannot")[0] for reason in reasons] == [
            f"the in-memory snapshot of step {5 - n}" for n in range(len(slots))
        ]
        assert all("damaged" in reason for reason in reasons)
        assert left_in(image_job, directory, lanes=8) == undisturbed


def test_a_newer_snapshot_wins_over_the_one_in_memory(tmp_path):
    with open_launcher_state(1) as kept:
        kill(kept, 1, image_job, tmp_path, 5, snapshot_every=2, hot_every=100)
        assert take_up(kept, 1, image_job, tmp_path).startswith(str(tmp_path / "step-"))


def test_a_run_that_began_is_not_begun_again(tmp_path):
    run_workers(train, 1, image_job, tmp_path, {"keep_last": 1})
    with open_launcher_state(1) as kept:
        kill(kept, 1, image_job, tmp_path, 5, resume="never", snapshot_every=2)
        assert (
            take_up(kept, 1, image_job, tmp_path, resume="never", hot_every=None)
            == "in-memory-snapshot-of-step-5"
        )
    assert [event["snapshots"] for event in events(tmp_path, "snapshots_set_aside")] == [
        steps_of(STEPS)
    ]
    assert "step-00000002" in snapshots(tmp_path)


def killed_at_its_end(run):
    """Make all steps, but not the snapshot that the run ends with."""
    image_job(run)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_only_in_memory_at_the_end_is_kept_by_the_successors(tmp_path):
    with open_launcher_state(1) as kept:
        try_workers(
            train,
            1,
            killed_at_its_end,
            tmp_path,
            {"snapshot_every": None, "hot_every": 1},
            environment=kept.environment,
        )
        assert snapshots(tmp_path) == []
        assert take_up(kept, 1, image_job, tmp_path) == f"in-memory-snapshot-of-step-{STEPS}"
    assert snapshots(tmp_path) == steps_of(STEPS)


def without_directory(hooks):
    """Make runs without a directory, one after the other, each with a hook; return what the last one left."""
    left = {}
    for hook in hooks:
        with ss.init(lanes=8, hot_every=1) as run:
            left = fingerprint({"model": image_job(run, hook=hook)["model"].state_dict()})
    return left


def counted(runs):
    """Return what such runs left, and the steps that each of them made."""
    steps = [[] for _ in range(runs)]
    return without_directory([made.append for made in steps]), steps


@pytest.mark.parametrize(("runs", "expected"), [(1, [[5, 6, 7]]), (2, [[*range(STEPS)]] * 2)])
def test_copies_need_no_directory_and_are_not_taken_for_those_of_another_run(runs, expected):
    (undisturbed, _), _ = run_workers(counted, 2, 1)
    with open_launcher_state(2) as kept:
        hooks = [*[kill_at(STEPS, 0)] * (runs - 1), kill_at(5, 1)]
        assert (
            try_workers(without_directory, 2, hooks, environment=kept.environment)[1].exitcode
            == -signal.SIGKILL
        )
        assert run_workers(counted, 1, runs, environment={**kept.environment, **AGAIN}) == [
            (undisturbed, expected)
        ]


@pytest.mark.parametrize("hot_every", ["none", "auto"])
def test_without_copies_or_without_anything_kept_nothing_is_held(hot_every, tmp_path):
    with open_launcher_state(1) as kept:
        environment = {**kept.environment, "SAMESTEP_HOT_EVERY": hot_every}
        run_workers(train, 1, image_job, tmp_path, environment=environment)
        assert (os.fstat(kept.slots[0][0]).st_size > 0) == (hot_every == "auto")


def test_without_memory_to_spare_no_copies_are_made_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory, "available_bytes", lambda: 10_000)
    with open_launcher_state(1) as kept:
        run_workers(train, 1, image_job, tmp_path, {"hot_every": 1}, environment=kept.environment)
        assert all(os.fstat(slot).st_size == 0 for pair in kept.slots for slot in pair)
    (failed,) = events(tmp_path, "in_memory_snapshot_failed")
    assert "at most half of the 0.0 GB of memory that this host has left" in failed["reason"]
    assert snapshots(tmp_path)[-1:] == steps_of(STEPS)


@pytest.mark.parametrize("calls", [["memfd_create"], ["memfd_create", "pidfd_open"]], ids=",".join)
def test_where_a_sandbox_refuses_memory_that_outlives_workers_they_go_on_from_a_snapshot(
    calls, tmp_path
):
    undisturbed = left_by(image_job, tmp_path / "undisturbed", 1, lanes=8)

    def disturbed(step):
        if os.environ["SAMESTEP_INTERNAL_ATTEMPT"] == "0":
            kill_at(5, 1)(step)

    def launcher():
        refuse(*calls)
        launch(
            train,
            partial(image_job, hook=disturbed),
            tmp_path / "run",
            {"snapshot_every": 2, "hot_every": 1},
            workers=2,
        )

    process = get_context("fork").Process(target=launcher)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert left_in(image_job, tmp_path / "run", lanes=8) == undisturbed
    assert len(events(tmp_path / "run", "restarting")) == 1
    resumed, *_ = events(tmp_path / "run", "resumed")
    assert Path(resumed["snapshot"]).name in steps_of(2, 4)
    (failed,) = events(tmp_path / "run", "in_memory_snapshot_failed")
    assert "refuses memfd_create" in failed["reason"]
