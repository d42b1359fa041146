"""Simulated hosts and a disk that faults disturb. Both need root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

PREFIX = "ss-chaos"
DEVICE = "cable"
DISK_BYTES = 96 << 20
_numbers = count(1)
_lock = threading.Lock()  # threads make their hosts one after the other


@dataclass(frozen=True)
class Host:
    """A network namespace with its address; without a name, this machine."""

    name: str = ""
    address: str = "127.0.0.1"

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *command] if self.name else [*command]

    def plug(self, *, into: bool) -> None:
        """Connect this host to the network, or disconnect it."""
        _run(f"ip -n {self.name} link set {DEVICE} {'up' if into else 'down'}")


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Yield this machine, or two network namespaces that are connected to each other."""
    if number == 1:
        yield [Host()]
        return
    with ExitStack() as exits:
        with _lock:
            _remove_stale()
            base = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
            pair = [Host(f"{base}-{end}", f"10.213.11.{end}") for end in (1, 2)]
            for host in pair:
                _run(f"ip netns add {host.name}")
                exits.callback(_run, f"ip netns delete {host.name}")
            first, second = pair
            ends = f"netns {first.name} type veth peer name {DEVICE} netns {second.name}"
            _run(f"ip link add {DEVICE} {ends}")
            for host in pair:
                _run(f"ip -n {host.name} address add {host.address}/24 dev {DEVICE}")
                _run(f"ip -n {host.name} link set lo up")
                host.plug(into=True)
        yield pair


def _remove_stale() -> None:
    """Remove the namespaces of earlier runs that were killed."""
    for name, process in re.findall(rf"^({PREFIX}-(\d+)-\S+)", _run("ip netns list"), re.MULTILINE):
        if not Path(f"/proc/{process}").exists():
            _run(f"ip netns delete {name}")


class Disk:
    """A file system in a file, mounted on `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def stall(self) -> None:
        """Let all writers wait, in the kernel, until `recover`."""
        _run(f"fsfreeze --freeze {self.folder}")

    def recover(self) -> None:
        """Let writers continue."""
        _run(f"fsfreeze --unfreeze {self.folder}")

    def fill(self) -> None:
        """Leave no space."""
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.folder).free)
        size = 1 << 16
        with self._filler.open("ab", buffering=0) as file:
            while size:
                try:
                    file.write(b"\1" * size)
                    os.fsync(file.fileno())
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Free the space that `fill` took."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """Yield a new disk, mounted in `folder`; it is unmounted after the block."""
    image, mounted = folder / "disk.img", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    _run(f"mkfs.ext4 -q -m 0 -F {image}")
    _run(f"mount -o loop {image} {mounted}")
    mounted_disk = Disk(mounted)
    try:
        yield mounted_disk
    finally:
        with suppress(subprocess.CalledProcessError):  # it is not frozen
            mounted_disk.recover()
        _run(f"umount --lazy {mounted}")
        image.unlink()


def _run(command: str) -> str:
    done = subprocess.run(command.split(), check=True, capture_output=True, text=True)
    return done.stdout
