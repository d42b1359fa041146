"""Faults that tests inject: killed workers, damaged files, a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import needs


def kill_at(step: int, rank: int) -> Callable[[int], None]:
    """Return a function of the step number that kills worker `rank` with SIGKILL at `step`."""

    def hook(now: int) -> None:
        if now == step and int(os.environ.get("RANK", "0")) == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def flip_byte(path: Path, index: int) -> None:
    """Invert every bit of one byte of a file. A negative `index` counts from the end."""
    content = bytearray(path.read_bytes())
    content[index] ^= 0xFF
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    """Truncate a file to its first `size` bytes. Raises `ValueError` if it is not longer."""
    if size >= path.stat().st_size:
        raise ValueError(f"expected more than {size} bytes in {path}, got {path.stat().st_size}")
    os.truncate(path, size)


@contextmanager
def full_disk(size_bytes: int) -> Iterator[Path]:
    """Yield a folder on a new file system of `size_bytes`, rounded up to full pages."""
    needs("mount")
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder]
        mounted = subprocess.run(mount, check=False, capture_output=True)
        needs("permission to mount a file system", found=mounted.returncode == 0)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
