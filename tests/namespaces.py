"""Several hosts for tests: network namespaces on one bridge, each with its own address."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.needs import needs

CLONE_NEWNET = 0x40000000  # from <sched.h>


@dataclass(frozen=True)
class Host:
    """A network namespace, with its `address` on the network interface `device`."""

    name: str
    address: str
    device: str

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *command]

    def enter(self) -> None:
        """Move the calling thread, and all processes it starts from now on, to this host."""
        file = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.name}")
        finally:
            os.close(file)

    def plug(self, *, into: bool) -> None:
        """Connect this host to the network, or disconnect it."""
        _ip(f"-n {self.name} link set {self.device} {'up' if into else 'down'}")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Yield hosts that reach each other. All their processes must exit before the block ends."""
    needs("ip")
    needs("nsenter")
    # Each pytest process has its own network. A device's name has at most 15 characters.
    network = f"ss{os.getpid()}"
    with ExitStack() as exits:
        bridge = f"{network}-net"
        made = _make_namespace(bridge, exits)
        needs("permission to make network namespaces", is_present=made)
        _ip(f"-n {bridge} link add bridge type bridge")
        _ip(f"-n {bridge} link set bridge up")
        yield [
            _make_host(f"{network}-{number}", f"10.213.9.{number}", bridge, exits)
            for number in range(1, count + 1)
        ]


def _make_host(name: str, address: str, bridge: str, exits: ExitStack) -> Host:
    host = Host(name, address, "cable")
    _make_namespace(name, exits)
    _ip(f"-n {name} link add {host.device} type veth peer name {name} netns {bridge}")
    _ip(f"-n {name} address add {address}/24 dev {host.device}")
    _ip(f"-n {name} link set lo up")
    host.plug(into=True)
    _ip(f"-n {bridge} link set {name} master bridge up")
    return host


def _make_namespace(name: str, exits: ExitStack) -> bool:
    """Make a namespace that is deleted when `exits` closes; return whether that was permitted."""
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    if made.returncode == 0:
        exits.callback(_ip, f"netns delete {name}")
    return made.returncode == 0


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
