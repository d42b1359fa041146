from __future__ import annotations

import errno
import fcntl
import mmap
import os

import pytest

from samestep import storage
from samestep.snapshot import files


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with storage.atomic_path(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def interrupted():
        with storage.atomic_path(path) as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_data_is_synced_before_the_rename(tmp_path, monkeypatch):
    path = tmp_path / "a"
    synced = []
    monkeypatch.setattr(storage, "sync", lambda target: synced.append((target.name, path.exists())))
    storage.write_atomically(path, b"new")
    assert synced == [(f".a.{os.getpid()}.tmp", False), (tmp_path.name, True)]


def test_a_checksum_is_xxh3_of_128_bits():
    # the value of every implementation
    assert files.checksum(b"") == "99aa06d3014798d86001c324468d497f"


def pages(content: bytes) -> memoryview:
    """Return content in memory that starts at a page, as uncached writes need it."""
    memory = mmap.mmap(-1, max(len(content), 1))
    memory[: len(content)] = content
    return memoryview(memory)[: len(content)]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4096, 8191, 3 * 4096 + 5])
@pytest.mark.parametrize("segment_bytes", [4096, 8192, 1000])
def test_write_durably_returns_the_checksums_of_segments(
    tmp_path, monkeypatch, size, segment_bytes, cached
):
    if cached:
        monkeypatch.setattr(files, "UNCACHED", 0)
    content = os.urandom(size)
    asked = []
    checksums = files.write_durably(
        tmp_path / "a", pages(content), segment_bytes, lambda: asked.append(1)
    )
    assert (tmp_path / "a").read_bytes() == content
    segments = [content[start : start + segment_bytes] for start in range(0, size, segment_bytes)]
    assert list(checksums) == [files.checksum(segment) for segment in segments]
    assert len(asked) == len(segments)


def test_unaligned_memory_is_written(tmp_path):
    content = os.urandom(3 * 4096)
    files.write_durably(tmp_path / "a", pages(b"x" + content)[1:], 4096, lambda: None)
    assert (tmp_path / "a").read_bytes() == content


def test_only_the_end_of_a_file_uses_the_page_cache(tmp_path, monkeypatch):
    """Simulate a file system with uncached writes of complete pages."""
    flags, written = [os.O_WRONLY], []

    def control(_: int, command: int, *wanted: int) -> int:
        flags[:] = wanted if command == fcntl.F_SETFL else flags
        return flags[0]

    def write(_: int, data: memoryview) -> int:
        uncached = bool(flags[0] & files.UNCACHED)
        if uncached and len(data) % mmap.PAGESIZE:
            raise OSError(errno.EINVAL, "Invalid argument")
        written.append((len(data), uncached))
        return len(data)

    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "write", write)
    files.write_durably(
        tmp_path / "a", pages(bytes(5 * mmap.PAGESIZE + 7)), 2 * mmap.PAGESIZE, lambda: None
    )
    assert written == [
        (2 * mmap.PAGESIZE, True),
        (2 * mmap.PAGESIZE, True),
        (mmap.PAGESIZE + 7, False),
    ]


def test_a_file_system_may_refuse_uncached_writes(tmp_path, monkeypatch):
    def refuse(descriptor, command, *flags, asked=fcntl.fcntl):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return asked(descriptor, command, *flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    files.write_durably(tmp_path / "a", pages(b"abc"), 4096, lambda: None)
    assert (tmp_path / "a").read_bytes() == b"abc"


def test_short_writes_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "write", lambda descriptor, data, write=os.write: write(descriptor, data[:3])
    )
    files.write_durably(tmp_path / "a", pages(b"abcdefgh"), 5, lambda: None)
    assert (tmp_path / "a").read_bytes() == b"abcdefgh"


def test_other_write_errors_are_raised(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_durably(tmp_path / "a", pages(b"abc"), 4096, lambda: None)


def test_buffers_are_filled_in_order_from_an_offset(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "preadv", lambda file, views, offset, read=os.preadv: read(file, [views[0][:2]], offset)
    )
    (tmp_path / "a").write_bytes(b"0123456789")
    buffers = [bytearray(3), bytearray(), bytearray(4)]
    with (tmp_path / "a").open("rb") as file:
        assert files.read_into(file.fileno(), 2, map(memoryview, buffers)) == files.checksum(
            b"2345678"
        )
        assert buffers == [b"234", b"", b"5678"]
        with pytest.raises(OSError, match="ends early"):
            files.read_into(file.fileno(), 8, [memoryview(bytearray(3))])


def test_only_regular_files_have_a_size(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert files.file_size(tmp_path / "a") == 3
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="not a regular file"):
            files.file_size(path)


def test_sync_errors_are_raised(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        storage.sync(tmp_path)


def test_a_file_system_without_directory_sync_is_supported(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(22, "Invalid argument")

    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    storage.sync(tmp_path)
    with pytest.raises(OSError, match="Invalid"):
        storage.sync(tmp_path / "a")
