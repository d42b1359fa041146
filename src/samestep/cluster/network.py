"""How this host reaches others: network interfaces, and connections to rank 0's address."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from samestep.cluster.process import ProcessInfo
from samestep.host import is_loopback, peer_credentials

GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE: Final = "lo"
# an address for documentation (RFC 5737), reached only by the default route
OUTSIDE_ADDRESS: Final = "198.51.100.1"
_DISCARD_PORT: Final = 9
PAUSE_SECONDS: Final = 0.01  # between attempts to connect
OVERFLOW_USER: Final = 65534  # of another user namespace
LISTENING: Final = "0A"  # a state in /proc/net/tcp


def interface_towards(host: str) -> str | None:
    """Return the network interface that reaches `host`, for GLOO_SOCKET_IFNAME; sends nothing.

    That is the loopback interface for a loopback address. For a name that resolves to one, such as
    a machine's own name in Debian's /etc/hosts, it is the interface of the default route. None if
    unknown.
    """
    if is_loopback(host):
        return LOOPBACK_INTERFACE
    for target in (host, OUTSIDE_ADDRESS):
        address = _own_address_towards(target)
        if address and not is_loopback(address):
            return _interface_with(address)
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


def gloo_address() -> str:
    """Return this machine's address on the interface that gloo uses, IPv4 if there is one.

    Without GLOO_SOCKET_IFNAME, that is what its name resolves to. Raises `OSError` if there is
    none, or only one that is valid on a single link.
    """
    interface = os.environ.get(GLOO_INTERFACE, "").partition(",")[0]
    addresses = [(entry.family, entry.address) for entry in _addresses().get(interface, ())]
    if not addresses:
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses = [(family, address[0]) for family, *_, address in resolved]
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind, address in addresses:
            if kind == family and not address.startswith("fe80:"):
                return str(address)
    raise OSError(f"the interface {interface!r} has no IP address")


def _own_address_towards(host: str) -> str | None:
    with suppress(OSError, UnicodeError):  # an unknown host, or no route
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, _DISCARD_PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.connect(address)  # a datagram socket only looks up the route
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _interface_with(address: str) -> str | None:
    for name, entries in _addresses().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def _addresses() -> Mapping[str, Sequence[Any]]:
    """Return the addresses of each network interface."""
    import psutil  # takes 9 ms, and most runs on a single host do not need it

    return psutil.net_if_addrs()


def listen_at_master(process: ProcessInfo) -> socket.socket | None:
    """Return rank 0's listening socket, None if the port is taken, perhaps by another rank 0.

    It listens at the master's address, or at all addresses if this host does not have that one:
    behind address translation, or with a name that only this host resolves to a loopback address.
    """
    address = process.address
    local = address if is_loopback(address) else own_address_of(address)
    try:
        both = local is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in (local or "") else socket.AF_INET
        place = (local or "", process.port)
        return socket.create_server(place, family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def connect_to_master(process: ProcessInfo, deadline: float) -> socket.socket:
    """Return a connection to the store's address, once something listens there."""
    while True:
        seconds = max(PAUSE_SECONDS, deadline - time.monotonic())
        try:
            connection = socket.create_connection((process.address, process.port), timeout=seconds)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"nothing listens at MASTER_ADDR={process.address} MASTER_PORT={process.port} "
                    f"({error}): worker 0 did not start, or this is not its address"
                ) from error
            time.sleep(PAUSE_SECONDS)
    rank_zero_is_here = process.rank == process.local_rank
    user = listening_user(*connection.getpeername()[:2]) if rank_zero_is_here else None
    if user not in {None, os.geteuid()}:
        connection.close()
        raise PermissionError(
            f"a program of another user ({user}) listens at MASTER_ADDR={process.address} "
            f"MASTER_PORT={process.port}; choose an unused port"
        )
    return connection


def own_address_of(host: str) -> str | None:
    """Return the address of a host name if this host has it and others can reach it, else None."""
    own_addresses = {entry.address for entries in _addresses().values() for entry in entries}
    with suppress(OSError, UnicodeError):  # a name that is unknown here
        for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            if address[0] in own_addresses and not is_loopback(str(address[0])):
                return str(address[0])
    return None


def listening_user(host: str, port: int) -> int | None:
    """Return the user id of the program that listens at an address of this host, None if unknown.

    The kernel lists the sockets of this network namespace in /proc/net/tcp, with addresses in hex,
    in 4-byte words of its own byte order.
    """
    address = ip_address(host.partition("%")[0])
    user = None
    for fields in _sockets():
        if fields[3] != LISTENING or int(fields[1].partition(":")[2], 16) != port:
            continue
        listening = _endpoint(fields[1])[0]
        if address in {listening, getattr(listening, "ipv4_mapped", None)}:
            user = int(fields[7])
            break
        if listening.is_unspecified:  # another program may listen at the address itself
            user = int(fields[7])
    return None if user == OVERFLOW_USER else user


def peer_user(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection, None if that is not on this host."""
    if connection.family == socket.AF_UNIX:
        return peer_credentials(connection)[1]
    ends = [connection.getpeername(), connection.getsockname()]
    expected = [(_unmapped(ip_address(end[0].partition("%")[0])), end[1]) for end in ends]
    for fields in _sockets():
        if int(fields[1].partition(":")[2], 16) == expected[0][1]:
            endpoints = [
                (_unmapped(address), port) for address, port in map(_endpoint, fields[1:3])
            ]
            if endpoints == expected:
                return None if int(fields[7]) == OVERFLOW_USER else int(fields[7])
    return None


def _endpoint(text: str) -> tuple[Any, int]:
    """Return the address and the port of a socket in the kernel's list."""
    address, _, port = text.partition(":")
    count = len(address) // 8
    words = struct.unpack(f"={count}I", bytes.fromhex(address))
    return ip_address(struct.pack(f"!{count}I", *words)), int(port, 16)


def _unmapped(address: Any) -> Any:
    return getattr(address, "ipv4_mapped", None) or address


def _sockets() -> Iterator[list[str]]:
    """Yield the fields of each TCP socket of this network namespace.

    Listening ones come first. The kernel takes 10 ms to search its tables for the others, so that
    the first reads are short: a caller that has found its socket reads no further.
    """
    for table in ("tcp", "tcp6"):
        with suppress(OSError), Path(f"/proc/net/{table}").open("rb", buffering=0) as file:
            size, rest = 256, b""  # bytes; a line has at most 180
            while data := file.read(size):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    fields = line.decode().split()
                    if fields[0] != "sl":  # the header
                        yield fields
                size = min(2 * size, 1 << 16)
