"""Linux: anonymous memory, processes, control-group limits, malloc, terminals; and parsing."""

from __future__ import annotations

import ast
import ctypes
import errno
import gc
import math
import os
import resource
import secrets
import shutil
import signal
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from multiprocessing import process
from pathlib import Path
from types import FrameType
from typing import Final, TextIO

from samestep.errors import ConfigError

RED: Final = 31
YELLOW: Final = 33
GREEN: Final = 32
SIGNALED: Final = 128  # plus its number: the exit status of a process that a signal ended
ECHO_SECONDS: Final = 1.0  # timeout(1) and others send a signal to a process, then to its group

Read = Callable[[str], str | None]

_REFUSED: Final = {errno.EACCES, errno.ENOSYS, errno.EPERM}  # by seccomp profiles


def anonymous_memory(name: str) -> int | None:
    """Open memory that is freed with its last user; return None if unsupported or refused."""
    try:
        return os.memfd_create(name)
    except AttributeError:
        return None
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None


def set_size(file: int, size: int) -> None:
    """Give a file in memory its size. Raises `ConfigError` if the limit of `ulimit -f` is lower."""
    try:
        os.ftruncate(file, size)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        raise ConfigError(
            f"files may have {limit} bytes (ulimit -f), and so may memory that workers share, of "
            f"which samestep needs {size}; run ulimit -f unlimited before"
        ) from error


def anonymous_file(name: str) -> int:
    """Open anonymous memory or, if unavailable, a temporary file without a directory entry."""
    file = anonymous_memory(name)
    if file is None:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    return file


def missing_system_calls() -> list[str]:
    """Return the system calls that shared memory needs and that do not work here."""
    missing = []
    for name, argument in (("memfd_create", "samestep"), ("pidfd_open", os.getpid())):
        try:
            os.close(getattr(os, name)(argument))
        except (AttributeError, OSError):
            missing.append(name)
    return missing


def open_standard_files() -> None:
    """Open closed standard files to /dev/null: output would go to files opened later."""
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:  # stdin, stdout, stderr
        os.set_inheritable(file, True)
    os.close(file)


_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred of unix(7): process, user, group


MAX_FILES: Final = 1 << 16


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the hard limit allows, up to 65,536.

    The usual soft limit of 1,024 is for programs that call select(2), which Python's own modules
    avoid. A worker has a connection to every other worker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def colored(text: str, color: int, stream: TextIO | None, *, is_terminal: bool = False) -> str:
    """Return the text in a color if the stream is a terminal, unless NO_COLOR is set.

    `is_terminal` says that another process prints the stream on one.
    """
    is_wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    with suppress(ValueError):  # closed
        if is_wanted and stream is not None and (is_terminal or stream.isatty()):
            return f"\033[{color}m{text}\033[0m"
    return text


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 worker" or "2 workers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def printable(text: str) -> str:
    """Return text of others for a terminal: control characters, but newlines and tabs, as escapes.

    A name in a record or a directory could otherwise move the cursor, or rewrite earlier lines.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter in "\n\t" or letter.isprintable() else ascii(letter)[1:-1]
        for letter in text
    )


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket, as the kernel reports."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


MAX_SECRET: Final = 4096  # bytes


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached from this machine only."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_secret(path: Path, name: str) -> str:
    """Return the text of a file with a secret, without surrounding white space.

    Only its owner may read it, who must be this user or root. A file of root may also be readable
    by a group, as a Secret that Kubernetes mounts with an `fsGroup`. Raises `ConfigError`, in which
    `name` is the file.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_SECRET).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {error}; expected one line of ASCII") from error
    if not stat.S_ISREG(status.st_mode):  # a pipe, as in --token-file <(command)
        return text
    if status.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(
            f"{name} belongs to another user ({status.st_uid}), who can read and change it; "
            "use a file of yours"
        )
    others = stat.S_IRWXG | stat.S_IRWXO
    if status.st_mode & (others if status.st_uid == os.geteuid() else others & ~stat.S_IRGRP):
        raise ConfigError(f"{name} must be readable only by you; run chmod 600 {path}")
    return text


FOLDER: Final = "SAMESTEP_INTERNAL_FOLDER"
# of the folder's path in bytes: the address of a socket in it has at most 107 (unix(7))
_MAX_PATH: Final = 70
# safe: the folder's name cannot be guessed, and only its owner may access it
_SHORT: Final = "/tmp"  # noqa: S108


