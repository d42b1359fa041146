"""Faults that tests inject: killed workers, damaged files, a full or stalled disk."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.needs import needs


def kill_at(step: int, rank: int, after: Path | None = None) -> Callable[[int], None]:
    """Return a function of the step number that kills worker `rank` with SIGKILL at `step`.

    It waits for the file `after`, such as the manifest of a snapshot.
    """

    def hook(now: int) -> None:
        if now == step and int(os.environ.get("RANK", "0")) == rank:
            while after is not None and not after.exists():
                time.sleep(0.01)
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
def stalling_disk() -> Iterator[tuple[Path, Callable[[], None], Callable[[], None]]]:
    """Yield a folder on a new file system, and functions that stall its disk and end that.

    Writers then wait in the kernel, where SIGKILL does not end them.
    """
    needs("mkfs.ext4")
    needs("fsfreeze")
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as image:
        image.truncate(1 << 26)
        subprocess.run(["mkfs.ext4", "-q", "-F", image.name], check=True)
        mount = ["mount", "-o", "loop", image.name, folder]
        mounted = subprocess.run(mount, check=False, capture_output=True)
        needs("permission to mount a file system", is_present=mounted.returncode == 0)

        def freeze(option: str) -> None:
            subprocess.run(["fsfreeze", option, folder], check=True)

        try:
            yield Path(folder), partial(freeze, "--freeze"), partial(freeze, "--unfreeze")
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", folder], check=False, capture_output=True)
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full_disk(size_bytes: int) -> Iterator[Path]:
    """Yield a folder on a new file system of `size_bytes`, rounded up to full pages."""
    needs("mount")
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder]
        mounted = subprocess.run(mount, check=False, capture_output=True)
        needs("permission to mount a file system", is_present=mounted.returncode == 0)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
