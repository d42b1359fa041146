"""The lock of a run's directory: one run at a time writes there.

On one host the kernel decides: rank 0 locks `run.lock` (an open file description lock, which no
other code of the process can release), and the launcher keeps the file open through restarts. Hosts
that share a directory may not see each other's locks, so the file also names its run, and rank 0
touches it every few seconds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from samestep.errors import RecordError
from samestep.handoff import LauncherState

NAME: Final = "run.lock"
HEARTBEAT_SECONDS: Final = 5.0
EXIT_SECONDS: Final = 2.0  # processes of a killed worker may still be exiting
CLOSE_SECONDS: Final = 5.0  # for the storage to release the file
LOST_SECONDS: Final = 15.0  # without a heartbeat, a run on another host is considered dead
# struct flock of fcntl(2): type, whence, start, length, process ID
_LOCK: Final = struct.Struct("@hhqqi4x")


class DirectoryLock:
    """Locks a run's directory until it is closed, or the launcher and all workers have exited.

    Raises `RecordError` if another run has locked it, or if the directory is not writable. `state`
    is the launcher's, which may still hold the lock of an earlier attempt.
    """

    def __init__(
        self, directory: Path, state: LauncherState | None, timeout: float = math.inf
    ) -> None:
        self._path, self._state = directory / NAME, state
        self._lost_seconds = min(LOST_SECONDS, timeout / 2)  # other workers wait for this one
        self._closed = threading.Event()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordError(
                f"cannot write a record to {directory}: {error.strerror}; choose a writable "
                "directory"
            ) from error
        try:
            if state is None or not state.is_open(str(self._path)):
                self._acquire()
                if state is not None:
                    state.keep_open(self._file, str(self._path))
        except BaseException:
            os.close(self._file)
            raise
        self._thread = threading.Thread(target=self._beat, name="hold the directory", daemon=True)
        self._thread.start()

    def _acquire(self) -> None:
        deadline = time.monotonic() + EXIT_SECONDS
        while (locked := self._set_lock(fcntl.F_WRLCK)) is False:
            if time.monotonic() > deadline:
                raise self._refusal(self._holder())
            time.sleep(EXIT_SECONDS / 20)
        holder = self._holder()
        if holder and not (locked and holder.get("boot") == boot()):
            self._wait_for_heartbeat(holder)
        own = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(own).encode(), 0)

    def _set_lock(self, kind: int) -> bool | None:
        """Return whether that was possible, None if the file system has no locks."""
        try:
            request = _LOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            return False if error.errno in {errno.EAGAIN, errno.EACCES} else None
        return True

    def _holder(self) -> dict[str, Any]:
        """Return what the file says about its run; nothing if that run ended."""
        try:
            found = json.loads(os.pread(self._file, 4096, 0))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _wait_for_heartbeat(self, holder: dict[str, Any]) -> None:
        """Raise `RecordError` if a run on another host touches the file."""
        before = os.fstat(self._file).st_mtime_ns
        logging.getLogger("samestep").warning(
            "the last run in %s was on host %s and did not end properly; waiting %g s for a sign "
            "of life",
            self._path.parent,
            holder.get("host"),
            self._lost_seconds,
        )
        deadline = time.monotonic() + self._lost_seconds
        while time.monotonic() < deadline:
            time.sleep(self._lost_seconds / 30)
            try:
                now = self._path.stat().st_mtime_ns  # asks the server, unlike fstat
            except FileNotFoundError:
                raise RecordError(f"{self._path} was removed; start the run again") from None
            if now != before:
                raise self._refusal(holder)

    def _refusal(self, holder: dict[str, Any]) -> RecordError:
        pid, host, started = (holder.get(name, "?") for name in ("pid", "host", "started"))
        return RecordError(
            f"another run (process {pid} on host {host}, since {started}) writes to "
            f"{self._path.parent}: choose another directory, or wait until that run has ended. If "
            f"it no longer runs, remove {self._path}"
        )

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # of a network file system that is slow to recover
                os.utime(self._file)
        self._release()

    def close(self) -> None:
        """Release the directory; no call follows. Storage that hangs is not waited for."""
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logging.getLogger("samestep").warning(
                "the storage of %s did not respond for %g s, so its lock may stay; if the next run "
                "is refused, remove the file",
                self._path,
                CLOSE_SECONDS,
            )

    def _release(self) -> None:
        if self._state is not None:
            self._state.close_kept()
        with suppress(OSError):
            os.ftruncate(self._file, 0)
        self._set_lock(fcntl.F_UNLCK)  # other processes may have inherited the file
        os.close(self._file)


def boot() -> str:
    """Return an ID of this host's running kernel, which knows all locks of its processes."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
