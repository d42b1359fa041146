"""Faults that tests inject: killed workers, damaged files, a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.needs import needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def kill_at(step: int, rank: int) -> Callable[[int], None]:
    """Return what a worker calls with the number of each step: it ends the worker of `rank` at `step` by SIGKILL."""

    def hook(now: int) -> None:
        if now == step and int(os.environ.get("RANK", "0")) == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def flip_byte(path: Path, index: int) -> None:
    """Invert every bit of one byte of a file; `index` may be negative, as for a list."""
    content = bytearray(path.read_bytes())
    content[index] ^= 0xFF
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    """Keep only the first `size` bytes of a file. Raises `ValueError` where it has no more than that."""
    if size >= path.stat().st_size:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes: cutting it to {size} would do no harm"
        )
    os.truncate(path, size)


@contextmanager
def full_disk(size_bytes: int) -> Iterator[Path]:
    """Yield a folder on a file system of its own that is full after `size_bytes`, rounded up to whole pages."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder]
        mounted = subprocess.run(mount, check=False, capture_output=True)
        needs("the right to mount a file system", found=mounted.returncode == 0)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
