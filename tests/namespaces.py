"""Hosts for tests: network namespaces on one bridge, each with an address of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.needs import needs

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE_NEWNET = 0x40000000  # from <sched.h>


@dataclass(frozen=True)
class Host:
    """A network namespace: `device` is its end of the cable to the others, where it has `address`."""

    name: str
    address: str
    device: str

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *command]

    def enter(self) -> None:
        """Move the calling thread, and what it starts from now on, to this host: so does a process that has just been forked."""
        file = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"{self.name} could not be entered")
        finally:
            os.close(file)

    def plug(self, *, into: bool) -> None:
        """Plug this host's cable in, or pull it."""
        _ip("-n", self.name, "link", "set", self.device, "up" if into else "down")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Yield so many hosts that reach each other; what runs on them must have ended when the block does. Needs root and iproute2."""
    needs("ip")
    # pytest's processes have hosts at the same time; a device's name has 15 characters at most
    network = f"ss{os.getpid()}"
    with ExitStack() as exits:
        bridge = f"{network}-net"
        made = _namespace(bridge, exits)
        needs("the right to make network namespaces", found=made)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        yield [
            _host(f"{network}-{number}", f"10.213.9.{number}", bridge, exits)
            for number in range(1, count + 1)
        ]


def _host(name: str, address: str, bridge: str, exits: ExitStack) -> Host:
    host = Host(name, address, "cable")
    _namespace(name, exits)
    _ip(
        "-n",
        name,
        "link",
        "add",
        host.device,
        "type",
        "veth",
        "peer",
        "name",
        name,
        "netns",
        bridge,
    )
    _ip("-n", name, "address", "add", f"{address}/24", "dev", host.device)
    _ip("-n", name, "link", "set", "lo", "up")
    host.plug(into=True)
    _ip("-n", bridge, "link", "set", name, "master", "bridge", "up")
    return host


def _namespace(name: str, exits: ExitStack) -> bool:
    """Make a namespace, with all that will be in it, for as long as `exits` is open; return whether that was allowed."""
    made = (
        subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode
        == 0
    )
    if made:
        exits.callback(_ip, "netns", "delete", name)
    return made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
