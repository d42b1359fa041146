"""The network interfaces by which hosts reach each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Final

import psutil

GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE: Final = "lo"
# an address of documentation (RFC 5737), which only the default route leads to
OUTSIDE_ADDRESS: Final = "198.51.100.1"
_DISCARD_PORT: Final = 9


def interface_towards(host: str) -> str | None:
    """Return the network interface that reaches `host`, for GLOO_SOCKET_IFNAME; sends nothing.

    A loopback address is reached by the loopback interface. If a name stands for the loopback, as a
    machine's own name does in Debian's /etc/hosts, it is the interface of the default route. None
    if unknown.
    """
    if _is_loopback(host):
        return LOOPBACK_INTERFACE
    for target in (host, OUTSIDE_ADDRESS):
        own = _own_address_towards(target)
        if own and not _is_loopback(own):
            return _interface_with(own)
    return None


@contextmanager
def gloo_interface(host: str) -> Iterator[None]:
    """Let gloo listen where `host` reaches this machine, unless GLOO_SOCKET_IFNAME is set."""
    interface = None if GLOO_INTERFACE in os.environ else interface_towards(host)
    if interface:
        os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        if interface:
            del os.environ[GLOO_INTERFACE]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_address_towards(host: str) -> str | None:
    with suppress(OSError, UnicodeError):  # an unknown host, or no route
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, _DISCARD_PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: only looks up the route
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _interface_with(address: str) -> str | None:
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in found):
            return name
    return None
