from __future__ import annotations

import logging
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from samestep.config import merge
from samestep.errors import ConfigError, SnapshotError
from samestep.record.sinks import find_function
from samestep.snapshot import hooks, load
from samestep.snapshot.commit import keep_newest
from samestep.snapshot.hooks import Mirror
from samestep.snapshot.manifest import NAME
from samestep.snapshot.remote import RemoteDirectory
from tests.faults import flip_byte
from tests.jobs import steps_of
from tests.snapshot.exact import exact
from tests.snapshot.faulty import HASTY, URL, failing
from tests.snapshot.saving import save, save_once, small_state, team


def mirror_of(make_pass):
    """Return a mirror whose passes call a function; the first one begins at once."""

    class Passes(Mirror):
        def _make_pass(self):
            make_pass()

    remote = RemoteDirectory(URL, HASTY)
    return Passes(remote, Path(), keep_last=1, keep_best=0, report=lambda *_, **__: None)


def test_requests_during_a_pass_cause_one_more():
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    passes = []

    def make_pass():
        begun.release()
        assert may_end.acquire(timeout=300)
        passes.append(None)

    background = mirror_of(make_pass)
    assert begun.acquire(timeout=300)
    for _ in range(3):
        background.on_commit(Path())
    may_end.release(2)
    background.finish()
    assert len(passes) == 2
    background.close()
    assert not background._thread.is_alive()


def test_closing_waits_only_for_the_grace_period_and_starts_no_pass(monkeypatch):
    monkeypatch.setattr(hooks, "CLOSE_SECONDS", 0.0)
    begun, may_end = threading.Semaphore(0), threading.Event()
    passes = []

    def make_pass():
        passes.append(None)
        begun.release()
        may_end.wait(300)

    background = mirror_of(make_pass)
    assert begun.acquire(timeout=300)
    background.on_commit(Path())
    background.close()
    may_end.set()
    background._thread.join(300)
    assert len(passes) == 1


def test_a_function_is_found_by_its_name():
    assert find_function("shutil:rmtree").__name__ == "rmtree"
    assert find_function("pathlib:Path.unlink").__name__ == "unlink"


@pytest.mark.parametrize("name", ["sender_of_mine:send", "sender_of_mine.send"])
def test_a_function_in_the_working_directory_is_found(name, tmp_path, monkeypatch):
    (tmp_path / "sender_of_mine.py").write_text("def send(path): return 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/elsewhere", *filter(None, sys.path)])  # a script's folder
    monkeypatch.delitem(sys.modules, "sender_of_mine", raising=False)
    assert find_function(name)(tmp_path) == 7
    assert merge({"transfer": name, "dir": "runs"}, {}).transfer == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_module:send",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            "shutil:send",
            "AttributeError: module 'shutil' has no attribute 'send'",
        ),
    ],
)
def test_a_wrong_function_name_is_rejected(name, message):
    with pytest.raises(ConfigError) as caught:
        find_function(name)
    expected = f"transfer must name an importable module:function, got {name!r}: {message}"
    assert str(caught.value).startswith(expected)


@contextmanager
def mirroring(directory, keep_last=2, keep_best=0, **options):
    """Yield the mirror of a directory and its reports."""
    reported = []
    mirror = Mirror(
        RemoteDirectory(URL, HASTY),
        directory,
        keep_last=keep_last,
        keep_best=keep_best,
        report=lambda kind, **fields: reported.append((kind, fields)),
        **options,
    )
    try:
        yield mirror, reported
    finally:
        mirror.close()


def mirrored(directory, **options):
    """Run the first pass of a mirror; return its reports."""
    with mirroring(directory, **options) as (mirror, reported):
        mirror.finish()
    return reported


def kinds(reported):
    return [kind for kind, _ in reported]


def test_every_snapshot_is_copied_once_and_removed_with_the_local_one(tmp_path, remote):
    with mirroring(tmp_path) as (mirror, reported), team(tmp_path, keep_last=2) as (writers, _):
        for step in (1, 2, 3):
            save(writers, step, small_state(step))
            mirror.on_commit(tmp_path / steps_of(step)[0])
            mirror.finish()
    assert remote.names() == steps_of(2, 3)
    assert kinds(reported) == ["snapshot_copied"] * 3 + ["snapshot_removed"]
    assert reported[-1][1] == {"path": f"{URL}/step-00000001"}
    copied = reported[0][1]
    assert (copied["step"], copied["url"], copied["bytes"] > 600, copied["seconds"] > 0) == (
        1,
        f"{URL}/step-00000001",
        True,
        True,
    )
    assert mirrored(tmp_path) == []


def test_what_was_left_undone_is_done_at_the_next_start_the_newest_first(tmp_path, remote):
    for step in (1, 2, 3):
        save_once(tmp_path, step, small_state(step))
    assert [fields["step"] for _, fields in mirrored(tmp_path, keep_last=3)] == [3, 2, 1]
    assert remote.names() == steps_of(1, 2, 3)


def test_a_new_machine_that_holds_only_the_newest_keeps_the_others_there(tmp_path, remote):
    for step in (1, 2, 3, 4):
        save_once(tmp_path / "old", step, small_state(step))
    mirrored(tmp_path / "old", keep_last=3)
    remote.fetch(steps_of(4)[0], tmp_path / "new")
    assert mirrored(tmp_path / "new", keep_last=3) == []
    save_once(tmp_path / "new", 5, small_state(5))
    mirrored(tmp_path / "new", keep_last=3)
    assert remote.names() == steps_of(3, 4, 5)


