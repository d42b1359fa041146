"""A run that begins in a directory with traps writes and removes nothing outside of it."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from samestep.errors import RecordError, SamestepError
from samestep.launch.screen import WorkerLog
from samestep.record import open_record
from samestep.record.cursor import Cursor, lock
from samestep.record.files import DirectoryLock, locked_by
from samestep.record.sinks import begin_hook
from samestep.record.sinks.trackers import TensorBoardSink
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import check
from samestep.snapshot.remote import RemoteDirectory, superseded
from samestep.storage import write_atomically
from tests.security.hostile import TERABYTE
from tests.snapshot.saving import save_once, small_state
from tests.watch.writing import started, write


def hold(run: Path) -> None:
    DirectoryLock(run, None).close()


def record(run: Path) -> None:
    open_record(run, writes=True).close()


def record_image(run: Path) -> None:
    opened = open_record(run, writes=True)
    opened.image(0, "a", np.zeros((2, 2), np.uint8))
    with closing(opened):
        opened.flush()


def write_log(run: Path) -> None:
    WorkerLog(0, 0).open(run)


def save(run: Path) -> None:
    save_once(run, 1, small_state(1))


def fetch(run: Path) -> None:
    save_once(run.parent / "copy", 1, small_state(1))
    RemoteDirectory(f"file://{run.parent}/copy").fetch("step-00000001", run)


FILES = {
    "run.lock": hold,
    "events.jsonl": record,
    "logs/worker-0.log": write_log,
    "record/lock": lock,
}
FOLDERS = {
    "images": record_image,
    "tensorboard": TensorBoardSink,
    "logs": write_log,
    "record": lock,
    "step-00000001": save,
    ".step-00000001.fetched": fetch,
}


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_no_link_leads_out_of_the_run(tmp_path, name):
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside / "file" if name in FILES else outside)
    with pytest.raises((OSError, SamestepError), match=r"not a regular file|a link, which is not"):
        (FILES | FOLDERS)[name](run)
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"


@pytest.mark.parametrize("name", FILES)
def test_no_pipe_is_waited_for(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises((OSError, SamestepError), match="not a regular file"):
        FILES[name](tmp_path)


def test_files_that_are_only_read_may_be_pipes_or_declare_terabytes(tmp_path):
    for make in (os.mkfifo, lambda path: (path.touch(), os.truncate(path, TERABYTE))):
        for name in ("run.lock", ".superseded.json", "record/cursor.json"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).unlink(missing_ok=True)
            make(tmp_path / name)
        assert locked_by(tmp_path) == ""
        assert superseded(tmp_path, "s3://bucket/run") is None
        assert Cursor(tmp_path).get("s3://bucket/run") is None


def test_a_link_in_place_of_a_temporary_file_is_replaced(tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to("outside")
    write_atomically(tmp_path / "file", b"theirs")
    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "file").read_bytes() == b"theirs"


def test_a_download_replaces_a_link_and_removes_nothing_behind_it(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (outside / NAME).write_text("mine")
    (run / "step-00000001").symlink_to(outside)
    fetch(run)
    assert check(run / "step-00000001").step == 1
    assert (outside / NAME).read_text() == "mine"


def test_a_hook_begins_at_a_record_without_endless_lines(tmp_path):
    write(tmp_path, started())
    os.truncate(tmp_path / "events.jsonl", TERABYTE)
    with pytest.raises(RecordError, match="a line of more than"):
        begin_hook(tmp_path)
