"""A launcher's connection to the coordinator of a run on several hosts."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from samestep.cluster import interface_towards
from samestep.comm.link import HELLO_SECONDS, Link, write_address
from samestep.config import Config
from samestep.errors import ConfigError, LaunchError, WorldError
from samestep.launch.attempt import ElasticPolicy, Message
from samestep.launch.cluster_spec import ClusterSpec
from samestep.launch.coordinator import HEARTBEAT_SECONDS, CoordinatorConfig, coordinate
from samestep.launch.membership import JOIN_SECONDS, LOST_SECONDS
from samestep.launch.worker import FORK

RETRY_SECONDS: Final = 0.2
# A host without messages ends its workers before the other hosts treat it as lost and continue.
SILENCE_SECONDS: Final = LOST_SECONDS - HEARTBEAT_SECONDS
END_SECONDS: Final = 10.0  # for the other hosts to receive the end


class CoordinatorClient:
    """The connection of one host's launcher to the coordinator.

    Attributes: `leads` (bool): the coordinator runs on this host. `is_over` (bool): the run has
    ended on all hosts. `address`: host and port of the coordinator. `files`: open files that become
    readable when an order arrives.
    """

    def __init__(self, link: Link, name: str, *, leads: bool) -> None:
        self.leads, self.is_over = leads, False
        self.address, self.files = link.address, [link.fileno()]
        self._link, self._name = link, name
        self._heartbeat_at, self._reported_begin = 0.0, False
        self._received_at = time.monotonic()

    def environment(self, attempt: int) -> dict[str, str]:
        """Return the variables that the workers of an attempt need to find each other."""
        from samestep.comm.store import store_variables  # needs torch

        host, port = self.address
        interface = "lo" if ipaddress.ip_address(host).is_loopback else interface_towards(host)
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        sockets = {name: interface for name in names if interface and name not in os.environ}
        store = store_variables(self.address, attempt)
        return {"MASTER_ADDR": host, "MASTER_PORT": str(port), **sockets, **store}

    def report(self, what: str, **fields: Any) -> None:
        """Report an event on this host. Raises `LaunchError` if the coordinator is gone."""
        try:
            self._link.send({"report": what, **fields})
        except OSError as error:
            raise self._lost(str(error)) from error

    def orders(self, step: int | None) -> list[Message]:
        """Return the next orders, given the number of completed steps.

        Sends a heartbeat when it is due. Raises `LaunchError` if the coordinator is gone.
        """
        now = time.monotonic()
        has_begun = step is not None
        # the coordinator restarts workers only after the run has begun
        if now >= self._heartbeat_at or has_begun != self._reported_begin:
            self._heartbeat_at, self._reported_begin = now + HEARTBEAT_SECONDS, has_begun
            self.report("heartbeat", step=step)
        try:
            orders = self._link.poll()
        except OSError as error:
            raise self._lost(str(error)) from error
        if orders:
            self._received_at = now
        elif now - self._received_at > SILENCE_SECONDS:
            raise self._lost(f"no message for {SILENCE_SECONDS:g} s")
        self.is_over = self.is_over or any(order["order"] == "end" for order in orders)
        return [order for order in orders if order["order"] != "heartbeat"]

    def _lost(self, reason: str) -> LaunchError:
        return LaunchError(
            f"host {self._name} lost the connection to the first host at "
            f"{write_address(*self.address)} and stops its workers: {reason}; "
            "look for an error on the first host"
        )


@contextmanager
def join_cluster(spec: ClusterSpec, workers: int, config: Config) -> Iterator[CoordinatorClient]:
    """Join the other hosts; start the coordinator if the master's address is this host's.

    Call it before this process has threads, because it forks. Raises `ConfigError` if the address
    cannot be used, or lanes are missing while hosts may join and leave; `LaunchError` if the first
    host does not respond or refuses this one.
    """
    nodes = spec.nodes
    if nodes.min_nodes < nodes.max_nodes and config.lanes is None:
        raise ConfigError(
            f"--nodes {nodes} requires --lanes, because the result depends on them; "
            "set --lanes to the largest number of workers that the run will ever have"
        )
    # bits depend on the version of torch
    settings = {"--nodes": str(nodes)} | {name: _version(name) for name in ("samestep", "torch")}
    listener = _listen(spec.master)
    coordinator = client = None
    try:
        if listener is not None:
            limits = config.lanes, config.max_restarts, config.grace_period
            policy = ElasticPolicy(nodes.min_nodes, nodes.max_nodes, *limits)
            arguments = CoordinatorConfig(spec.token, policy, settings), listener, os.getpid()
            coordinator = FORK.Process(target=coordinate, args=arguments, name="coordinator")
            coordinator.start()
            listener.close()
        with closing(_connect(spec)) as link:
            hello = {"workers": workers, "leads": listener is not None, "settings": settings}
            client = _join(link, hello)
            yield client
    finally:
        if coordinator is not None:
            if client is not None and client.is_over:
                coordinator.join(END_SECONDS)
            coordinator.kill()
            coordinator.join()
            coordinator.close()


def _listen(master: tuple[str, int]) -> socket.socket | None:
    """Listen at the master's address; return None if it is not this host's, or is in use."""
    host, port = master
    name = f"--master {write_address(host, port)}"
    addresses: list[Any] = []
    with suppress(socket.gaierror):  # the name may be unknown until the other host has started
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, _, _, address in addresses:
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EADDRINUSE}:
                raise ConfigError(f"cannot listen on {name}: {error}") from error
            continue
        if _is_loopback(str(address[0])) and not _is_loopback(host):
            listener.close()
            raise ConfigError(
                f"{name} must be an address that the other hosts can reach; "
                f"{host} is {address[0]} on this host"
            )
        return listener
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _connect(spec: ClusterSpec) -> Link:
    name = f"--master {write_address(*spec.master)}"
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        is_last = time.monotonic() >= deadline
        try:
            return Link(spec.master, spec.token, HELLO_SECONDS)
        except WorldError as error:
            raise LaunchError(f"this host cannot join at {name}: {error}") from error
        except OSError as error:
            if is_last:
                raise LaunchError(
                    f"{name} did not respond within {JOIN_SECONDS:g} s: {error}; it must be the "
                    "address of a host that runs this command: start it there, or look for an "
                    "error there"
                ) from error
        time.sleep(RETRY_SECONDS)


def _join(link: Link, hello: Message) -> CoordinatorClient:
    address = write_address(*link.address)
    try:
        answer = link.hello({"as": "host", "name": socket.gethostname(), **hello})
    except OSError as error:
        raise LaunchError(f"this host cannot join at --master {address}: {error}") from error
    if "refused" in answer:
        raise LaunchError(f"the first host at {address} refused this host: {answer['refused']}")
    return CoordinatorClient(link, answer["welcome"], leads=hello["leads"])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
