"""Over which network interface this machine reaches another."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

ELSEWHERE: Final = "198.51.100.1"  # an address of documentation (RFC 5737), which only the default route leads to
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915  # ioctl of netdevice(7) for the IPv4 address of an interface
_DISCARD_PORT = 9


def interface_towards(host: str) -> str | None:
    """Return the name of the interface by which other hosts and `host` reach this one, as GLOO_SOCKET_IFNAME takes it; nothing is sent.

    It is that of the default route where `host` is this machine by a name that stands for the loopback, as in Debian's /etc/hosts.
    None where it cannot be told.
    """
    for target in (host, ELSEWHERE):
        own = _own_address_towards(target)
        if own and not ip_address(own).is_loopback:
            return _interface_with(own)
    return None


def _own_address_towards(host: str) -> str | None:
    with suppress(OSError, UnicodeError):  # an unknown host, or no way there
        for family, kind, protocol, _, address in socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: looks up the route alone
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _interface_with(address: str) -> str | None:
    return next((name for _, name in socket.if_nameindex() if address in _addresses(name)), None)


def _addresses(name: str) -> list[str]:
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):  # an interface may have none
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        addresses.append(socket.inet_ntoa(answer[20:24]))  # struct ifreq: a name of 16 bytes, then struct sockaddr_in
    with suppress(OSError):  # a system without IPv6 has no such file
        rows = [line.split() for line in IPV6_ADDRESSES.read_text().splitlines()]
        addresses += [str(ip_address(bytes.fromhex(row[0]))) for row in rows if row[-1] == name]
    return addresses
