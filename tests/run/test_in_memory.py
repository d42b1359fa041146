"""Replacement workers continue from an in-memory snapshot with the bits of an undisturbed run."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from unittest import mock

import pytest

import samestep as ss
from samestep.handoff import open_launcher_state
from samestep.launch import launch
from samestep.snapshot import in_memory, memory_slot, write
from samestep.snapshot.part import StagingBuffer
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


def kill(state, workers, job, directory, step, rank=0, *, committed=None, **options):
    """Run a job with only in-memory snapshots, one per step, until a worker is killed in `step`.

    It is not killed before the snapshot on disk of the step `committed` is complete.
    """
    options = {"snapshot_every": None, "hot_every": 1, **options}
    after = committed and directory / f"step-{committed:08d}" / "manifest.json"
    outcomes = try_workers(
        train,
        workers,
        partial(job, hook=kill_at(step, rank, after)),
        directory,
        options,
        environment=state.environment,
    )
    assert outcomes[rank].exitcode == -signal.SIGKILL


def resume(state, workers, job, directory, **options):
    """Run the job to its end in a second attempt; return the snapshot that it resumed from."""
    options = {"snapshot_every": None, "hot_every": 1, **options}
    run_workers(train, workers, job, directory, options, environment={**state.environment, **AGAIN})
    return [event for event in events(directory) if event["event"] in {"started", "resumed"}][-1][
        "snapshot"
    ]


@pytest.mark.long
def test_first_copy_is_made_after_the_first_step(tmp_path):
    with open_launcher_state(1) as state:
        kill(state, 1, image_job, tmp_path, 1, hot_every="auto")
        assert (state.directory, state.step) == (str(tmp_path), 1)
        assert resume(state, 1, image_job, tmp_path) == "in-memory-snapshot-of-step-1"
        assert state.step == STEPS


def saved_steps(directory, slow_rank):
    """Train, with time for a save after each step on all workers but one; return when it saved."""
    steps, save = [], in_memory.InMemorySnapshots.save

    def noted(self, saving, *args, **options):
        steps.append(saving.step)
        save(self, saving, *args, **options)

    def time_is_up(self):
        return self._world.rank != slow_rank

    with (
        mock.patch.object(in_memory.InMemorySnapshots, "save", noted),
        mock.patch.object(in_memory.InMemorySnapshots, "time_is_up", time_is_up),
    ):
        train(image_job, directory, {"snapshot_every": None, "hot_every": "auto"})
    return steps


@pytest.mark.parametrize(
    "slow_rank",
    [0, pytest.param(1, marks=pytest.mark.long), pytest.param(None, marks=pytest.mark.long)],
)
def test_a_save_waits_until_the_slowest_worker_has_time_for_it(slow_rank, tmp_path):
    expected = [1] if slow_rank is not None else list(range(1, STEPS + 1))
    with open_launcher_state(2) as state:
        saved = run_workers(saved_steps, 2, tmp_path, slow_rank, environment=state.environment)
    assert saved == [expected] * 2


@pytest.mark.long
def test_run_is_recognized_by_a_relative_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_launcher_state(1) as state:
        kill(state, 1, image_job, Path("run"), 3)
        assert state.directory == str(tmp_path / "run")
        assert resume(state, 1, image_job, Path("run")) == "in-memory-snapshot-of-step-3"


@pytest.mark.parametrize(
    ("job", "before", "after"),
    [
        pytest.param(image_job, 2, 2, marks=pytest.mark.long),
        (image_job, 2, 3),
        pytest.param(streams_job, 3, 1, marks=pytest.mark.long),
        pytest.param(streams_job, 1, 2, marks=pytest.mark.long),
    ],
)
def test_replacement_workers_resume_from_the_in_memory_snapshot(job, before, after, tmp_path):
    draw = Random(before + 10 * after)
    step, rank = draw.randint(2, STEPS - 1), draw.randrange(before)
    undisturbed = left_by(job, tmp_path / "undisturbed", 1, lanes=8)
    with open_launcher_state(max(before, after)) as state:
        kill(state, before, job, tmp_path / "run", step, rank)
        assert snapshots(tmp_path / "run") == []
        assert resume(state, after, job, tmp_path / "run") == f"in-memory-snapshot-of-step-{step}"
    assert left_in(job, tmp_path / "run", lanes=8) == undisturbed


def damage(state, count):
    """Invert one byte of the tensors in the `count` newest copies; return the steps of all."""
    copies = [
        [(memory_slot.read(slot).label["key"][0], slot) for slot in each] for each in state.slots
    ]
    for pair in copies:
        for _, slot in sorted(pair, reverse=True)[:count]:
            byte = os.pread(slot, 1, 5000)[0]
            os.pwrite(slot, bytes([byte ^ 0xFF]), 5000)
    return sorted({step for pair in copies for step, _ in pair}, reverse=True)


def test_damaged_copies_are_skipped_for_older_ones_and_then_for_a_snapshot_on_disk(
    undisturbed, tmp_path
):
    for count in (1, 2):
        directory = tmp_path / str(count)
        with open_launcher_state(2) as state:
            kill(state, 2, image_job, directory, 5, committed=3, snapshot_every=3)
            steps = damage(state, count)
            # the copy of step 4 is overwritten while that of step 3 is written to disk
            assert steps in ([5, 4], [5, 3])
            older = f"in-memory-snapshot-of-step-{steps[1]}"
            expected = older if count == 1 else str(directory / "step-00000003")
            assert resume(state, 2, image_job, directory) == expected
        reasons = [event["reason"] for event in events(directory, "in_memory_snapshot_rejected")]
        assert [reason.partition(" cannot")[0] for reason in reasons] == [
            f"the in-memory snapshot of step {step}" for step in steps[:count]
        ]
        assert all("damaged" in reason for reason in reasons)
        assert left_in(image_job, directory, lanes=8) == undisturbed


def train_while_the_disk_is_slow(directory):
    """Write the files of the first snapshot on disk once two later ones are in memory."""
    released, write_part = threading.Event(), write.write_part

    def write_late(*args):
        assert released.wait(300)
        return write_part(*args)

    def hook(step):
        if step == 5:
            released.set()

    with mock.patch.object(write, "write_part", write_late):
        train(partial(image_job, hook=hook), directory, {"snapshot_every": 3, "hot_every": 1})


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_memory_that_is_being_written_to_disk_is_not_overwritten(tmp_path, workers):
    with open_launcher_state(workers) as state:
        run_workers(
            train_while_the_disk_is_slow, workers, tmp_path / "slow", environment=state.environment
        )
    run_workers(train, 1, image_job, tmp_path / "undisturbed", {"snapshot_every": 3})
    actual, expected = (
        fingerprint(ss.read_snapshot(tmp_path / name, step=3).state["model"])
        for name in ("slow", "undisturbed")
    )
    assert actual == expected


@pytest.mark.long
def test_snapshots_on_disk_are_also_in_memory(tmp_path):
    with open_launcher_state(1) as state:
        kill(state, 1, image_job, tmp_path, 5, committed=2, snapshot_every=2, hot_every=100)
        assert resume(state, 1, image_job, tmp_path) == "in-memory-snapshot-of-step-4"


def test_snapshot_on_disk_is_used_if_none_is_in_memory(tmp_path):
    with open_launcher_state(1) as state:
        options = {"snapshot_every": 2, "hot_every": 1}
        kill(state, 1, image_job, tmp_path, 5, committed=4, **options)
        for slot in state.slots[0]:
            os.ftruncate(slot, 0)
        assert resume(state, 1, image_job, tmp_path) == str(tmp_path / "step-00000004")


@pytest.mark.long
def test_run_that_has_begun_ignores_resume_never(tmp_path):
    run_workers(train, 1, image_job, tmp_path, {"keep_last": 1})
    with open_launcher_state(1) as state:
        kill(state, 1, image_job, tmp_path, 5, committed=2, resume="never", snapshot_every=2)
        assert (
            resume(state, 1, image_job, tmp_path, resume="never", hot_every=None)
            == "in-memory-snapshot-of-step-5"
        )
    assert [event["snapshots"] for event in events(tmp_path, "snapshots_set_aside")] == [
        steps_of(STEPS)
    ]
    assert "step-00000002" in snapshots(tmp_path)


def job_killed_at_its_end(run):
    """Run all steps, and exit before the last snapshot."""
    image_job(run)
    os.kill(os.getpid(), signal.SIGKILL)


def test_last_state_that_was_only_in_memory_is_written_by_the_replacements(tmp_path):
    with open_launcher_state(1) as state:
        try_workers(
            train,
            1,
            job_killed_at_its_end,
            tmp_path,
            {"snapshot_every": None, "hot_every": 1},
            environment=state.environment,
        )
        assert snapshots(tmp_path) == []
        assert resume(state, 1, image_job, tmp_path) == f"in-memory-snapshot-of-step-{STEPS}"
    assert snapshots(tmp_path) == steps_of(STEPS)


def without_directory(hooks):
    """Do one run without a directory per hook; return the fingerprint of the last one."""
    left = {}
    for hook in hooks:
        with ss.init(lanes=8, hot_every=1) as run:
            left = fingerprint({"model": image_job(run, hook=hook)["model"].state_dict()})
    return left


def counted(runs):
    """Return the fingerprint of the last of several runs, and the steps of each."""
    steps = [[] for _ in range(runs)]
    return without_directory([made.append for made in steps]), steps


@pytest.mark.parametrize(
    ("runs", "expected"),
    [pytest.param(1, [[5, 6, 7]], marks=pytest.mark.long), (2, [[*range(STEPS)]] * 2)],
)
def test_copies_need_no_directory_and_belong_to_one_run(runs, expected):
    (undisturbed, _), _ = run_workers(counted, 2, 1)
    with open_launcher_state(2) as state:
        hooks = [*[kill_at(STEPS, 0)] * (runs - 1), kill_at(5, 1)]
        assert (
            try_workers(without_directory, 2, hooks, environment=state.environment)[1].exitcode
            == -signal.SIGKILL
        )
        assert run_workers(counted, 1, runs, environment={**state.environment, **AGAIN}) == [
            (undisturbed, expected)
        ]


@pytest.mark.parametrize("hot_every", ["none", pytest.param("auto", marks=pytest.mark.long)])
def test_hot_every_none_uses_no_memory(hot_every, tmp_path):
    with open_launcher_state(1) as state:
        environment = {**state.environment, "SAMESTEP_HOT_EVERY": hot_every}
        run_workers(train, 1, image_job, tmp_path, environment=environment)
        assert (os.fstat(state.slots[0][0]).st_size > 0) == (hot_every == "auto")


def test_training_continues_without_copies_if_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory, "available_bytes", lambda: 10_000)
    with open_launcher_state(1) as state:
        run_workers(train, 1, image_job, tmp_path, {"hot_every": 1}, environment=state.environment)
        assert all(os.fstat(slot).st_size == 0 for pair in state.slots for slot in pair)
    (failed,) = events(tmp_path, "in_memory_snapshot_failed")
    assert "at most half of the 0.0 GB of memory that this host has left" in failed["reason"]
    assert snapshots(tmp_path)[-1:] == steps_of(STEPS)


def test_snapshots_on_disk_need_no_copy_of_their_own(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(StagingBuffer, "copy", None)
    monkeypatch.setattr(StagingBuffer, "reserve", None)
    options = {"hot_every": 1, "snapshot_every": 2, "keep_last": 10}
    with open_launcher_state(2) as state:
        run_workers(train, 2, image_job, tmp_path / "run", options, environment=state.environment)
    assert snapshots(tmp_path / "run") == steps_of(*range(2, STEPS + 1, 2))
    assert left_in(image_job, tmp_path / "run", lanes=8) == undisturbed


@pytest.mark.parametrize(
    "calls",
    [["memfd_create"], pytest.param(["memfd_create", "pidfd_open"], marks=pytest.mark.long)],
    ids=",".join,
)
def test_replacements_use_a_snapshot_on_disk_if_a_sandbox_refuses_memfd(
    calls, undisturbed, tmp_path
):

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
