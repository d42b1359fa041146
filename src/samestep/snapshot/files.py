"""Files that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK_BYTES = 2**23


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
        if not (path.is_dir() and error.errno == errno.EINVAL):  # some file systems cannot sync directories
            raise
    finally:
        os.close(descriptor)


def file_size(path: Path) -> int:
    """Return the bytes of a regular file. Raises `OSError` for anything else: a pipe would be waited for."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
