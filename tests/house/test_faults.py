from __future__ import annotations

import errno
import os
import signal

import pytest

from tests.faults import cut, flip_byte, full_disk, kill_at


def test_kill_at_spares_other_steps_and_ranks(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append((process, number)))
    monkeypatch.setenv("RANK", "0")
    kill_at(step=2, rank=0)(1)
    kill_at(step=2, rank=1)(2)
    assert killed == []
    kill_at(step=2, rank=0)(2)
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_flip_byte_changes_one_byte(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"\x00\x01\x02")
    flip_byte(file, -1)
    assert file.read_bytes() == b"\x00\x01\xfd"


def test_cut_truncates_and_rejects_a_size_that_changes_nothing(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    cut(file, 2)
    assert file.read_bytes() == b"ab"
    with pytest.raises(ValueError, match="expected more than 2 bytes"):
        cut(file, 2)


def test_full_disk_holds_its_size_and_no_more():
    with full_disk(64 * 1024) as folder:
        (folder / "fits").write_bytes(bytes(32 * 1024))
        with pytest.raises(OSError, match="No space left") as caught:
            (folder / "too large").write_bytes(bytes(64 * 1024))
        assert caught.value.errno == errno.ENOSPC
    assert not folder.exists()
