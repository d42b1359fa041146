"""Which run a directory, a remote and their snapshots belong to."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import samestep as ss
from samestep.config import Config
from samestep.errors import ConfigError, SnapshotError
from samestep.snapshot import owner as module
from samestep.snapshot.owner import NAME, Owner, RemoteOwner, begin, load
from samestep.snapshot.read import Snapshot
from samestep.storage import Storage
from tests.jobs import events, image_job, left_by, left_in, snapshots, steps_of, train
from tests.python import run_python, start_python
from tests.snapshot.faulty import HASTY, URL, failing
from tests.snapshot.test_golden import GOLDEN
from tests.snapshot.test_golden import train as train_golden

FIRST, SECOND = "0" * 16, "1" * 16
JOB = """
import os, time
import samestep as ss
import samestep.snapshot.owner as owner
from tests.jobs import image_job
owner.HEARTBEAT_SECONDS = 0.05
owner.LOST_SECONDS = float(os.environ.get("LOST", "500"))

def wait(step):
    while step == 3 and "WAIT" in os.environ:
        open(os.environ["WAIT"], "w").close()
        time.sleep(0.05)

with ss.init(lanes=8, snapshot_every=1) as run:
    image_job(run, hook=wait)
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "a.py").write_text(JOB)
    (tmp_path / "b.py").write_text(JOB + "# another program")

    def environment(directory, **options):
        remote = {"SAMESTEP_DIR": directory, "SAMESTEP_REMOTE": f"file://{tmp_path}/far"}
        return {"cwd": tmp_path, "env": {**os.environ, **remote, **options}}

    return environment


def test_a_second_program_does_not_use_the_remote_of_the_first(tmp_path, job):
    run_python("a.py", check=False, **job("one", SAMESTEP_STOP_AFTER="3"))
    before = {path: path.read_bytes() for path in (tmp_path / "far").rglob("*") if path.is_file()}
    refused = run_python("b.py", **job("two"))
    assert refused.returncode != 0
    for text in (f"{tmp_path}/a.py in {tmp_path}/one", f"{tmp_path}/b.py in {tmp_path}/two"):
        assert text in refused.stderr
    other_arguments = run_python("a.py", "0.5", **job("two"))
    assert "with other files, arguments or settings" in other_arguments.stderr
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "far").rglob("*") if path.is_file()
    }
    branch = run_python("a.py", **job("two", SAMESTEP_RESUME="one/step-00000003"))
    assert "belongs to run" in branch.stderr
    words = f"file://{tmp_path}/far/step-00000003"
    assert f"pass resume={words} and an empty dir" in refused.stderr
    run_python("b.py", check=True, **job("two", SAMESTEP_RESUME=words))
    undisturbed = left_by(image_job, tmp_path / "undisturbed", 1, lanes=8)
    assert undisturbed == undisturbed | left_in(image_job, tmp_path / "two")


@pytest.mark.long
def test_two_processes_of_a_run_do_not_use_its_remote_at_once(tmp_path, job):
    waiting = tmp_path / "waiting"
    with start_python("a.py", **job("one", WAIT=str(waiting))) as first:
        while not (waiting.exists() and list(tmp_path.glob("far/*/manifest.json"))):
            assert first.poll() is None
            time.sleep(0.01)
        refused = run_python("a.py", **job("two"))
        assert refused.returncode != 0
        assert "another process, of run" in refused.stderr
        assert f"{tmp_path}/one" in refused.stderr
        first.kill()
    run_python("a.py", check=True, **job("two", LOST="0.1"))  # on a replaced machine
    (resumed,) = events(tmp_path / "two", "resumed")
    assert 0 < resumed["step"] <= 3
    assert {load(tmp_path / name).id for name in ("one", "two")} == {resumed["run"]}


