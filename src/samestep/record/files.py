"""A run's directory: its lock, files and notes, and the chunks that hold its events at a URL.

One run at a time writes there. On one host the kernel decides: rank 0 locks `run.lock` (an open
file description lock, which no other code of the process can release), and the launcher keeps the
file open through restarts. Hosts that share a directory may not see each other's locks, so the file
also names its run, and rank 0 touches it every few seconds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from samestep.errors import RecordError
from samestep.handoff import LauncherState
from samestep.host import kernel_id
from samestep.record.events import cannot_begin
from samestep.storage import make_directory, open_regular, read_regular, write_atomically

NAME: Final = "run.lock"
LARGEST_LOCK: Final = 4096  # bytes
HEARTBEAT_SECONDS: Final = 5.0
EXIT_SECONDS: Final = 2.0  # processes of a killed worker may still be exiting
CLOSE_SECONDS: Final = 5.0  # for the storage to release the file
LOST_SECONDS: Final = 15.0  # without a heartbeat, a run on another host is considered dead
# until all hosts see what one has written: NFS may remember for a minute that a file was not there
SHARE_SECONDS: Final = 75.0
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
        self.is_lost = False  # the file was removed, so another run may have locked a new one
        try:
            make_directory(directory)
            self._file = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise cannot_begin(directory, error) from error
        try:
            if state is None or not state.is_open(self._kept_name):
                self._acquire()
                if state is not None:
                    state.keep_open(self._file, self._kept_name)
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, OSError):
                raise cannot_begin(directory, error) from error
            raise
        # a process that the script forks may outlive the run
        os.register_at_fork(after_in_child=partial(self._close_inherited, os.getpid()))
        self._thread = threading.Thread(target=self._beat, name="hold the directory", daemon=True)
        self._thread.start()

    @property
    def _kept_name(self) -> str:
        """The name by which the launcher keeps this very file open; another one may replace it."""
        status = os.fstat(self._file)
        return f"{self._path} {status.st_dev} {status.st_ino}"

    def _close_inherited(self, parent: int) -> None:
        if os.getppid() == parent and not self._closed.is_set():  # not in a fork of a fork
            os.close(self._file)

    def _acquire(self) -> None:
        deadline = time.monotonic() + EXIT_SECONDS
        while (locked := self._set_lock(fcntl.F_WRLCK)) is False:
            if time.monotonic() > deadline:
                raise self._refusal(self._holder())
            time.sleep(EXIT_SECONDS / 20)
        holder = self._holder()
        # this host's running kernel, which knows all locks of its processes
        boot = kernel_id()
        if holder and not (locked and boot is not None and holder.get("boot") == boot):
            self._wait_for_heartbeat(holder)
        this_process = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(this_process).encode(), 0)
        with suppress(OSError):  # not all file systems can
            os.fsync(self._file)  # other hosts may see what was written only after that

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
            holder = json.loads(os.pread(self._file, LARGEST_LOCK, 0))
        except (OSError, ValueError, RecursionError):
            return {}
        return holder if isinstance(holder, dict) else {}

    def _wait_for_heartbeat(self, holder: dict[str, Any]) -> None:
        """Raise `RecordError` if a run on another host touches the file."""
        before = os.fstat(self._file).st_mtime_ns
        logging.getLogger("samestep").warning(
            "the last run in %s was on host %s and did not end properly; waiting %g s for its "
            "heartbeat",
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
                self.is_lost = not self._is_in_place()
        self._release()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """Raise `RecordError` if the file was removed, as noticed at the last heartbeat."""
        if self.is_lost:
            raise RecordError(
                f"{self._path} was removed or replaced during the run, so another run may write to "
                f"{self._path.parent}, and this one stops. If no other run uses the directory, "
                "start this one again: it resumes"
            )

    def close(self) -> None:
        """Release the directory; no call follows. Storage that hangs is not waited for."""
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logging.getLogger("samestep").warning(
                "the storage of %s did not respond for %g s, so the lock file may remain; if the "
                "next run is refused, remove the file",
                self._path,
                CLOSE_SECONDS,
            )

    def _release(self) -> None:
        if self._state is not None:
            self._state.close_kept(self._kept_name)
        with suppress(OSError):
            os.ftruncate(self._file, 0)
        self._set_lock(fcntl.F_UNLCK)  # other processes may have inherited the file
        os.close(self._file)


def locked_by(directory: Path) -> str:
    """Return the text that names the run that has locked a directory, "" if there is none."""
    with suppress(OSError, UnicodeDecodeError):
        return read_regular(directory / NAME, LARGEST_LOCK).decode()
    return ""


def is_locked_by(directory: Path, text: str, timeout: float) -> bool:
    """Return whether a directory was locked by that run, on any host.

    Waits for at most half of the `timeout` of the workers that wait for this one.
    """
    deadline = time.monotonic() + min(SHARE_SECONDS, timeout / 2)
    while locked_by(directory) != text:
        if time.monotonic() > deadline:
            return False
        time.sleep(SHARE_SECONDS / 1000)
    return True


_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class LocalFiles:
    """Files of a local folder, which need not exist yet, with the methods of `Storage`.

    The folder may be a link, but links below it are not followed, because they may lead out of it.
    Only regular files are read, so that no pipe or device is waited for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders in a folder, and of all else; none if it is missing."""
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in self._in(folder)]
        folders = [name for name, is_folder in entries if is_folder]
        return folders, [name for name, is_folder in entries if not is_folder]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each regular file in a folder; none if it is missing."""
        return {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in self._in(folder)
            if entry.is_file(follow_symlinks=False)
        }

    def size(self, path: str) -> int | None:
        """Return the size of a regular file in bytes, or None if there is no such file.

        Raises `RecordError` for anything else, such as a link or a pipe.
        """
        try:
            with self._open(path) as file:
                return os.fstat(file).st_size
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._read_error(path, error) from error

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file. Raises `RecordError`."""
        try:
            with self._open(path) as file:
                data = b""
                while more := os.pread(file, stop - start - len(data), start + len(data)):
                    data += more  # at once, except from some network file systems
        except (OSError, ValueError) as error:
            raise self._read_error(path, error) from error
        if len(data) != stop - start:
            raise RecordError(
                f"expected {stop - start} bytes at {start} of {self._folder / path}, got "
                f"{len(data)}: a shorter file replaced it"
            )
        return data

    def _in(self, folder: str) -> Iterator[os.DirEntry[str]]:
        try:
            with self._open(folder, is_folder=True) as opened, os.scandir(opened) as entries:
                yield from entries
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._read_error(folder, error) from error

    @contextmanager
    def _open(self, path: str, *, is_folder: bool = False) -> Iterator[int]:
        """Open a file or folder from directory to directory, so that nobody can insert a link."""
        *folders, name = [*path.split("/"), "."] if is_folder else path.split("/")
        parent = os.open(self._folder, _FOLDER)
        try:
            for folder in filter(None, folders):
                outer, parent = parent, os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
                os.close(outer)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            file = (
                os.open(name, flags, dir_fd=parent)
                if is_folder
                else open_regular(name, folder=parent)
            )
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "links are not followed") from error
        finally:
            os.close(parent)
        try:
            yield file
        finally:
            os.close(file)

    @property
    def folder(self) -> Path:
        """The folder, without links in its path."""
        return self._folder.resolve()

    def _read_error(self, path: str, error: OSError | ValueError) -> RecordError:
        reason = getattr(error, "strerror", error)
        return RecordError(f"{self._folder / path} cannot be read: {reason}")


class Notes:
    """The tags and the note of a run, which people write: `notes.json` in its directory.

    A file that is damaged or of a newer format is not replaced, and links are not followed. Methods
    may be called from any thread.
    """

    NAME: Final = "notes.json"
    FORMAT: Final = 1
    LARGEST: Final = 2**20  # bytes, of a newer format too
    LONGEST_NOTE: Final = 10_000
    LONGEST_TAG: Final = 50
    MOST_TAGS: Final = 20

    def __init__(self, directory: Path) -> None:
        self._path = directory / self.NAME
        self._lock = threading.Lock()
        self._cached: tuple[str | None, dict[str, Any]] = None, {}

    def version(self) -> str | None:
        """Return a text that changes with the file, None if there is none."""
        try:
            status = self._path.lstat()
        except OSError:
            return None
        return f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}"

    def read(self) -> dict[str, Any]:
        """Return `tags`, `note` and why they cannot be changed (`locked`), which may be None."""
        content, locked = {}, None
        try:
            content = self._read()
            if not os.access(self._path.parent, os.W_OK):
                locked = "the run's directory is read-only"
        except RecordError as error:
            locked = str(error)
        return {"tags": content.get("tags", []), "note": content.get("note", ""), "locked": locked}

    def write(self, tags: list[str], note: str, version: str | None) -> None:
        """Replace tags and note, and keep other fields. `version` is that of the file to replace.

        Raises `RecordError` if the file was changed since, is damaged or cannot be written, and
        `ValueError` for invalid tags or an invalid note.
        """
        self.check(tags, note)
        with self._lock:
            if version != self.version():
                raise RecordError(
                    f"{self.NAME} was changed in the meantime; copy your text, press Cancel and "
                    "edit again"
                )
            self._refuse_link()
            data = {**self._read(), "format": self.FORMAT, "tags": tags, "note": note}
            try:
                write_atomically(self._path, json.dumps(data, indent=1).encode() + b"\n")
            except OSError as error:
                raise RecordError(f"cannot write {self.NAME}: {error.strerror}") from error

    def _read(self) -> dict[str, Any]:
        version, (cached_version, content) = self.version(), self._cached
        if version is None or version == cached_version:
            return content if version else {}
        self._refuse_link()
        try:
            data = read_regular(self._path, self.LARGEST)
        except OSError as error:
            raise RecordError(f"cannot read {self.NAME}: {error.strerror}") from error
        try:
            content = dict(json.loads(data))
            self.check(content["tags"], content["note"])
            is_newer = content["format"] > self.FORMAT
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            raise RecordError(
                f"{self.NAME} is damaged and was left as it is; fix or remove it: "
                f"{type(error).__name__}: {error}"
            ) from error
        if is_newer:
            raise RecordError(f"{self.NAME} is of a newer format; update samestep to edit it")
        self._cached = version, content
        return content

    def _refuse_link(self) -> None:
        is_file = self._path.is_file() or not self._path.exists()
        if self._path.resolve() != self._path or not is_file:
            raise RecordError(f"{self.NAME} must be a file, not a link or anything else")

    @classmethod
    def check(cls, tags: object, note: object) -> None:
        """Raise `ValueError` unless these are valid tags and a valid note."""
        if not isinstance(note, str) or len(note) > cls.LONGEST_NOTE:
            raise ValueError(f"the note must be a text of at most {cls.LONGEST_NOTE} characters")
        if not isinstance(tags, list) or len(tags) > cls.MOST_TAGS:
            raise ValueError(f"tags must be a list of at most {cls.MOST_TAGS}")
        for tag in tags:
            is_text = isinstance(tag, str) and 0 < len(tag) <= cls.LONGEST_TAG
            if not is_text or not tag.isprintable() or " " in tag or "," in tag:
                expected = f"1 to {cls.LONGEST_TAG} printable characters without spaces and commas"
                raise ValueError(f"a tag must have {expected}, got {ascii(tag)[:80]}")


FOLDER: Final = "record"
LOGS: Final = "logs"  # the folder of what workers print, which the launcher writes
_NAME: Final = re.compile(r"(\d{20})-(\d{20})\.jsonl", re.ASCII)


@dataclass(frozen=True, order=True)
class EventChunk:
    """Bytes [start, end) of a run's events: complete lines in a file."""

    start: int
    end: int

    @property
    def path(self) -> str:
        """The path of the file, relative to the run's folder or URL."""
        return f"{FOLDER}/{self.start:020d}-{self.end:020d}.jsonl"


