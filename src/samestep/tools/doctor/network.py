"""Network interfaces, and which of them workers on other hosts are reached by."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from samestep.cluster.interfaces import GLOO_INTERFACE as GLOO
from samestep.cluster.interfaces import LOOPBACK_INTERFACE, OUTSIDE_ADDRESS
from samestep.tools.doctor.launchers import has_several_hosts
from samestep.tools.doctor.section import Section, change, good, note

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding
    from samestep.tools.doctor.system import System

NCCL: Final = "NCCL_SOCKET_IFNAME"
INTERFACES: Final = "/sys/class/net"
VIRTUAL: Final = ("docker", "br-", "veth", "virbr", "cni", "flannel", "ifb", "tun", "tap")


@dataclass(frozen=True)
class Interface:
    """A network interface; `megabits` a second, None where its driver does not tell, as those of virtual machines."""

    name: str
    state: str | None
    megabits: int | None
    addresses: Sequence[str]

    @property
    def carries(self) -> bool:
        """Whether other hosts may be reached by it."""
        return self.state == "up" and not self.name.startswith(VIRTUAL)


def examine(case: Case) -> Section:
    """Tell of links to other hosts."""
    system = case.system
    found = interfaces(system)
    facts = {
        "interfaces": [asdict(interface) for interface in found],
        "gloo_takes": towards_others(system),
        "nccl_takes": nccl_takes(
            system, [interface.name for interface in found if interface.state != "down"]
        ),
        GLOO: system.environment.get(GLOO, "not set"),
        NCCL: system.environment.get(NCCL, "not set"),
    }
    return Section("links", facts, list(_judge(system)))


def interfaces(system: System) -> list[Interface]:
    """Return the interfaces of this host."""
    return [
        Interface(
            name=name,
            state=system.text(f"{INTERFACES}/{name}/operstate"),
            megabits=_positive(system.number(f"{INTERFACES}/{name}/speed")),
            addresses=[*_ipv4(system, name), *_ipv6(system, name)],
        )
        for name in system.names(INTERFACES)
    ]


def nccl_takes(system: System, names: Sequence[str]) -> list[str]:
    """Return the interfaces from which NCCL chooses for several hosts: by its variable, or InfiniBand's before others.

    The variable has beginnings of names, whole names after =, and after ^ those that are not to be
    taken. Source: NCCL's documentation of NCCL_SOCKET_IFNAME.
    """
    text = system.environment.get(NCCL, "")
    if wanted := [part for part in text.lstrip("^=").split(",") if part]:
        sign = text[: len(text) - len(text.lstrip("^="))]
        fits = [
            name
            for name in names
            if any(name == part if "=" in sign else name.startswith(part) for part in wanted)
        ]
        return [name for name in names if name not in fits] if "^" in sign else fits
    others = [name for name in names if not name.startswith(("docker", LOOPBACK_INTERFACE))]
    return [name for name in others if name.startswith("ib")] or others or list(names)


def towards_others(system: System) -> str | None:
    """Return the interface by which gloo's connections to other hosts go under samestep, where no variable says so."""
    master = system.environment.get("MASTER_ADDR", OUTSIDE_ADDRESS)
    return (
        system.environment.get(GLOO)
        or system.interface_towards(master)
        or system.interface_towards(OUTSIDE_ADDRESS)
    )


def _judge(system: System) -> Iterator[Finding]:
    found = interfaces(system)
    names = [interface.name for interface in found]
    yield from _judge_gloo(system, names)
    yield from _judge_nccl(system, names)
    taken = next(
        (interface for interface in found if interface.name == towards_others(system)), None
    )
    if taken is None or GLOO in system.environment:
        return
    fastest = max(
        (interface for interface in found if interface.carries),
        key=lambda interface: interface.megabits or 0,
        default=taken,
    )
    if (fastest.megabits or 0) > (taken.megabits or 0) > 0:
        advise = change if has_several_hosts(system) else note
        yield advise(
            f"workers on other hosts are reached by {taken.name} ({_speed(taken)}), and {fastest.name} is faster ({_speed(fastest)}): "
            "gradients would take the slower way.",
            f"{GLOO}={fastest.name} {NCCL}={fastest.name}, if the other hosts are reached by it, too",
        )
    elif taken.name != LOOPBACK_INTERFACE:
        yield good(f"other hosts are reached by {taken.name} ({_speed(taken)})")


def _judge_gloo(system: System, names: Sequence[str]) -> Iterator[Finding]:
    wanted = [name for name in system.environment.get(GLOO, "").split(",") if name]
    missing = [name for name in wanted if name not in names]
    if missing and names:
        yield change(
            f"{GLOO} names {', '.join(missing)}, and this host has {', '.join(names)}: workers of several hosts could not meet.",
            f"unset {GLOO}, or export {GLOO}={_example(system, names)}",
        )
    elif wanted == [LOOPBACK_INTERFACE] and has_several_hosts(system):
        yield change(
            f"{GLOO}={LOOPBACK_INTERFACE} is the loopback, by which no other host is reached, and this run has several.",
            f"unset {GLOO}",
        )


def _judge_nccl(system: System, names: Sequence[str]) -> Iterator[Finding]:
    if names and NCCL in system.environment and not nccl_takes(system, names):
        yield change(
            f"{NCCL}={system.environment[NCCL]} leaves none of {', '.join(names)}: NCCL could not connect GPUs of several hosts.",
            f"unset {NCCL}, or export {NCCL}={_example(system, names)}",
        )


def _example(system: System, names: Sequence[str]) -> str:
    way = system.interface_towards(OUTSIDE_ADDRESS)
    return way if way and way in names else names[0]


def _speed(interface: Interface) -> str:
    return f"{interface.megabits / 1000:g} Gbit/s" if interface.megabits else "speed unknown"


def _positive(number: int | None) -> int | None:
    return number if number is not None and number > 0 else None


def _ipv4(system: System, name: str) -> list[str]:
    """Return the addresses of this host that lie in the networks to which its routes by an interface lead."""
    lines = [line.strip() for line in (system.text("/proc/net/fib_trie") or "").splitlines()]
    own = {
        _ipv4_of(line.removeprefix("|-- "))
        for line, after in pairwise(lines)
        if after == "/32 host LOCAL"
    }
    routes = [line.split() for line in (system.text("/proc/net/route") or "").splitlines()[1:]]
    # its columns
    networks = [
        _network(route[1], route[7]) for route in routes if len(route) > 7 and route[0] == name
    ]
    if name == LOOPBACK_INTERFACE:
        networks = [IPv4Network("127.0.0.0/8")]
    there = {
        address
        for address in own
        if address and any(network and address in network for network in networks)
    }
    return [str(address) for address in sorted(there)]


def _ipv4_of(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(text)
    except ValueError:
        return None


def _network(address: str, mask: str) -> IPv4Network | None:
    """Read a network as /proc/net/route has it, in this machine's order of bytes; None for the default route."""
    try:
        start, width = (
            IPv4Address(int.from_bytes(bytes.fromhex(part), sys.byteorder))
            for part in (address, mask)
        )
        network = IPv4Network(f"{start}/{width}", strict=False)
    except ValueError:
        return None
    return network if network.prefixlen else None


def _ipv6(system: System, name: str) -> list[str]:
    rows = [line.split() for line in (system.text("/proc/net/if_inet6") or "").splitlines()]
    texts = [row[0] for row in rows if len(row) > 1 and row[-1] == name]
    return [str(IPv6Address(int(text, 16))) for text in texts if re.fullmatch("[0-9a-f]{32}", text)]
