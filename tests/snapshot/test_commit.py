from __future__ import annotations

import errno
import math
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep as ss
from samestep.errors import SnapshotError
from samestep.snapshot import check, list_snapshots
from samestep.snapshot.commit import Retention, keep_newest, kept
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import fault, inspect, remove, step_of
from tests.faults import cut, flip_byte
from tests.snapshot.saving import save, save_once, small_state, team


def steps_in(directory):
    return [step_of(path) for path in list_snapshots(directory)]


@given(
    scores=st.lists(
        st.none() | st.just(math.nan) | st.integers(0, 3) | st.just(-math.inf),
        min_size=1,
        max_size=8,
    ),
    keep_last=st.integers(1, 3),
    keep_best=st.integers(0, 3),
)
@settings(max_examples=10)  # each saves up to 8 snapshots
def test_the_newest_and_the_best_stay(tmp_path_factory, scores, keep_last, keep_best):
    directory = tmp_path_factory.mktemp("run")
    stay: set[int] = set()
    with team(directory, keep_last=keep_last, keep_best=keep_best) as (writers, _):
        for step, score in enumerate(scores):
            save(writers, step, {"step": step}, score=score)
            steps = {*stay, step}
            scored = [s for s in steps if scores[s] is not None and not math.isnan(scores[s])]
            best = sorted(scored, key=lambda s: (-scores[s], s))[:keep_best]
            stay = {*sorted(steps)[-keep_last:], *best}
            assert steps_in(directory) == sorted(stay)


def test_the_snapshot_before_each_of_the_newest_three_alerts_stays(tmp_path):
    with team(tmp_path, keep_last=1, keep_best=0) as (writers, _):
        for step in range(1, 9):
            save(writers, step, small_state(step))
            if step in {1, 2, 4}:
                keep_newest(tmp_path, f"alert after step {step}")
            if step == 6:
                (tmp_path / "step-00000007").mkdir()  # of a save that has begun
                keep_newest(tmp_path, "alert after step 6")
        assert steps_in(tmp_path) == [2, 4, 7, 8]
    assert (tmp_path / "step-00000007" / "keep.txt").read_text() == "alert after step 6\n"


@pytest.mark.parametrize("first", [1, 4])
def test_snapshots_that_are_not_finite_displace_no_finite_one(tmp_path, first):
    def state(step):
        return {"model": torch.tensor([step, math.nan if step >= first else 0.0])}

    with team(tmp_path, keep_last=2, keep_best=1) as (writers, _):
        for step in range(1, 9):
            save(writers, step, state(step), score=-abs(step - 2.0))
            keep_newest(tmp_path, "alert")
    # of each kind the two newest, and the best
    assert steps_in(tmp_path) == ([2, 7, 8] if first == 1 else [2, 3, 4, 7, 8])


def test_an_alert_keeps_a_finite_snapshot_if_there_is_one(tmp_path):
    with team(tmp_path) as (writers, _):
        for step in (1, 2, 3):
            save(writers, step, {"model": torch.tensor([math.nan if step > 1 else 1.0])})
        (tmp_path / "step-00000004").mkdir()  # of a save that has begun
        keep_newest(tmp_path, "alert")
        save(writers, 4, {"model": torch.tensor([math.inf])})
    paths = reversed(list_snapshots(tmp_path))
    assert [path.name for path in kept({path: inspect(path) for path in paths})] == [
        "step-00000001"
    ]


def test_a_damaged_snapshot_is_not_counted(tmp_path):
    with team(tmp_path) as (writers, _):
        for step in range(1, 6):
            save(writers, step, small_state(step), score=-float(step))
    flip_byte(next((tmp_path / "step-00000005").glob("tensors*")), -1)
    cut(next((tmp_path / "step-00000004").glob("tensors*")), 10)
    cut(tmp_path / "step-00000001" / NAME, 10)
    with team(tmp_path, attempt="second", keep_last=3, keep_best=1) as (writers, _):
        save(writers, 6, small_state(6))
    assert steps_in(tmp_path) == [2, 3, 4, 5, 6]
    with team(tmp_path, attempt="third", keep_last=1, keep_best=1) as (writers, _):
        save(writers, 7, small_state(7))
    assert steps_in(tmp_path) == [2, 7]