@pytest.mark.parametrize("links", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_snapshot_of_another_run_is_used_only_if_it_is_named(tmp_path, capfd, links):
    first, second = tmp_path / "first", tmp_path / "second"
    with pytest.raises(SystemExit):
        train(image_job, first, {"stop_after": 6})
    with pytest.raises(SystemExit):
        train(image_job, second, {"stop_after": 2})
    copy = second / "step-00000006"
    if links:
        copy.symlink_to(first / copy.name)
    else:
        shutil.copytree(first / copy.name, copy)
    with pytest.raises(ConfigError, match=f"{copy} is a snapshot of run {load(first).id}") as error:
        train(image_job, second)
    assert f"this is run {load(second).id}" in str(error.value)
    assert f"pass resume={copy};" in str(error.value)
    with pytest.raises(SystemExit):
        train(image_job, second, {"resume": str(copy), "stop_after": 6})
    assert f"starts from step 6 of run {load(first).id}" in capfd.readouterr().err
    assert snapshots(second) == steps_of(6)  # the others are of another history
    train(image_job, second)  # from the same snapshot, now without its name
    assert [event["step"] for event in events(second, "resumed")] == [6, 6]
    assert ss.read_snapshot(second).info["run"]["id"] == load(second).id != load(first).id


def test_a_directory_of_version_0_1_is_adopted_once(tmp_path, capfd):
    directory = tmp_path / "run"
    shutil.copytree(GOLDEN / "0.1.0", directory)
    train_golden(str(directory), steps=4)
    assert f"run {load(directory).id} adopts it" in capfd.readouterr().err
    train_golden(str(directory), steps=5)
    assert "adopts" not in capfd.readouterr().err
    other = tmp_path / "other"
    train_golden(str(other), steps=1)
    shutil.copytree(GOLDEN / "0.1.0" / "step-00000003", other / "step-00000003")
    with pytest.raises(ConfigError, match="is a snapshot of another run, which it does not name"):
        train_golden(str(other), steps=4)


def make(run=FIRST, program="p", holder="a", **fields):
    return Owner(run, f"/{holder}", f"/{program}.py", "host", program, holder, **fields)


def entry():
    return RemoteOwner(URL, make(), HASTY)._read()


def held(owner):
    remote = RemoteOwner(URL, owner, HASTY)
    remote.hold()
    return remote


@pytest.mark.parametrize(
    ("owner", "is_new", "is_named", "expected"),
    [
        (make(FIRST), False, False, FIRST),
        (make(SECOND), True, False, FIRST),  # a replaced machine
        (make(SECOND), False, False, None),
        (make(SECOND, "q"), True, False, None),
        (make(SECOND, "q"), True, True, FIRST),
        (make(SECOND, "q"), False, True, None),
    ],
)
def test_only_a_new_directory_goes_on_with_the_run_of_the_remote(
    far, owner, is_new, is_named, expected
):
    assert far.store == {}
    held(make(FIRST, origin=(SECOND, 3)))
    remote = RemoteOwner(URL, owner, HASTY)
    if expected is None:
        message = f"belongs to run {FIRST} .*/p.py in /a.*, but this is .*/{owner.program}.py in /a"
        with pytest.raises(ConfigError, match=message):
            remote.decide(is_new=is_new, is_named=is_named)
    else:
        assert remote.decide(is_new=is_new, is_named=is_named).id == expected
    assert entry().id == FIRST


def test_a_remote_without_a_name_is_adopted_by_a_run_without_other_snapshots(far):
    Storage(URL).write("step-00000001/manifest.json", b"")
    new, old = (RemoteOwner(URL, make(adopts=adopts), HASTY) for adopts in (False, True))
    assert new.decide(is_new=True, is_named=False).adopts
    assert old.decide(is_new=False, is_named=False).adopts
    with pytest.raises(ConfigError, match=f"no {NAME} that says whose they are"):
        new.decide(is_new=False, is_named=False)


def test_of_two_runs_that_begin_at_once_one_has_the_remote(far, monkeypatch):
    create = Storage.create

    def create_later(storage, path, data):
        monkeypatch.undo()
        held(make(SECOND, "q"))
        create(storage, path, data)

    monkeypatch.setattr(Storage, "create", create_later)
    first = RemoteOwner(URL, make(FIRST), HASTY)
    with pytest.raises(SnapshotError, match=f"belongs to run {SECOND}"):
        first.hold()
    with pytest.raises(SnapshotError, match=f"belongs to run {SECOND}"):
        first.check()
    assert entry().id == SECOND


def test_a_process_whose_remote_was_taken_over_stops(far, monkeypatch):
    monkeypatch.setattr(module, "LOST_SECONDS", 0.01)
    first = held(make())
    first.check()
    held(make(holder="b"))  # the first one was suspended, and seemed dead
    with pytest.raises(SnapshotError, match=r"a process in /b .* trains twice"):
        first.hold()
    with pytest.raises(SnapshotError, match="trains twice"):
        first.check()
    assert entry().holder == "b"


def test_the_remote_is_released_at_the_end(far):
    first = RemoteOwner(URL, make(), HASTY)
    first.start(make(), "a", at_once=True)
    assert entry().holder == "a"
    first.close()
    assert entry().holder == ""
    held(make(holder="b"))  # without waiting for a heartbeat


def test_a_failing_storage_is_asked_again(far, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.01)
    far.before = staticmethod(failing(12, ConnectionError("reset")))
    remote = RemoteOwner(URL, make(), HASTY)
    remote.start(make(), "a", at_once=True)
    while not remote._is_held:
        time.sleep(0.01)
    remote.close()
    remote.check()


def test_a_directory_keeps_its_run_and_a_copy_of_it_is_another_holder(tmp_path):
    url = f"file://{tmp_path}/far"
    (tmp_path / "one").mkdir()
    first = begin(tmp_path / "one", Config(remote=url), "p", has_begun=False)
    first[1].close()
    (tmp_path / "one").rename(tmp_path / "moved")
    moved, remote = begin(tmp_path / "moved", Config(remote=url), "p", has_begun=False)
    assert replace(moved, dir=first[0].dir) == first[0]
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    copy = begin(tmp_path / "copy", Config(), "p", has_begun=False)[0]
    assert replace(copy, dir=moved.dir) == moved
    holder = json.loads((tmp_path / "far" / NAME).read_text())["holder"]
    assert holder == module._holder(tmp_path / "moved", moved)
    assert holder != module._holder(tmp_path / "copy", copy)
    remote.close()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"id": 1}', b"[" * 10_000])
