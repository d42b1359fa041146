"""At which network interface this machine is reached by the other workers' hosts."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

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
