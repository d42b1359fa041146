from __future__ import annotations

import hashlib
import os

import pytest

from samestep.snapshot import files


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with files.appearing(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def interrupted():
        with files.appearing(path) as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_data_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / "a"
    synced = []
    monkeypatch.setattr(files, "sync", lambda place: synced.append((place.name, path.exists())))
    files.write_whole(path, b"new")
    assert synced == [(f".a.{os.getpid()}.tmp", False), (tmp_path.name, True)]


@pytest.mark.parametrize("size", [0, 1, files.CHUNK_BYTES, files.CHUNK_BYTES + 1])
def test_checksums_cover_the_whole_file(tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "a").write_bytes(content)
    assert files.sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_only_regular_files_have_a_size(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert files.file_size(tmp_path / "a") == 3
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="not a regular file"):
            files.file_size(path)


def test_errors_of_sync_are_not_hidden(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        files.sync(tmp_path)


def test_a_file_system_need_not_sync_directories(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(22, "Invalid argument")

    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    files.sync(tmp_path)
    with pytest.raises(OSError, match="Invalid"):
        files.sync(tmp_path / "a")
