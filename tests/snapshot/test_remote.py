from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from samestep.errors import SnapshotError
from samestep.snapshot import load
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import fault
from samestep.snapshot.remote import RemoteDirectory
from samestep.storage import StorageError
from tests.faults import cut, flip_byte
from tests.snapshot.exact import exact
from tests.snapshot.faulty import HASTY, URL, failing
from tests.snapshot.saving import save, save_once, small_state, team

FIRST, SECOND = "step-00000001", "step-00000002"


class KilledError(BaseException):
    """Simulates the death of a process."""


@pytest.fixture
def directory(tmp_path):
    """A directory with two snapshots of two workers."""
    for step in (1, 2):
        save_once(tmp_path / "run", step, small_state(step), workers=2)
    return tmp_path / "run"


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr("samestep.snapshot.part.SEGMENT_BYTES", 100)


def brought(remote, name, directory):
    """Download a snapshot; return its state and the requested bytes."""
    read, original = [], remote.storage.read

    def noting(path, start, stop):
        read.append((path, start, stop))
        return original(path, start, stop)

    remote.storage.read = noting
    state = exact(load(remote.fetch(name, directory)).state)
    remote.storage.read = original
    return state, [(start, stop) for path, start, stop in read if not path.endswith(NAME)]


def test_uploaded_snapshots_are_found_and_downloaded(directory, remote, tmp_path):
    assert remote.names() == []
    assert remote.send(directory / SECOND) == sum(
        path.stat().st_size for path in (directory / SECOND).iterdir()
    )
    remote.send(directory / FIRST)
    remote.storage.create("step-1/no", b"snapshot")
    assert remote.names() == [FIRST, SECOND]
    assert (remote.inspect(SECOND).step, remote.inspect(SECOND).workers) == (2, 2)
    assert brought(remote, SECOND, tmp_path / "new")[0] == exact(small_state(2))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {SECOND}
    assert fault(tmp_path / "new" / SECOND) is None


def test_the_manifest_is_written_last_and_removed_first(directory, remote, far):
    remote.send(directory / FIRST)
    sent = [path for operation, path in far.calls if operation in {"put_file", "pipe_file"}]
    assert [path.endswith(NAME) for path in sent] == [False, False, True]
    far.calls.clear()
    remote.remove(FIRST)
    assert [path for operation, path in far.calls if operation == "rm"] == [
        f"{FIRST}/{NAME}",
        FIRST,
    ]
    assert remote.names() == []


def test_a_killed_upload_leaves_no_partial_snapshot_and_is_continued(
    directory, remote, far, tmp_path
):
    def killing(point):
        calls = iter(range(10**6))

        def before(operation, path):
            if operation != "ls" and next(calls) == point:
                raise KilledError

        return staticmethod(before)

    for point in range(4):
        far.store.clear()
        far.before = killing(point)
        if point < 3:
            with pytest.raises(KilledError):
                remote.send(directory / FIRST)
        else:
            remote.send(directory / FIRST)  # three requests
        far.before = staticmethod(lambda operation, path: None)
        names = {path.rpartition("/")[2] for path in far.store}
        assert len(names) == point
        assert (NAME in names) == (point == 3)
        far.calls.clear()
        remote.send(directory / FIRST)
        assert (
            len([path for operation, path in far.calls if operation in {"put_file", "pipe_file"}])
            == 3 - point
        )
        assert fault(remote.fetch(FIRST, tmp_path / str(point))) is None


def test_files_of_another_size_are_sent_again_and_unknown_files_are_removed(directory, remote, far):
    remote.send(directory / FIRST)
    data = next(path for path in far.store if not path.endswith(NAME))
    remote.storage.remove(data.removeprefix("/far/run/"))
    remote.storage.create(data.removeprefix("/far/run/"), b"half of it")
    remote.storage.create(f"{FIRST}/left-over", b"by a sender that was killed")
    with pytest.raises(SnapshotError, match="bytes, got 10"):
        remote.inspect(FIRST)
    remote.send(directory / FIRST)
    assert remote.inspect(FIRST).step == 1
    assert remote.storage.sizes(FIRST).keys() == {
        path.name for path in (directory / FIRST).iterdir()
    }


def test_a_step_that_was_saved_again_replaces_the_old_one(directory, remote, tmp_path):
    remote.send(directory / FIRST)
    save_once(directory, 1, small_state(7), attempt="second")
    remote.send(directory / FIRST)
    assert remote.storage.sizes(FIRST).keys() == {
        path.name for path in (directory / FIRST).iterdir()
    }
    assert brought(remote, FIRST, tmp_path / "new")[0] == exact(small_state(7))


def test_a_score_replaces_only_the_manifest_and_at_once(tmp_path, remote, far):
    with team(tmp_path, 2) as (writers, _):
        save(writers, 1, small_state(1))
        remote.send(tmp_path / FIRST)
        save(writers, 1, small_state(1), score=2.0)
    far.calls.clear()
    remote.send(tmp_path / FIRST)
    changes = [(operation, path) for operation, path in far.calls if operation != "ls"]
    assert [operation for operation, path in changes if path.endswith(NAME)][-1] == "pipe_file"
    assert not any(operation in {"rm", "put_file"} for operation, _ in changes)
    assert remote.inspect(FIRST).score == 2.0


