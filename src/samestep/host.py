"""What a launcher's files need before workers are forked, so that none goes astray and none stays behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import secrets
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from multiprocessing import process
from pathlib import Path
from typing import Final

Read = Callable[[str], str | None]

FOLDER: Final = "SAMESTEP_INTERNAL_FOLDER"
_REFUSED: Final = {errno.EACCES, errno.ENOSYS, errno.EPERM}  # by seccomp profiles
_STANDARD_FILES: Final = 3  # stdin, stdout and stderr
# bytes of a folder's path, so that the address of a socket in it has no more than the 107 of
# unix(7)
_LONGEST: Final = 70
# what is made there has a name that cannot be guessed, and is its owner's alone
_SHORT: Final = "/tmp"  # noqa: S108


def unnamed_memory(name: str) -> int | None:
    """Open memory that the kernel frees however its users end; None where the kernel or this Python has none, or a sandbox refuses it."""
    try:
        return os.memfd_create(name)
    except AttributeError:
        return None
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None


def unnamed_file(name: str) -> int:
    """Open such memory or, where there is none, a temporary file that is in no directory any more."""
    file = unnamed_memory(name)
    if file is None:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    return file


def lacking_calls() -> list[str]:
    """Return which of the kernel's calls that workers need to share memory do not work here."""
    needed: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("samestep"),
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    }
    return [name for name, call in needed.items() if not _opens(call)]


def _opens(call: Callable[[], int]) -> bool:
    try:
        os.close(call())
    except (AttributeError, OSError):
        return False
    return True


def open_standard_files() -> None:
    """Let closed standard files be open to nothing: the next file opened would take their place, and be printed to by workers."""
    while (file := os.open(os.devnull, os.O_RDWR)) < _STANDARD_FILES:
        os.set_inheritable(file, True)
    os.close(file)


