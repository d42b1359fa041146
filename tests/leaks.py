"""What a test may leave behind in its process and on its machine: nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 6.0  # a loader process looks every five seconds whether its parent still lives
SHARED_MEMORY = Path("/dev/shm")
# multiprocessing keeps one such process for the life of the program.
KEPT_PROCESS = "multiprocessing.resource_tracker"
# pytest sets the first at each phase of a test, torch._dynamo the second and scikit-learn the
# others when they are imported.
KEPT_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}


class LeakError(Exception):
    """Something was left behind."""


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent dies, so that none goes unseen."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def nothing_left(grace_seconds: float = GRACE_SECONDS) -> Iterator[None]:
    """Raise `LeakError` if the block leaves a process, a thread, a file in shared memory or an environment variable.

    What goes by itself within `grace_seconds` is no leak. Processes that were left are killed.
    """
    children, threads, files, variables = _children(), _threads(), _shared_files(), _variables()
    yield
    deadline = time.monotonic() + grace_seconds
    while True:
        new_children = {
            child: command for child, command in _children().items() if child not in children
        }
        left = [f"process {child}: {command}" for child, command in new_children.items()]
        left += [f"thread {thread.name}" for thread in _threads() - threads]
        left += [
            f"file {file}"
            for file in _shared_files() - files
            if not _mapped_by_another_process(file)
        ]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for child in new_children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    left += [
        f"environment variable {name}"
        for name in sorted({name for name, _ in variables ^ _variables()})
    ]
    if left:
        raise LeakError("left behind: " + "; ".join(left))


def _children() -> dict[int, str]:
    """Return the command lines of this process's living children, by process id."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                command = (folder / "cmdline").read_text().replace("\0", " ")
                if KEPT_PROCESS not in command:
                    children[int(folder.name)] = command
    return children


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _shared_files() -> set[Path]:
    """Return the files in shared memory that this process's user owns."""
    files = set()
    for path in SHARED_MEMORY.glob("*"):
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                files.add(path)
    return files


def _mapped_by_another_process(file: Path) -> bool:
    """Tell whether a file belongs to a test that runs beside this one."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and str(file) in (folder / "maps").read_text():
                return True
    return False


def _variables() -> set[tuple[str, str]]:
    return {(name, value) for name, value in os.environ.items() if name not in KEPT_VARIABLES}
