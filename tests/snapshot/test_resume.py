from __future__ import annotations

from functools import partial

import pytest

from samestep.comm import shared_memory
from samestep.errors import ConfigError, SnapshotError
from samestep.snapshot import files, load_newest, part, read
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import inspect
from samestep.snapshot.remote import RemoteDirectory
from samestep.snapshot.resume import Downloads, load_from
from tests.faults import flip_byte
from tests.jobs import steps_of
from tests.snapshot.exact import exact
from tests.snapshot.faulty import HASTY, URL, failing, faulty_storage
from tests.snapshot.saving import save, save_once, small_state, team
from tests.worlds import in_processes, in_threads, on_hosts


def refuse(kind, **fields):
    raise AssertionError(kind, fields)


def newest_of_all(workers, directory):
    """Return (loaded state, rejections with reasons) by worker."""

    def body(world):
        reported = []
        snapshot = load_newest(
            directory, world, lambda kind, path, reason: reported.append((kind, path, reason))
        )
        return snapshot and exact(snapshot.state), reported

    return in_threads(workers, body)


@pytest.fixture
def directory(tmp_path):
    with team(tmp_path) as (writers, _):
        for step in (1, 2, 3):
            save(writers, step, small_state(step))
    return tmp_path


@pytest.mark.parametrize("workers", [1, 3])
def test_all_workers_load_the_newest_complete_snapshot(directory, workers):
    assert newest_of_all(workers, directory) == [(exact(small_state(3)), [])] * workers
    flip_byte(next((directory / "step-00000003").glob("tensors*")), -1)
    for state, ((kind, path, reason),) in newest_of_all(workers, directory):
        assert state == exact(small_state(2))
        assert (kind, path) == ("snapshot_rejected", str(directory / "step-00000003"))
        assert "damaged" in reason


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_does_not_start_over_beside_snapshots_that_cannot_be_loaded(workers, directory):
    for step in (1, 2, 3):
        flip_byte(next((directory / f"step-0000000{step}").glob("tensors*")), -1)
    (directory / "step-00000004").mkdir()  # never committed
    with pytest.raises(
        SnapshotError, match=r"no snapshot in .*: snapshot .*step-00000003: .*resume='never'"
    ):
        newest_of_all(workers, directory)
    for step in (1, 2, 3):
        (directory / f"step-0000000{step}" / NAME).unlink()
    assert [state for state, _ in newest_of_all(workers, directory)] == [None] * workers


def test_a_snapshot_that_one_worker_cannot_read_is_skipped_by_all(directory, monkeypatch):
    refused = []

    find = read._manifest

    def find_or_refuse(path):
        if path.name == "step-00000003" and not refused:
            refused.append(path)
            raise SnapshotError("a bad cable")
        return find(path)

    monkeypatch.setattr(read, "_manifest", find_or_refuse)
    path = directory / "step-00000003"
    rejected = ("snapshot_rejected", str(path), f"snapshot {path}: a bad cable")
    assert newest_of_all(3, directory) == [(exact(small_state(2)), [rejected])] * 3


def test_workers_of_a_host_read_every_byte_once_and_keep_changes_to_themselves(
    directory, monkeypatch
):
    monkeypatch.setattr(part, "SEGMENT_BYTES", 100)
    save_once(directory, 4, small_state(4), workers=2)
    counts = []
    monkeypatch.setattr(files, "read_into", partial(_count, files.read_into, counts))

    def body(world):
        snapshot = load_newest(directory, world, refuse)
        world.barrier("reading")
        weight = snapshot.state["model"]["weight"]
        weight += world.rank
        world.barrier("changing")
        return snapshot.shared, exact(snapshot.state["model"])

    expected = [small_state(4)["model"] for _ in range(3)]
    for rank, model in enumerate(expected):
        model["weight"] += rank
    assert in_threads(3, body) == [(True, exact(model)) for model in expected]
    path = directory / "step-00000004"
    assert sum(counts) == sum(file.size for file in inspect(path).files)


def _count(read_into, counts, descriptor, offset, buffers):
    buffers = list(buffers)
    counts.append(sum(map(len, buffers)))
    return read_into(descriptor, offset, buffers)


@pytest.mark.parametrize("refusing", [0, 2])
def test_workers_of_a_host_read_for_themselves_if_one_of_them_lacks_memory(
    directory, monkeypatch, refusing
):
    reserve = shared_memory._reserve

    def refuse_one(files, sizes, number, workers):
        if number == refusing:
            raise OSError(28, "No space left on device")
        reserve(files, sizes, number, workers)

    monkeypatch.setattr(shared_memory, "_reserve", refuse_one)

    def body(world):
        snapshot = load_newest(directory, world, refuse)
        return snapshot.shared, exact(snapshot.state)

    assert in_threads(3, body) == [(False, exact(small_state(3)))] * 3


def test_processes_share_what_they_read(directory):
    expected = exact(small_state(3)), True
    assert in_processes(3, _shared_state, directory) == [expected] * 3
    assert on_hosts(2, 4, _shared_state, directory) == [expected] * 4


