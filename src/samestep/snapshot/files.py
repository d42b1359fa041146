"""Files that are whole or not there, and the checksums that tell damaged ones.

A checksum is XXH3 of 128 bits: it finds damage at the speed of memory, but not forgery; a snapshot
is trusted with values only. Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from xxhash import xxh3_128

UNCACHED: Final = getattr(os, "O_DIRECT", 0)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what was written there appears at `path`, whole and durable, when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that never exists half written."""
    with appearing(path) as temporary:
        temporary.write_bytes(data)


def sync(path: Path) -> None:
    """Return when what a file or a directory holds would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems cannot sync directories
        if not (path.is_dir() and error.errno == errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


def file_size(path: Path) -> int:
    """Return the bytes of a regular file. Raises `OSError` for anything else: a pipe would be waited for."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def checksum(data: bytes | memoryview) -> str:
    """Return the hexadecimal checksum of some bytes."""
    return xxh3_128(data).hexdigest()


def write_durably(
    path: Path, data: memoryview, segment_bytes: int, go_on: Callable[[], None]
) -> tuple[str, ...]:
    """Write a file and return the checksums of its segments, once they would survive a loss of power.

    It is written past the page cache where the file system allows that and `data` starts at a page:
    no copy, no new pages, and what training reads stays cached. `go_on` may raise between segments.
    """
    checksums = []
    with path.open("wb", buffering=0) as file:
        _set_uncached(file.fileno(), uncached=True)
        for start in range(0, len(data), segment_bytes):
            go_on()
            segment = data[start : start + segment_bytes]
            checksums.append(checksum(segment))
            while segment:
                segment = segment[_write(file.fileno(), segment) :]
        os.fsync(file.fileno())
    return tuple(checksums)


def _write(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data)
    except OSError as error:
        # Only whole blocks go past the cache: the end of a file does not, nor does any of it where
        # blocks are larger than pages.
        if error.errno != errno.EINVAL or not _set_uncached(descriptor, uncached=False):
            raise
        return os.write(descriptor, data)


def _set_uncached(descriptor: int, *, uncached: bool) -> bool:
    """Let writes pass by the page cache, or not; return whether that is a change. A file system may refuse."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | UNCACHED if uncached else flags & ~UNCACHED
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) != flags


def read_into(descriptor: int, offset: int, places: Iterable[memoryview]) -> str:
    """Fill places with a file's bytes from `offset` on and return their checksum. Raises `OSError` where the file ends early."""
    digest = xxh3_128()
    for place in places:
        rest = place
        while rest:
            count = os.preadv(descriptor, [rest], offset)
            if not count:
                raise OSError(errno.EIO, "the file ends early")
            rest, offset = rest[count:], offset + count
        digest.update(place)
    return digest.hexdigest()