@contextmanager
def socket_folder() -> Iterator[Mapping[str, str]]:
    """Yield the variable that names a temporary folder for workers' sockets."""
    name = f"samestep-{secrets.token_hex(8)}"
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder)) > _MAX_PATH:
        folder = Path(_SHORT) / name
    try:
        yield {FOLDER: str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def use_socket_folder() -> None:
    """Use the launcher's folder, if any, for the sockets of this process and its children.

    Otherwise multiprocessing makes one folder per process, and killed processes leave theirs.
    """
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        # multiprocessing has no public setting for it
        current = process.current_process()
        current._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001


SLICE_SECONDS: Final = 1.0  # of a wait that asks a `RunningClock` in between
SUSPENDED_SECONDS: Final = 2.0  # between two looks at the clock: this process did not run


class RunningClock:
    """A monotonic clock without the time in which this process was suspended.

    A frozen container, a suspended job and a laptop with its lid closed stop all workers at once,
    so none of them is late. `now` must be called at least once per `SLICE_SECONDS`.
    """

    def __init__(self) -> None:
        self.resumed_at = -math.inf  # in seconds of `time.monotonic`
        self._suspended, self._last = 0.0, time.monotonic()

    def now(self) -> float:
        """Return seconds that begin with those of `time.monotonic`."""
        now = time.monotonic()
        if now - self._last > SUSPENDED_SECONDS:
            self._suspended += now - self._last
            self.resumed_at = now
        self._last = now
        return now - self._suspended


PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


def end_with_parent(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent `pid` exits or has already exited."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != pid:
        os.kill(os.getpid(), number)


ROOT: Final = "/sys/fs/cgroup"
HYBRID: Final = f"{ROOT}/unified"  # version 2, if version 1 uses the root
UNLIMITED: Final = 1 << 60  # or more: version 1 writes the largest number of whole pages
MEMORY_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")


def read_file(path: str | Path) -> str | None:
    """Return a file's text without surrounding white space, None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def kernel_id(*namespaces: str) -> str | None:
    """Return text that is equal for processes of one running kernel, even in containers.

    With `namespaces`, such as "pid", they are also in the same ones of these. None if unknown.
    """
    try:
        links = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in namespaces]
        return " ".join([BOOT_ID.read_text(encoding="ascii").strip(), *links])
    except OSError:
        return None


def memory_id(first_rank: int) -> str | None:
    """Return text that is equal for workers that can share memory, None if unknown.

    They have the same kernel, namespaces, user, and first rank on their host, which is that of a
    launch. Abstract sockets, process ids and user ids have the same meaning for all of them.
    """
    kernel = kernel_id("net", "pid", "user")
    return None if kernel is None else f"{kernel} {os.geteuid()} {first_rank}"


def available_bytes(read: Read = read_file) -> int | None:
    """Return the bytes available without swapping and within all limits, None if unknown."""
    kilobytes = parse_numbers(read("/proc/meminfo")).get("MemAvailable")
    byte_counts = [None if kilobytes is None else 1024 * kilobytes, memory_left(read)]
    return min((count for count in byte_counts if count is not None), default=None)


def total_bytes(read: Read = read_file) -> int | None:
    """Return the bytes of memory, within its limit, and of swap; None if unknown."""
    kilobytes = parse_numbers(read("/proc/meminfo"))
    byte_counts = [1024 * kilobytes.get("MemTotal", 0) or None, memory_limit(read)]
    memory = min((count for count in byte_counts if count is not None), default=None)
    return None if memory is None else memory + 1024 * kilobytes.get("SwapTotal", 0)


def memory_left(read: Read = read_file) -> int | None:
    """Return the bytes left below the memory limit (file caches count as free), or None."""
    left = []
    for group in _groups(read, "memory"):
        # the totals of version 1 include the groups below
        stat = parse_numbers(read(f"{group}/memory.stat"))
        names = ("anon", "rss", "shmem")
        used = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in names)
        left += [max(0, limit - used) for limit in _limits(read, group, *MEMORY_LIMITS)]
    return min(left, default=None)


def memory_limit(read: Read = read_file) -> int | None:
    """Return the memory limit in bytes, None if unlimited."""
    groups = _groups(read, "memory")
    return min((n for group in groups for n in _limits(read, group, *MEMORY_LIMITS)), default=None)


def cpu_quota(read: Read = read_file) -> float | None:
    """Return the CPU quota in cores, None if unlimited."""
    quotas = []
    for group in _groups(read, "cpu"):
        # "150000 100000", or "max 100000"
        quotas.append((read(f"{group}/cpu.max") or "").split(" "))
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quotas.append([read(f"{group}/{name}") or "" for name in names])
    pairs = [[whole_number(text) for text in quota] for quota in quotas if len(quota) == 2]
    return min((quota / period for quota, period in pairs if quota and period), default=None)


def usable_cores(read: Read = read_file) -> int:
    """Return the number of cores that this process may use, within its affinity and CPU quota."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, int(cpu_quota(read) or allowed)))


def parse_numbers(text: str | None) -> dict[str, int]:
    """Parse text with a name and a number in each line, such as /proc/meminfo."""
    words = (line.replace(":", " ").split() for line in (text or "").splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def whole_number(text: str | None) -> int | None:
    """Parse a number; None for any other text, such as max and -1, which mean no limit."""
    return int(text) if text and text.isdecimal() else None


def _limits(read: Read, group: str, *names: str) -> Iterator[int]:
    for name in names:
        limit = whole_number(read(f"{group}/{name}"))
        if limit is not None and limit < UNLIMITED:
            yield limit


def _groups(read: Read, controller: str) -> Iterator[str]:
    """Yield the directories of this process's groups for a controller, and their parents.

    Some may not exist: a container may see its group as the root, with a path from another
    namespace.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # one may be a link to the other
        trees = {f"{ROOT}/{controllers}", f"{ROOT}/{controller}"} if controllers else {ROOT, HYBRID}
        parts = [part for part in path.split("/") if part]
        for tree in trees:
            yield from ("/".join([tree, *parts[:n]]) for n in range(len(parts), -1, -1))


_TRIM_THRESHOLD: Final = -1  # mallopt's parameters, from <malloc.h>
_MMAP_MAX: Final = -4
# glibc's defaults: bytes, and mappings
_DEFAULTS: Final = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}
_KEEPING: Final = {_TRIM_THRESHOLD: 1 << 30, _MMAP_MAX: 0}  # up to 1 GiB per worker


def keep_freed_memory() -> None:
    """Make malloc reuse freed memory instead of returning it, until `release_freed_memory`.

    Otherwise large tensors are mapped again in every step and the kernel clears all their pages,
    which for a network of 25 million parameters takes longer than its forward pass. Only glibc has
    these settings, and only its main heap keeps tensors above 64 MiB, so nothing changes with other
    C libraries or if a run trains outside the main thread.
    """
    _set_malloc(_KEEPING)


def release_freed_memory() -> None:
    """Restore malloc's defaults, and return free memory to the kernel."""
    _set_malloc(_DEFAULTS)
    trim_memory()


def trim_memory() -> None:
    """Return free memory to the kernel, such as that of parameters that moved."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _set_malloc(values: Mapping[int, int]) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter, value in values.items():
            library.mallopt(parameter, value)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def parse(source: str) -> ast.Module:
    """Return the syntax tree of a module.

    Before 3.11.8, all parsers of CPython 3.11 share a count of their depth. If a collection of
    garbage interrupts one, finalizers and other threads run, of which each that parses (to format
    a traceback, say) changes the count: "AST constructor recursion depth mismatch".
    https://github.com/python/cpython/issues/106905
    """
    with no_garbage_collection():
        return ast.parse(source)  # noqa: TID251


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise Ctrl-C's `KeyboardInterrupt` at the end of the block; a second Ctrl-C does so at once.

    For the import of torch: its C++ code imports modules, too. An exception in one of them aborts
    the process, or is dropped, and training would go on without NumPy.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):  # an ignored signal stays ignored
        yield
        return
    received: list[float] = []  # seconds

    def defer(number: int, frame: FrameType | None) -> None:
        received.append(time.monotonic())
        if received[-1] - received[0] > ECHO_SECONDS:
            handler(number, frame)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        signal.raise_signal(signal.SIGINT)
