from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest

from samestep.errors import SnapshotError
from samestep.snapshot import load
from samestep.snapshot.hooks import Hook, Mirror
from samestep.snapshot.manifest import NAME
from samestep.snapshot.remote import RemoteSnapshots
from tests.faults import flip_byte
from tests.jobs import steps_of
from tests.snapshot.exact import exact
from tests.snapshot.faulty import HASTY, URL, failing
from tests.snapshot.saving import save, save_once, small_state, team


@contextmanager
def mirroring(directory, keep_last=2, keep_best=0, **options):
    """Yield the mirror of a directory and what it reports."""
    told = []
    mirror = Mirror(
        RemoteSnapshots(URL, HASTY),
        directory,
        keep_last=keep_last,
        keep_best=keep_best,
        report=lambda kind, **fields: told.append((kind, fields)),
        **options,
    )
    try:
        yield mirror, told
    finally:
        mirror.close()


def mirrored(directory, **options):
    """Let a mirror do all that it would at the start of a run; return what it reports."""
    with mirroring(directory, **options) as (mirror, told):
        mirror.finish()
    return told


def kinds(told):
    return [kind for kind, _ in told]


def test_every_snapshot_is_copied_once_and_those_that_go_here_go_there(tmp_path, remote):
    with mirroring(tmp_path) as (mirror, told), team(tmp_path, keep_last=2) as (writers, _):
        for step in (1, 2, 3):
            save(writers, step, small_state(step))
            mirror.on_commit(tmp_path / steps_of(step)[0])
            mirror.finish()
    assert remote.names() == steps_of(2, 3)
    assert kinds(told) == ["snapshot_copied"] * 3 + ["snapshot_removed"]
    assert told[-1][1] == {"path": f"{URL}/step-00000001"}
    copied = told[0][1]
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
    with mirroring(tmp_path / "new", keep_last=3, set_aside=(1, "superseded-x")) as (mirror, told):
        mirror.finish()
        assert told[0] == (
            "snapshots_set_aside",
            {"path": f"{URL}/superseded-x", "snapshots": steps_of(2, 3)},
        )
        save_once(tmp_path / "new", 2, small_state(7), attempt="second")
        mirror.on_commit(tmp_path / "new" / steps_of(2)[0])
        mirror.finish()
    assert kinds(told).count("snapshots_set_aside") == 1
    assert remote.names() == steps_of(1, 2)
    assert sorted(remote.storage._entries("superseded-x")) == steps_of(2, 3)
    assert exact(load(remote.fetch(steps_of(2)[0], tmp_path / "there")).state) == exact(
        small_state(7)
    )


def test_a_storage_that_refuses_is_told_once_until_it_works_again(tmp_path, remote, far, caplog):
    save_once(tmp_path, 1, small_state(1))
    far.before = staticmethod(failing(100, PermissionError("denied")))
    with mirroring(tmp_path) as (mirror, told), caplog.at_level(logging.WARNING, "samestep"):
        for _ in range(3):
            with pytest.raises(SnapshotError) as caught:
                mirror.finish()
            mirror.on_commit(tmp_path)
        Hook.finish(mirror)
        far.before = staticmethod(lambda operation, path: None)
        mirror.on_commit(tmp_path)
        mirror.finish()
    assert str(caught.value).startswith(
        f"the last snapshot is complete in {tmp_path}, but could not be copied to {URL}: cannot list {URL}: "
        "PermissionError: denied. Start the run again once that works"
    )
    reason = f"cannot list {URL}: PermissionError: denied"
    assert told[0] == ("remote_failed", {"url": URL, "reason": reason})
    assert kinds(told) == ["remote_failed", "snapshot_copied"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{reason}; retrying at the next snapshot"
    ]
    assert remote.names() == steps_of(1)


def test_a_snapshot_that_newer_ones_replace_while_it_is_sent_is_no_failure(tmp_path, remote, far):
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


def test_closing_does_not_wait_for_another_try(tmp_path, far):
    save_once(tmp_path, 1, small_state(1))
    far.before = staticmethod(failing(10**6, ConnectionError("reset")))
    remote = RemoteSnapshots(URL)  # which would wait for half a minute
    mirror = Mirror(remote, tmp_path, keep_last=1, keep_best=0, report=lambda *_, **__: None)
    mirror.close()
    assert not mirror._thread.is_alive()