def test_one_of_two_concurrent_uploads_of_a_step_wins_completely(far, tmp_path):
    runs = [tmp_path / name for name in ("first", "second")]
    for number, run in enumerate(runs):
        save_once(run, 1, small_state(number), attempt=run.name)
    both_have_data = threading.Barrier(2, timeout=300)
    far.before = staticmethod(
        lambda operation, path: both_have_data.wait() if operation == "pipe_file" else None
    )

    def send(run):
        try:
            return RemoteDirectory(URL, HASTY).send(run / FIRST)
        except StorageError as error:
            return str(error)

    with ThreadPoolExecutor(2) as senders:
        outcomes = list(senders.map(send, runs))
    (lost,) = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert "another run wrote this file in the meantime" in lost
    winner = next(number for number, outcome in enumerate(outcomes) if outcome != lost)
    assert brought(RemoteDirectory(URL, HASTY), FIRST, tmp_path / "new")[0] == exact(
        small_state(winner)
    )


def test_set_aside_moves_a_snapshot(directory, remote):
    remote.send(directory / FIRST)
    files = remote.storage.sizes(FIRST)
    remote.set_aside(FIRST, "superseded-x")
    assert remote.names() == []
    assert remote.storage.sizes(f"superseded-x/{FIRST}") == files


@pytest.mark.usefixtures("small_segments")
def test_an_interrupted_download_is_continued(remote, far, tmp_path):
    save_once(tmp_path / "run", 1, small_state(1), workers=2)
    remote.send(tmp_path / "run" / FIRST)
    complete = brought(remote, FIRST, tmp_path / "undisturbed")
    assert len(complete[1]) == 7
    calls = iter(range(10**6))

    def refuse_the_fifth(operation, path):
        if operation == "cat_file" and next(calls) == 4:
            raise PermissionError("denied")

    far.before = staticmethod(refuse_the_fifth)
    with pytest.raises(StorageError, match="denied"):
        remote.fetch(FIRST, tmp_path / "new")
    far.before = staticmethod(lambda operation, path: None)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f".{FIRST}.fetched"}
    state, parts = brought(remote, FIRST, tmp_path / "new")
    assert state == complete[0]
    assert complete[1][3] in parts  # the first read is the manifest
    assert 1 <= len(parts) <= 4
    assert {path.name for path in (tmp_path / "new").iterdir()} == {FIRST}


def test_a_complete_local_snapshot_is_not_downloaded(directory, remote):
    remote.send(directory / FIRST)
    assert brought(remote, FIRST, directory) == (exact(small_state(1)), [])


def test_a_damaged_local_snapshot_is_replaced(directory, remote):
    remote.send(directory / FIRST)
    flip_byte(next((directory / FIRST).glob("tensors*")), -1)
    assert brought(remote, FIRST, directory)[0] == exact(small_state(1))


def test_another_snapshot_of_the_step_is_left_alone(directory, remote, tmp_path):
    remote.send(directory / FIRST)
    save_once(tmp_path / "other", 1, small_state(7), attempt="other")
    with pytest.raises(SnapshotError, match="is another snapshot of this step; use an empty dir"):
        remote.fetch(FIRST, tmp_path / "other")
    assert exact(load(tmp_path / "other" / FIRST).state) == exact(small_state(7))


def test_a_damaged_remote_snapshot_never_appears_locally(directory, remote, far, tmp_path):
    data = next((directory / FIRST).glob("tensors*"))
    remote.send(directory / FIRST)
    flip_byte(data, -1)
    remote.storage.send(data, f"{FIRST}/{data.name}")
    with pytest.raises(SnapshotError, match=rf"{URL}/{FIRST}/{data.name} is damaged: bytes 0 to"):
        remote.fetch(FIRST, tmp_path / "new")
    assert not (tmp_path / "new" / FIRST).exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: cut(path / NAME, 100), "manifest.json is damaged"),
        (lambda path: flip_byte(path / NAME, 50), "manifest.json is damaged"),
        (lambda path: (path / NAME).write_bytes(b"[" * 2**15), "manifest.json is damaged"),
        (lambda path: next(path.glob("tensors*")).unlink(), "bytes, got no file"),
        (lambda path: (path / NAME).unlink(), "it has no manifest.json: it was never committed"),
    ],
)
def test_damaged_remote_snapshots_are_rejected(directory, far, damage, reason):
    damage(directory / FIRST)
    remote = RemoteDirectory(f"file://{directory}", HASTY)
    with pytest.raises(SnapshotError, match=rf"snapshot file://{directory}/{FIRST}: .*{reason}"):
        remote.inspect(FIRST)
    with pytest.raises(SnapshotError, match="there is none"):
        remote.inspect("step-00000009")


def test_a_manifest_that_is_too_large_is_not_read(directory, remote, far, monkeypatch):
    remote.send(directory / FIRST)
    far.calls.clear()
    monkeypatch.setattr("samestep.snapshot.remote.LARGEST_BYTES", 100)
    with pytest.raises(SnapshotError, match=r"manifest.json must have at most 100 bytes, got \d+"):
        remote.inspect(FIRST)
    assert {operation for operation, _ in far.calls} == {"ls"}


def test_a_failing_storage_is_not_a_damaged_snapshot(directory, remote, far):
    remote.send(directory / FIRST)
    far.before = staticmethod(failing(4, TimeoutError("no answer")))
    with pytest.raises(StorageError, match="no answer"):
        remote.inspect(FIRST)


@pytest.mark.usefixtures("small_segments")
def test_workers_of_a_host_share_one_download(remote, far, tmp_path):
    save_once(tmp_path / "run", 1, small_state(1))
    remote.send(tmp_path / "run" / FIRST)
    (segments,) = [len(file.checksums) for file in remote.inspect(FIRST).files]
    far.calls.clear()
    with ThreadPoolExecutor(3) as workers:
        paths = list(
            workers.map(
                lambda _: RemoteDirectory(URL, HASTY).fetch(FIRST, tmp_path / "new"), range(3)
            )
        )
    assert exact(load(paths[0]).state) == exact(small_state(1))
    assert len([path for operation, path in far.calls if operation == "cat_file"]) == segments + 3