def test_the_best_stay(tmp_path, remote):
    with team(tmp_path) as (writers, _):
        for step, score in ((1, 0.5), (2, 0.9), (3, float("nan")), (4, 0.1), (5, None)):
            save(writers, step, small_state(step), score=score)
    mirrored(tmp_path, keep_last=1, keep_best=2)
    assert remote.names() == steps_of(1, 2, 5)


def test_what_is_kept_for_an_alert_stays(tmp_path, remote):
    with team(tmp_path) as (writers, _):
        for step in (1, 2, 3, 4):
            save(writers, step, small_state(step))
            if step == 2:
                keep_newest(tmp_path, "the loss is nan")
    mirrored(tmp_path, keep_last=1)
    assert remote.names() == steps_of(2, 4)


def test_a_step_that_is_saved_again_is_copied_again(tmp_path, remote):
    save_once(tmp_path, 1, small_state(1))
    mirrored(tmp_path)
    with team(tmp_path, attempt="second") as (writers, _):
        save(writers, 1, small_state(1), score=0.5)
    assert kinds(mirrored(tmp_path)) == ["snapshot_copied"]
    assert remote.inspect(steps_of(1)[0]).score == 0.5


def test_a_damaged_snapshot_is_not_copied(tmp_path, remote):
    for step in (1, 2, 3):
        save_once(tmp_path, step, small_state(step))
    flip_byte(next((tmp_path / steps_of(2)[0]).glob("tensors*")), -1)
    mirrored(tmp_path, keep_last=2)
    assert remote.names() == steps_of(1, 3)


def test_what_killed_senders_left_goes_and_later_steps_are_left_alone(tmp_path, remote):
    for step in (2, 9):
        remote.storage.create(f"{steps_of(step)[0]}/tensors", b"half of it")
    for step in (3, 4):
        save_once(tmp_path, step, small_state(step))
    assert kinds(mirrored(tmp_path)) == ["snapshot_copied", "snapshot_copied", "snapshot_removed"]
    assert remote.names() == steps_of(3, 4, 9)


def test_another_history_is_set_aside_once(tmp_path, remote):
    for step in (1, 2, 3):
        save_once(tmp_path / "old", step, small_state(step))
    mirrored(tmp_path / "old", keep_last=3)
    save_once(tmp_path / "new", 1, small_state(1))
    with mirroring(tmp_path / "new", keep_last=3, set_aside=(1, "superseded-x")) as (
        mirror,
        reported,
    ):
        mirror.finish()
        assert reported[0] == (
            "snapshots_set_aside",
            {"path": f"{URL}/superseded-x", "snapshots": steps_of(2, 3)},
        )
        save_once(tmp_path / "new", 2, small_state(7), attempt="second")
        mirror.on_commit(tmp_path / "new" / steps_of(2)[0])
        mirror.finish()
    assert kinds(reported).count("snapshots_set_aside") == 1
    assert remote.names() == steps_of(1, 2)
    assert sorted(remote.storage._entries("superseded-x")) == steps_of(2, 3)
    assert exact(load(remote.fetch(steps_of(2)[0], tmp_path / "there")).state) == exact(
        small_state(7)
    )


def test_a_failing_storage_is_reported_once_until_it_works_again(tmp_path, remote, far, caplog):
    save_once(tmp_path, 1, small_state(1))
    far.before = staticmethod(failing(100, PermissionError("denied")))
    with mirroring(tmp_path) as (mirror, reported), caplog.at_level(logging.WARNING, "samestep"):
        for number in range(4):
            with pytest.raises(SnapshotError) as caught:
                mirror.finish()
            if number < 3:
                mirror.on_commit(tmp_path)
        far.before = staticmethod(lambda operation, path: None)
        mirror.on_commit(tmp_path)
        mirror.finish()
    assert str(caught.value).startswith(
        f"the last snapshot is complete in {tmp_path}, but could not be copied to {URL}: "
        f"cannot list {URL}: PermissionError: denied. Start the run again once the storage works"
    )
    reason = f"cannot list {URL}: PermissionError: denied"
    assert reported[0] == ("remote_failed", {"url": URL, "reason": reason})
    assert kinds(reported) == ["remote_failed", "snapshot_copied"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{reason}; retrying at the next snapshot"
    ]
    assert remote.names() == steps_of(1)


def test_a_snapshot_that_is_removed_during_its_upload_is_not_a_failure(tmp_path, remote, far):
    for step in (1, 2):
        save_once(tmp_path, step, small_state(step))
    (oldest,) = steps_of(1)

    def remove_it(operation, path):
        if (operation, path.partition("/")[0]) == ("put_file", oldest) and (
            tmp_path / oldest / NAME
        ).exists():
            for file in (tmp_path / oldest).iterdir():
                file.unlink()

    far.before = staticmethod(remove_it)
    assert kinds(mirrored(tmp_path)) == ["snapshot_copied"]
    assert remote.inspect(steps_of(2)[0]).step == 2


def test_close_does_not_wait_for_a_retry(tmp_path, far):
    save_once(tmp_path, 1, small_state(1))
    far.before = staticmethod(failing(10**6, ConnectionError("reset")))
    remote = RemoteDirectory(URL)  # which would wait for half a minute
    mirror = Mirror(remote, tmp_path, keep_last=1, keep_best=0, report=lambda *_, **__: None)
    mirror.close()
    assert not mirror._thread.is_alive()