def find_chunks(sizes: dict[str, int]) -> list[EventChunk]:
    """Return the complete chunks among files, given their sizes by name, sorted."""
    matches = [(match, size) for name, size in sizes.items() if (match := _NAME.fullmatch(name))]
    chunks = [(EventChunk(int(match[1]), int(match[2])), size) for match, size in matches]
    return sorted(chunk for chunk, size in chunks if chunk.end - chunk.start == size > 0)


def chunk_at(offset: int, chunks: Iterable[EventChunk]) -> EventChunk | None:
    """Return the chunk with the byte at `offset` that ends last, or None if there is none."""
    matches = (chunk for chunk in chunks if chunk.start <= offset < chunk.end)
    return max(matches, key=lambda chunk: chunk.end, default=None)


def covered_end(chunks: Iterable[EventChunk]) -> int:
    """Return the offset up to which the chunks contain every byte from the first on."""
    end = 0
    for chunk in sorted(chunks):
        if chunk.start > end:
            break
        end = max(end, chunk.end)
    return end


def redundant_chunks(chunks: Iterable[EventChunk]) -> list[EventChunk]:
    """Return the chunks that lie within another one."""
    redundant, end = [], 0
    for chunk in sorted(set(chunks), key=lambda chunk: (chunk.start, -chunk.end)):
        if chunk.end <= end:
            redundant.append(chunk)
        end = max(end, chunk.end)
    return redundant