def test_leftovers_are_removed_and_later_steps_and_links_stay(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    save_once(elsewhere, 2, small_state(2))
    run = tmp_path / "run"
    save_once(run, 8, small_state(8))
    save_once(run, 9, small_state(9))
    for leftover in (1, 3):
        (run / f"step-{leftover:08d}").mkdir()
        (run / f"step-{leftover:08d}" / "tensors-old-0-of-1.safetensors").write_bytes(b"half")
    (run / "step-00000002").symlink_to(elsewhere / "step-00000002")
    (run / "notes").mkdir()
    with team(run, attempt="second", keep_last=1) as (writers, reports):
        save(writers, 4, small_state(4))
    assert steps_in(run) == [2, 4, 8, 9]
    assert (elsewhere / "step-00000002" / NAME).exists()
    assert (run / "notes").exists()
    assert [fields["path"][-1] for kind, fields in reports if kind == "snapshot_removed"] == [
        "3",
        "1",
    ]


def test_a_failed_removal_is_reported_and_the_new_snapshot_is_complete(tmp_path, monkeypatch):
    def busy(path):
        raise OSError(16, "Device or resource busy", str(path))

    with team(tmp_path, keep_last=1) as (writers, reports):
        save(writers, 1, small_state(1))
        monkeypatch.setattr("samestep.snapshot.commit.remove", busy)
        save(writers, 2, small_state(2))
    assert [kind for kind, _ in reports] == ["snapshot", "snapshot", "snapshot_not_removed"]
    assert "busy" in reports[-1][1]["reason"]
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("function", ["inspect", "check"])
def test_a_snapshot_that_cannot_be_read_for_now_stays(tmp_path, monkeypatch, function):
    with team(tmp_path, keep_last=3) as (writers, _):
        for step in (1, 2, 3):
            save(writers, step, small_state(step), score=-step)
    failed = []

    def stale(path):
        if path.name == "step-00000001":
            failed.append(path)
            error = OSError(errno.ESTALE, "Stale file handle")
            raise SnapshotError(f"snapshot {path}: {error}") from error
        return {"inspect": inspect, "check": check}[function](path)

    retention = Retention(tmp_path, keep_last=1, keep_best=1)
    with monkeypatch.context() as patch:
        patch.setattr(f"samestep.snapshot.commit.{function}", stale)
        assert retention.apply(tmp_path / "step-00000003") == []
    assert failed
    assert steps_in(tmp_path) == [1, 2, 3]
    assert retention.apply(tmp_path / "step-00000003") == [tmp_path / "step-00000002"]


def test_a_half_removed_snapshot_is_not_a_snapshot(tmp_path, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    save_once(tmp_path, 1, small_state(1))
    monkeypatch.setattr("shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove(tmp_path / "step-00000001")
    assert "never committed" in fault(tmp_path / "step-00000001")


def test_a_save_does_not_wait_until_older_snapshots_are_verified(tmp_path, monkeypatch):
    for step in range(1, 4):
        save_once(tmp_path, step, small_state(step))
    blocked, free = threading.Event(), threading.Event()

    def read_slowly(path):
        blocked.set()
        assert free.wait(300)
        return check(path)

    monkeypatch.setattr("samestep.snapshot.commit.check", read_slowly)
    with team(tmp_path, keep_last=2) as ((writer,), _):
        for step in (4, 5):
            writer.save(step, small_state(step), {}, {})
            writer.wait()
            assert blocked.wait(300)
            assert steps_in(tmp_path) == list(range(1, step + 1))
        free.set()
        writer.wait(tidy_seconds=20.0)
        assert steps_in(tmp_path) == [4, 5]


def test_a_snapshot_that_the_run_resumed_from_is_not_read_again(tmp_path, monkeypatch):
    train = partial(_train, tmp_path)
    train(2)
    read = []
    monkeypatch.setattr("samestep.snapshot.commit.check", read.append)
    train(4)
    assert steps_in(tmp_path) == [2, 4]
    assert not read


def _train(directory, steps):
    with ss.init(dir=directory, snapshot_every=None, keep_last=2) as run:
        run.track(model=torch.nn.Linear(2, 1))
        for _ in run.batches([1, 2], 2, steps=steps):
            pass
