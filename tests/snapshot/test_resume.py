from __future__ import annotations

import pytest

from samestep.errors import SnapshotError
from samestep.snapshot import load, load_newest, resume
from tests.faults import flip_byte
from tests.snapshot.exact import exact
from tests.snapshot.saving import save, small_state, team
from tests.worlds import in_threads


def newest_of_all(workers, directory):
    """Return by worker (the state that is loaded, (what was rejected, why) in turn)."""

    def body(world):
        told = []
        snapshot = load_newest(
            directory, world, lambda kind, path, reason: told.append((kind, path, reason))
        )
        return snapshot and exact(snapshot.state), told

    return in_threads(workers, body)


@pytest.fixture
def directory(tmp_path):
    with team(tmp_path) as (writers, _):
        for step in (1, 2, 3):
            save(writers, step, small_state(step))
    return tmp_path


@pytest.mark.parametrize("workers", [1, 3])
def test_all_workers_load_the_newest_whole_snapshot(directory, workers):
    assert newest_of_all(workers, directory) == [(exact(small_state(3)), [])] * workers
    flip_byte(next((directory / "step-00000003").glob("tensors*")), -1)
    for state, ((kind, path, reason),) in newest_of_all(workers, directory):
        assert state == exact(small_state(2))
        assert (kind, path) == ("snapshot_rejected", str(directory / "step-00000003"))
        assert "damaged" in reason


def test_what_one_worker_cannot_read_no_worker_takes(directory, monkeypatch):
    refused = []

    def load_or_refuse(path):
        if path.name == "step-00000003" and not refused:
            refused.append(path)
            raise SnapshotError("a bad cable")
        return load(path)

    monkeypatch.setattr(resume, "load", load_or_refuse)
    rejected = ("snapshot_rejected", str(directory / "step-00000003"), "a bad cable")
    assert newest_of_all(3, directory) == [(exact(small_state(2)), [rejected])] * 3


def test_without_snapshots_none_is_loaded(tmp_path):
    assert newest_of_all(2, tmp_path / "none") == [(None, [])] * 2