@contextmanager
def one_folder() -> Iterator[Mapping[str, str]]:
    """Yield the variable that names workers a folder, which the first of them to use it makes, and which goes at the end of the block."""
    name = f"samestep-{secrets.token_hex(8)}"
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder)) > _LONGEST:
        folder = Path(_SHORT) / name
    try:
        yield {FOLDER: str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def use_one_folder() -> None:
    """Have the sockets of this process and those that it starts put into the launcher's folder, where there is one.

    By itself multiprocessing makes a folder a process, and those of killed processes stay.
    """
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        # there is no other way
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001


PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


def end_with_parent(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent `pid` is gone, which may be already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != pid:
        os.kill(os.getpid(), number)


ROOT: Final = "/sys/fs/cgroup"
HYBRID: Final = f"{ROOT}/unified"  # of version 2, where version 1 has the root
MOST: Final = 1 << 60  # version 1 writes no limit as the largest number of whole pages


def read_file(path: str | Path) -> str | None:
    """Return what a file holds, without white space around it."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def available_bytes(read: Read = read_file) -> int | None:
    """Return how much memory can be had without swapping and within all limits; None where the system does not say."""
    of_host = numbers(read("/proc/meminfo")).get("MemAvailable")
    found = [None if of_host is None else 1024 * of_host, memory_left(read)]
    return min((count for count in found if count is not None), default=None)


def memory_left(read: Read = read_file) -> int | None:
    """Return how many bytes of the memory limit are left: what caches files can be had. None where there is no limit."""
    left = []
    for group in _groups(read, "memory"):
        # in version 1 the total has what groups below use, too
        counted = numbers(read(f"{group}/memory.stat"))
        used = sum(
            counted.get(f"total_{name}", counted.get(name, 0)) for name in ("anon", "rss", "shmem")
        )
        left += [
            max(0, limit - used)
            for limit in _limits(read, group, "memory.max", "memory.limit_in_bytes")
        ]
    return min(left, default=None)


def memory_limit(read: Read = read_file) -> int | None:
    """Return how many bytes of memory there may be, None where there is no limit."""
    groups = _groups(read, "memory")
    return min(
        (
            limit
            for group in groups
            for limit in _limits(read, group, "memory.max", "memory.limit_in_bytes")
        ),
        default=None,
    )


def process_limit(read: Read = read_file) -> int | None:
    """Return how many processes and threads there may be, None where there is no limit."""
    return min(
        (limit for group in _groups(read, "pids") for limit in _limits(read, group, "pids.max")),
        default=None,
    )


def cpu_quota(read: Read = read_file) -> float | None:
    """Return how many cores' time there is, None where there is no quota."""
    quotas = []
    for group in _groups(read, "cpu"):
        # "150000 100000", or "max 100000"
        allowed, _, period = (read(f"{group}/cpu.max") or "").partition(" ")
        quotas.append((_number(allowed), _number(period)))
        quotas.append(
            (
                _number(read(f"{group}/cpu.cfs_quota_us")),
                _number(read(f"{group}/cpu.cfs_period_us")),
            )
        )
    return min((allowed / period for allowed, period in quotas if allowed and period), default=None)


def numbers(text: str | None) -> dict[str, int]:
    """Return the numbers of a text that has a name and a number in each line, as /proc/meminfo."""
    words = (line.replace(":", " ").split() for line in (text or "").splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def _number(text: str | None) -> int | None:
    """Return a number; None for a word such as max, and for the -1 that is none."""
    return int(text) if text and text.isdecimal() else None


def _limits(read: Read, group: str, *names: str) -> Iterator[int]:
    for name in names:
        limit = _number(read(f"{group}/{name}"))
        if limit is not None and limit < MOST:
            yield limit


def _groups(read: Read, controller: str) -> Iterator[str]:
    """Yield the directories of the groups this process is in, for a controller, each with all above it.

    A container may see its own group as the root, and the path of another name space; so paths that
    are not there are harmless.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # one is a link to the other
        trees = {f"{ROOT}/{controllers}", f"{ROOT}/{controller}"} if controllers else {ROOT, HYBRID}
        parts = [part for part in path.split("/") if part]
        yield from (
            "/".join([tree, *parts[:count]])
            for tree in trees
            for count in range(len(parts), -1, -1)
        )


VARIABLE: Final = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE: Final = "lo"
# an address of documentation (RFC 5737), which only the default route leads to
ELSEWHERE: Final = "198.51.100.1"
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915  # ioctl of netdevice(7) for the IPv4 address of an interface
_DISCARD_PORT = 9


def interface_towards(host: str) -> str | None:
    """Return the name of the interface by which `host`, where workers meet, is reached, as GLOO_SOCKET_IFNAME takes it; nothing is sent.

    An address of the loopback is reached by the loopback alone. Where another name stands for that,
    as a machine's own does in Debian's /etc/hosts, it is the interface of the default route. None
    where it cannot be told.
    """
    if _is_loopback(host):
        return LOOPBACK_INTERFACE
    for target in (host, ELSEWHERE):
        own = _own_address_towards(target)
        if own and not _is_loopback(own):
            return _interface_with(own)
    return None


@contextmanager
def reached_from(host: str) -> Iterator[None]:
    """Let gloo listen, in the block, where `host` reaches this machine, not where the machine's own name points to.

    Where GLOO_SOCKET_IFNAME is set already, it stays.
    """
    interface = None if VARIABLE in os.environ else interface_towards(host)
    if interface:
        os.environ[VARIABLE] = interface
    try:
        yield
    finally:
        if interface:
            del os.environ[VARIABLE]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_address_towards(host: str) -> str | None:
    with suppress(OSError, UnicodeError):  # an unknown host, or no way there
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, _DISCARD_PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: looks up the route alone
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _interface_with(address: str) -> str | None:
    return next((name for _, name in socket.if_nameindex() if address in _addresses(name)), None)


def _addresses(name: str) -> list[str]:
    addresses = []
    # an interface may have none
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        # struct ifreq: a name of 16 bytes, then struct sockaddr_in
        addresses.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # a system without IPv6 has no such file
        rows = [line.split() for line in IPV6_ADDRESSES.read_text().splitlines()]
        addresses += [str(ip_address(bytes.fromhex(row[0]))) for row in rows if row[-1] == name]
    return addresses


TRIM_THRESHOLD: Final = -1  # mallopt's parameters, from <malloc.h>
MMAP_MAX: Final = -4
# glibc's defaults: bytes, and mappings
USUAL: Final = {TRIM_THRESHOLD: 128 * 1024, MMAP_MAX: 65536}
KEPT: Final = {TRIM_THRESHOLD: 1 << 30, MMAP_MAX: 0}  # up to 1 GiB a worker


def keep_freed_memory() -> None:
    """Let `free` keep what a step freed, and `malloc` reuse it, until `keep_no_more`.

    Large tensors would otherwise be mapped afresh in every step, and the kernel clears each of
    their pages: for a network of 25 million parameters that takes longer than its forward pass.
    Only glibc has these settings, and only its main heap keeps tensors above 64 MiB: nothing
    changes elsewhere, nor for a run that trains in another thread than the first.
    """
    _set(KEPT)


def return_freed_memory() -> None:
    """Give the kernel what is free now, such as memory that parameters have moved out of."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def keep_no_more() -> None:
    """Put the C library back as it was, and give the kernel what is free."""
    _set(USUAL)
    return_freed_memory()


def _set(values: dict[int, int]) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter, value in values.items():
            library.mallopt(parameter, value)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep garbage where it is for a block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
