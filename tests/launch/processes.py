"""Processes as tests of the launcher see them."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

SOON_SECONDS = 300.0  # on a busy machine; usually much less


def rank():
    """Return the rank of this worker."""
    return int(os.environ["RANK"])


def for_ever():
    """Wait forever, until a signal interrupts."""
    threading.Event().wait()


def end_soon(pids):
    """Return whether all processes end within SOON_SECONDS; zombies have ended."""
    deadline = time.monotonic() + SOON_SECONDS
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def listening(pid):
    """Return the local addresses, in hexadecimal, and ports on which a process listens."""
    links = [
        str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()
    ]
    inodes = {
        link.removeprefix("socket:[").removesuffix("]")
        for link in links
        if link.startswith("socket:")
    }
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {tuple(row[1].split(":")) for row in rows if row[3] == "0A" and row[9] in inodes}


def kernel_state(pid):
    """Return the kernel's letter for the state of a process, None if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _runs(pid):
    return kernel_state(pid) not in {None, "Z"}


def children(pid):
    """Return the process ids of a process's living children."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                pids.add(int(folder.name))
    return pids