def test_a_damaged_file_is_an_error(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(SnapshotError, match=f"{NAME} is damaged"):
        load(tmp_path)


def test_names_of_others_are_printed_in_one_line():
    label = {"id": "x" * 9999, "dir": "\x1b[2J", "script": "a\nb"}
    snapshot = Snapshot(Path("step-00000001"), 1, {"run": label}, None, {})
    with pytest.raises(ConfigError) as error:
        make().check(snapshot)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1500


def test_a_start_waits_once_for_a_remote_that_is_down(far, tmp_path, caplog, monkeypatch):
    """The retries of all requests together are limited, and one line says so at the first."""
    monkeypatch.setattr(module, "START_SECONDS", 3.0)  # one to three retries
    asked = []

    def fail(operation, _):
        if threading.current_thread().name != "hold the remote":  # in the background
            asked.append(caplog.text.count("does not respond"))
        raise ConnectionError("no route")

    far.before = staticmethod(fail)
    with pytest.raises(SnapshotError, match="storage may hold the snapshot to resume from"):
        train(image_job, tmp_path, {"remote": URL})
    assert 3 <= len(asked) <= 5  # the run's entry, its retries, and the snapshots without a retry
    assert asked == [0] + [1] * (len(asked) - 1)
    line = rf"waiting up to [23] s for {URL}, which does not respond: ConnectionError: no route"
    assert re.search(line, caplog.text)


def test_training_does_not_wait_for_the_requests_of_a_heartbeat(far):
    remote, reached, goes_on = RemoteOwner(URL, make(), HASTY), threading.Event(), threading.Event()

    def hang(*_):
        reached.set()
        goes_on.wait()

    far.before = staticmethod(hang)
    beat = threading.Thread(target=remote.hold)
    beat.start()
    reached.wait()
    update = threading.Thread(target=remote.update, args=[make(origin=(SECOND, 3))], daemon=True)
    update.start()
    update.join(60.0)
    is_waiting = update.is_alive()
    goes_on.set()
    beat.join()
    update.join()
    assert not is_waiting
    remote.hold()
    assert entry().origin == (SECOND, 3)


def test_a_refusal_lists_the_remote_once(far):
    held(make(FIRST)).close()
    Storage(URL).write(NAME, make(FIRST, holder="").to_bytes())
    Storage(URL).write("step-00000001/manifest.json", b"")
    far.calls.clear()
    with pytest.raises(ConfigError, match=r"pass resume=.*step-00000001 and an empty dir"):
        RemoteOwner(URL, make(SECOND, "q"), HASTY).decide(is_new=True, is_named=False)
    assert [operation for operation, _ in far.calls].count("ls") == 1
