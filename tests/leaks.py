"""Detect what a test leaves behind: processes, threads, shared memory, variables, constants."""

from __future__ import annotations

import ctypes
import operator
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from tests.python import running

PR_SET_CHILD_SUBREAPER = 36  # from <sys/prctl.h>
# Costs time only in a test that fails. A loader process checks every 5 s whether its parent exited.
GRACE_SECONDS = 30.0
SHARED_MEMORY = Path("/dev/shm")
THREADS = Path("/proc/self/task")
# multiprocessing starts one such process and never stops it.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
# pytest sets the first in each phase of a test, torch._dynamo the second and scikit-learn the
# others when they are imported.
IGNORED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}

# of each module, the names of constants and their values
Constants = Mapping[str, tuple[Sequence[str], Sequence[object]]]


class LeakError(Exception):
    """A test left something behind."""


def adopt_orphans() -> None:
    """Make this process the parent of every orphaned descendant, so that all of them are found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def nothing_left(grace_seconds: float = GRACE_SECONDS) -> Iterator[None]:
    """Raise `LeakError` if the block leaves something behind that was not there before.

    Processes, threads and files in shared memory may disappear within `grace_seconds`. Processes
    that remain are killed.
    """
    children, threads, files, variables = _children(), _threads(), shared_files(), _variables()
    constants = _constants()
    yield
    deadline = time.monotonic() + grace_seconds
    while True:
        new_children = {pid: name for pid, name in _children().items() if pid not in children}
        left = [f"process {pid}: {command}" for pid, command in new_children.items()]
        left += [f"thread {thread.name}" for thread in _threads() - threads]
        new_files = shared_files() - files
        left += [f"file {file}" for file in new_files if not _is_mapped_elsewhere(file)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for pid in new_children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    changed = {name for name, _ in variables ^ _variables()}
    left += [f"environment variable {name}" for name in sorted(changed)]
    left += [f"constant {name}" for name in _changed(constants)]
    if left:
        raise LeakError("left behind: " + "; ".join(left))


def _constants() -> Constants:
    """Return the constants of the imported modules of samestep, by module and name."""
    constants = _constants_of(len(sys.modules))
    if _changed(constants):
        _constants_of.cache_clear()
        constants = _constants_of(len(sys.modules))
    return constants


@lru_cache(1)  # looking at 6,000 modules writes to their memory, which forks share
def _constants_of(_modules: int) -> Constants:
    """Return the constants while as many modules are imported."""
    constants = {}
    for name, module in [*sys.modules.items()]:
        if name.startswith("samestep."):
            values = {name: value for name, value in vars(module).items() if name.isupper()}
            constants[name] = ([*values], [*values.values()])
    return constants


def _changed(constants: Constants) -> list[str]:
    """Return the full names of the constants that have other values now.

    Each test compares thousands, so Python's own loops do it; only what changed is looked at here.
    """
    changed = []
    for module, (names, values) in constants.items():
        if module in sys.modules:
            now = [*map(vars(sys.modules[module]).get, names, values)]
            if not all(map(operator.is_, now, values)):
                rows = zip(names, now, values, strict=True)
                changed += [f"{module}.{name}" for name, new, old in rows if new is not old]
    return changed


def _children() -> dict[int, str]:
    """Return the command lines of this process's living children, by process id."""
    children = {}
    for folder in _folders_of_children():
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                command = (folder / "cmdline").read_text().replace("\0", " ")
                if RESOURCE_TRACKER not in command:
                    children[int(folder.name)] = command
    return {**children, **running()}


def _folders_of_children() -> list[Path]:
    """Return the folders of this process's children in /proc, or of all if Linux does not tell."""
    try:
        numbers = [
            number
            for thread in THREADS.iterdir()
            for number in (thread / "children").read_text().split()
        ]
    except OSError:  # also if a thread ends meanwhile, which leaves its children to another one
        return [*Path("/proc").glob("[0-9]*")]
    return [Path("/proc", number) for number in numbers]


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def shared_files() -> set[Path]:
    """Return the files in shared memory that belong to this user.

    torch unlinks its files as soon as it has opened them. A process that is killed in between
    leaves one, which no code of ours can prevent: such files are deleted. Temporary files are those
    of other programs.
    """
    files = set()
    for path in SHARED_MEMORY.glob("*"):
        if path.name.startswith("tmp"):
            continue
        with suppress(FileNotFoundError):
            creator = re.match(r"torch_(\d+)_", path.name)
            if path.stat().st_uid == os.getuid():
                if creator and not Path("/proc", creator[1]).exists():
                    path.unlink()
                else:
                    files.add(path)
    return files


def _is_mapped_elsewhere(file: Path) -> bool:
    """Return whether a file belongs to a test that runs in another process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and str(file) in (folder / "maps").read_text():
                return True
    return False


def _variables() -> set[tuple[str, str]]:
    return {(name, value) for name, value in os.environ.items() if name not in IGNORED_VARIABLES}
