"""Complete runs with snapshots in a remote storage."""

from __future__ import annotations

import os
import signal

import pytest

from samestep.errors import ConfigError, RecordError, SnapshotError
from samestep.snapshot.manifest import NAME
from samestep.storage import Storage, StorageError
from tests.jobs import events, image_job, left_by, left_in, snapshots, steps_of, train
from tests.snapshot import functions
from tests.workers import run_workers, try_workers


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/far"


def test_a_run_moves_from_machine_to_machine_with_the_same_bits(tmp_path, url):
    options = {"remote": url, "snapshot_every": 3}
    for machine, (workers, last) in enumerate(((2, 4), (1, 6), (3, None))):
        run_workers(
            train, workers, image_job, tmp_path / str(machine), {**options, "stop_after": last}
        )
    assert [
        event["step"] for machine in "12" for event in events(tmp_path / machine, "resumed")
    ] == [4, 6]
    undisturbed = left_by(image_job, tmp_path / "undisturbed", 1, lanes=8)
    left = left_in(image_job, tmp_path / "2", lanes=8)
    assert left == {name: value for name, value in undisturbed.items() if name in left}
    assert len(left) > len(undisturbed) / 2
    assert snapshots(tmp_path / "far") == steps_of(4, 6, 8)


@pytest.mark.long
def test_a_run_starts_from_the_url_of_a_snapshot_and_sets_later_ones_aside(tmp_path, url):
    train(image_job, tmp_path / "old", {"remote": url, "snapshot_every": 2})
    options = {
        "remote": url,
        "resume": f"{url}/step-00000004",
        "snapshot_every": 3,
        "stop_after": 6,
    }
    run_workers(train, 1, image_job, tmp_path / "new", options)
    assert [event["step"] for event in events(tmp_path / "new", "resumed")] == [4]
    (aside,) = events(tmp_path / "new", "snapshots_set_aside")
    assert aside["snapshots"] == steps_of(6, 8)
    assert snapshots(tmp_path / "far") == steps_of(4, 6)
    assert len(list((tmp_path / "far").glob("superseded-*/*/manifest.json"))) == 2


@pytest.mark.long
def test_remote_snapshots_that_are_not_set_aside_yet_are_not_resumed_from(
    tmp_path, url, monkeypatch
):
    old, new = {"snapshot_every": 2}, {"snapshot_every": 2, "seed": 1}
    train(image_job, tmp_path / "run", {"remote": url, **old})

    def fail(*_):
        raise StorageError("the storage fails")

    start_over = {"remote": url, **new, "resume": "never", "stop_after": 4}
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "copy", fail)
        with pytest.raises(SnapshotError, match="the storage fails"):
            train(image_job, tmp_path / "run", start_over)
    assert snapshots(tmp_path / "far") == steps_of(4, 6, 8)
    with pytest.raises(SystemExit):
        train(image_job, tmp_path / "run", {"remote": url, **new, "stop_after": 5})
    assert [event["step"] for event in events(tmp_path / "run", "resumed")] == [4]
    assert snapshots(tmp_path / "far") == steps_of(2, 4, 5)
    (aside,) = (tmp_path / "far").glob("superseded-*")
    assert snapshots(aside) == steps_of(4, 6, 8)
    with pytest.raises(SystemExit):  # later ones are set aside no more
        train(image_job, tmp_path / "run", {"remote": url, **new, "stop_after": 6})
    assert len(events(tmp_path / "run", "snapshots_set_aside")) == 2  # one in each place


def die_while_sending(directory, url, files):
    """Train with two workers; kill the first once it sent `files` of the last snapshot."""
    send, sent = Storage.send, []

    def send_and_die(storage, source, path):
        send(storage, source, path)
        sent.append(path)
        if len(sent) == files:
            os.kill(os.getpid(), signal.SIGKILL)

    Storage.send = send_and_die
    train(image_job, directory, {"remote": url, "snapshot_every": 100})


@pytest.mark.parametrize("files", [pytest.param(1, marks=pytest.mark.long), 2])
def test_after_a_killed_worker_only_missing_files_are_sent(tmp_path, url, files):
    outcomes = try_workers(die_while_sending, 2, tmp_path / "run", url, files)
    assert outcomes[0].exitcode == -signal.SIGKILL
    assert not list((tmp_path / "far").rglob(NAME))
    train(image_job, tmp_path / "run", {"remote": url})
    (copied,) = events(tmp_path / "run", "snapshot_copied")
    sizes = sorted(
        path.stat().st_size for path in (tmp_path / "far" / "step-00000008").glob("tensors*")
    )
    manifest = (tmp_path / "far" / "step-00000008" / NAME).stat().st_size
    assert copied["bytes"] - manifest in ([0] if files == 2 else sizes)
    assert len(sizes) == 2


def test_a_failing_storage_fails_the_run_only_at_its_end(tmp_path):
    directory, url = tmp_path / "run", "file:///proc/none/runs"
    with pytest.raises(
        SnapshotError,
        match=f"the last snapshot is complete in {directory}, but could not be copied to {url}: "
        "cannot write",
    ):
        train(image_job, directory, {"remote": url, "snapshot_every": 2})
    assert snapshots(directory) == steps_of(4, 6, 8)
    assert [event["url"] for event in events(directory, "remote_failed")] == [url]
    assert len(events(directory, "failed")) == 1


def test_a_function_is_called_with_every_file_of_every_snapshot(tmp_path):
    train(
        image_job,
        tmp_path,
        {"transfer": f"{functions.__name__}:note", "keep_last": 10, "snapshot_every": 4},
    )
    noted = [path for path in (tmp_path / "noted").read_text().splitlines() if "/step-" in path]
    assert [path.rsplit("/", 2)[1] for path in noted] == [*steps_of(4, 4), *steps_of(8, 8)]
    assert set(noted) == {str(path) for path in tmp_path.glob("step-*/*")}


def test_a_function_that_never_works_fails_the_run_only_at_its_end(tmp_path):
    options = {"transfer": f"{functions.__name__}:refuse", "snapshot_every": 4}
    with pytest.raises(RecordError, match="failed at every call, so nothing was copied"):
        train(image_job, tmp_path, options)
    failed = events(tmp_path, "sink")
    assert {event["error"] for event in failed} == {"ConnectionError: no route"}
    assert snapshots(tmp_path) == steps_of(4, 8)
    assert len(events(tmp_path, "finished")) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"remote": "s4://bucket/run"},
            "expected a URL that fsspec knows, .* got s4://bucket/run",
        ),
        (
            {"remote": "s4://bucket/run", "resume": "never"},
            "expected a URL that fsspec knows, .* got s4://bucket/run",
        ),
        (
            {"transfer": "nowhere:send"},
            "transfer must name an importable module:function, got 'nowhere:send'",
        ),
        (
            {"resume": "s4://bucket/run/step-00000001"},
            "expected a URL that fsspec knows, .* got s4://bucket/run",
        ),
        (
            {"resume": "file:///a/run"},
            "resume must be the URL of a snapshot, .* got 'file:///a/run'",
        ),
    ],
)
def test_unusable_options_are_rejected_at_the_start(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        train(image_job, tmp_path, options)