def _shared_state(world, directory):
    snapshot = load_newest(directory, world, refuse)
    return exact(snapshot.state), snapshot.shared


def test_without_snapshots_none_is_loaded(tmp_path):
    assert newest_of_all(2, tmp_path / "none") == [(None, [])] * 2


@pytest.fixture
def far():
    with faulty_storage() as files:
        yield files


@pytest.fixture
def old(far, tmp_path):
    """The directory of a run with three snapshots and remote copies of them."""
    for step in (1, 2, 3):
        save_once(tmp_path / "old", step, small_state(step), workers=2)
        RemoteDirectory(URL, HASTY).send(tmp_path / "old" / steps_of(step)[0])
    return tmp_path / "old"


def resumed(workers, directory, url=URL):
    """Return (loaded state, events) by worker; `directory` may be a function of the rank."""

    def body(world):
        reported = []
        place = directory(world.rank) if callable(directory) else directory
        snapshot = load_newest(
            place,
            world,
            lambda kind, **fields: reported.append((kind, *fields.values())),
            downloads=Downloads(url, place, world),
        )
        return snapshot and exact(snapshot.state), reported

    return in_threads(workers, body)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_empty_machine_downloads_the_newest(old, far, tmp_path, workers):
    before = len(far.calls)
    assert resumed(workers, tmp_path / "new") == [(exact(small_state(3)), [])] * workers
    assert [path.name for path in (tmp_path / "new").iterdir()] == steps_of(3)
    read = [path for operation, path in far.calls[before:] if operation == "cat_file"]
    assert len(read) == len(set(read)) == 3


def test_each_host_without_a_shared_file_system_downloads(old, tmp_path):
    assert (
        resumed(4, lambda rank: tmp_path / f"host{rank // 2}") == [(exact(small_state(3)), [])] * 4
    )
    for host in ("host0", "host1"):
        assert [path.name for path in (tmp_path / host).iterdir()] == steps_of(3)


def test_the_newest_of_both_places_is_loaded_and_local_copies_first(old, far, tmp_path):
    assert resumed(1, old)[0][0] == exact(small_state(3))
    assert all(operation != "cat_file" for operation, _ in far.calls)
    save_once(tmp_path / "new", 2, small_state(7))
    assert resumed(2, tmp_path / "new")[1][0] == exact(small_state(3))
    save_once(tmp_path / "new", 4, small_state(4))
    assert resumed(2, tmp_path / "new")[1][0] == exact(small_state(4))


def test_damaged_remote_snapshots_are_reported_and_skipped(old, far, tmp_path):
    remote = RemoteDirectory(URL, HASTY)
    for step in (2, 3):
        data = next((old / steps_of(step)[0]).glob("tensors*"))
        flip_byte(data, -1)
        remote.storage.send(data, f"{steps_of(step)[0]}/{data.name}")
    for state, reported in resumed(2, tmp_path / "new"):
        assert state == exact(small_state(1))
        assert [(kind, path) for kind, path, _ in reported] == [
            ("snapshot_rejected", f"{URL}/{name}") for name in steps_of(3, 2)
        ]
        assert all("is damaged: bytes" in reason for _, _, reason in reported)


def test_a_damaged_local_snapshot_is_downloaded(old):
    flip_byte(next((old / steps_of(3)[0]).glob("tensors*")), -1)
    for state, reported in resumed(2, old):
        assert state == exact(small_state(3))
        assert [(kind, path) for kind, path, _ in reported] == [
            ("snapshot_rejected", str(old / steps_of(3)[0]))
        ]


def test_a_failing_storage_is_reported_if_there_is_a_local_snapshot(old, far):
    far.before = staticmethod(failing(100, PermissionError("denied")))
    reason = f"cannot list {URL}: PermissionError: denied"
    assert resumed(2, old) == [(exact(small_state(3)), [("remote_failed", URL, reason)])] * 2


@pytest.mark.parametrize("operation", ["ls", "cat_file"])
def test_a_failing_storage_is_an_error_if_there_is_no_local_snapshot(old, far, tmp_path, operation):
    far.before = staticmethod(failing(100, PermissionError("denied"), operation))
    with pytest.raises(
        SnapshotError,
        match=r"PermissionError: denied. The storage may hold the snapshot to resume from, and "
        ".* has none",
    ):
        resumed(2, tmp_path / "new")


def test_without_remote_snapshots_none_is_loaded(far, tmp_path):
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
        match=f"resume must be the URL of a snapshot, such as {URL}/step-00001200, got '{URL}'",
    ):
        in_threads(1, lambda world: load_from(URL, tmp_path / "new", world))


def test_workers_communicate_while_one_downloads(old, far, tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.comm.together.POLL_SECONDS", 0.001)

    def body(world):
        def wait_for_barriers(operation, path):
            while operation == "cat_file" and world.barriers < 20:
                pass

        if world.rank == 0:
            far.before = staticmethod(wait_for_barriers)
        return load_from(f"{URL}/{steps_of(1)[0]}", tmp_path / "new", world).step

    assert in_threads(2, body) == [1, 1]
