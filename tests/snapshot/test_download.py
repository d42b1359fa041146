from __future__ import annotations

import pytest

from samestep.errors import ConfigError, SnapshotError
from samestep.snapshot import load_newest
from samestep.snapshot.download import Downloads, load_from
from samestep.snapshot.remote import Remote
from tests.faults import flip_byte
from tests.jobs import steps_of
from tests.snapshot.exact import exact
from tests.snapshot.faulty import HASTY, URL, failing, faulty_storage
from tests.snapshot.saving import save_once, small_state
from tests.worlds import in_threads


@pytest.fixture
def far():
    with faulty_storage() as files:
        yield files


@pytest.fixture
def old(far, tmp_path):
    """The directory of a run with three snapshots, of which the remote holds a copy."""
    for step in (1, 2, 3):
        save_once(tmp_path / "old", step, small_state(step), workers=2)
        Remote(URL, HASTY).send(tmp_path / "old" / steps_of(step)[0])
    return tmp_path / "old"


def resumed(workers, directory, url=URL):
    """Return by worker (the state that is loaded, what was told); `directory` is common, or a function of the rank."""

    def body(world):
        told = []
        place = directory(world.rank) if callable(directory) else directory
        snapshot = load_newest(
            place,
            world,
            lambda kind, **fields: told.append((kind, *fields.values())),
            downloads=Downloads(url, place, world),
        )
        return snapshot and exact(snapshot.state), told

    return in_threads(workers, body)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_empty_machine_gets_the_newest(old, far, tmp_path, workers):
    before = len(far.calls)
    assert resumed(workers, tmp_path / "new") == [(exact(small_state(3)), [])] * workers
    assert [path.name for path in (tmp_path / "new").iterdir()] == steps_of(3)
    read = [path for operation, path in far.calls[before:] if operation == "cat_file"]
    assert len(read) == len(set(read)) == 3


def test_hosts_that_share_no_file_system_each_get_it(old, tmp_path):
    assert (
        resumed(4, lambda rank: tmp_path / f"host{rank // 2}") == [(exact(small_state(3)), [])] * 4
    )
    for host in ("host0", "host1"):
        assert [path.name for path in (tmp_path / host).iterdir()] == steps_of(3)


def test_the_newest_of_both_places_is_taken_and_here_before_there(old, far, tmp_path):
    assert resumed(1, old)[0][0] == exact(small_state(3))
    assert all(operation != "cat_file" for operation, _ in far.calls)
    save_once(tmp_path / "new", 2, small_state(7))
    assert resumed(2, tmp_path / "new")[1][0] == exact(small_state(3))
    save_once(tmp_path / "new", 4, small_state(4))
    assert resumed(2, tmp_path / "new")[1][0] == exact(small_state(4))


def test_damaged_ones_are_named_and_passed_over(old, far, tmp_path):
    remote = Remote(URL, HASTY)
    for step in (2, 3):
        data = next((old / steps_of(step)[0]).glob("tensors*"))
        flip_byte(data, -1)
        remote.storage.send(data, f"{steps_of(step)[0]}/{data.name}")
    for state, told in resumed(2, tmp_path / "new"):
        assert state == exact(small_state(1))
        assert [(kind, path) for kind, path, _ in told] == [
            ("snapshot_rejected", f"{URL}/{name}") for name in steps_of(3, 2)
        ]
        assert all("is damaged: bytes" in reason for _, _, reason in told)


def test_what_is_damaged_here_is_taken_from_there(old):
    flip_byte(next((old / steps_of(3)[0]).glob("tensors*")), -1)
    for state, told in resumed(2, old):
        assert state == exact(small_state(3))
        assert [(kind, path) for kind, path, _ in told] == [
            ("snapshot_rejected", str(old / steps_of(3)[0]))
        ]


def test_a_storage_that_does_not_answer_is_told_where_there_is_something_to_resume_from(old, far):
    far.before = staticmethod(failing(100, PermissionError("denied")))
    reason = f"the storage did not list {URL}: PermissionError: denied"
    assert resumed(2, old) == [(exact(small_state(3)), [("remote_failed", URL, reason)])] * 2


@pytest.mark.parametrize("operation", ["ls", "cat_file"])
def test_it_is_an_error_where_there_is_not(old, far, tmp_path, operation):
    far.before = staticmethod(failing(100, PermissionError("denied"), operation))
    with pytest.raises(
        SnapshotError,
        match=r"PermissionError: denied. What the run would resume from may be there, and there is none in",
    ):
        resumed(2, tmp_path / "new")


def test_without_snapshots_there_is_none(far, tmp_path):
    assert resumed(2, tmp_path / "new") == [(None, [])] * 2


def test_one_snapshot_is_loaded_by_its_url(old, tmp_path):
    states = in_threads(
        2, lambda world: exact(load_from(f"{URL}/{steps_of(2)[0]}", tmp_path / "new", world).state)
    )
    assert states == [exact(small_state(2))] * 2
    with pytest.raises(SnapshotError, match=f"snapshot {URL}/step-00000009: there is none"):
        in_threads(2, lambda world: load_from(f"{URL}/{steps_of(9)[0]}", tmp_path / "new", world))
    with pytest.raises(
        ConfigError,
        match=f"resume='{URL}' was given; expected the URL of a snapshot, such as {URL}/step-00001200",
    ):
        in_threads(1, lambda world: load_from(URL, tmp_path / "new", world))


def test_workers_meet_while_one_downloads(old, far, tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.snapshot.download.PULSE_SECONDS", 0.001)

    def body(world):
        def wait_for_meetings(operation, path):
            while operation == "cat_file" and world.barriers < 20:
                pass

        if world.rank == 0:
            far.before = staticmethod(wait_for_meetings)
        return load_from(f"{URL}/{steps_of(1)[0]}", tmp_path / "new", world).step

    assert in_threads(2, body) == [1, 1]
