"""A launcher's part in a run on several hosts: it finds or becomes the first host, joins, and hears what to do."""

from __future__ import annotations

import errno
import ipaddress
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from samestep.cluster.interfaces import interface_towards
from samestep.comm.link import HELLO_SECONDS, Link, write_address
from samestep.config import Config
from samestep.errors import ConfigError, LaunchError, WorldError
from samestep.launch.cluster_spec import ClusterSpec
from samestep.launch.coordinator import BEAT_SECONDS, CoordinatorConfig, coordinate
from samestep.launch.membership import COME_SECONDS, LOST_SECONDS, ElasticPolicy

RETRY_SECONDS: Final = 0.2
# A host that hears nothing ends its workers before the others take it for lost and go on without
# it.
SILENCE_SECONDS: Final = LOST_SECONDS - BEAT_SECONDS
END_SECONDS: Final = 10.0  # for the other hosts to hear of the end
FORK: Final = multiprocessing.get_context("fork")


class CoordinatorClient:
    """This host among those of the run; `leads` where the coordinator runs beside this launcher. The run may be `over` for all."""

    def __init__(self, link: Link, name: str, *, leads: bool) -> None:
        self.name, self.leads, self.over = name, leads, False
        self._link = link
        self._beat_at, self._told_begun = 0.0, False
        self._heard_at = time.monotonic()

    @property
    def coordinator(self) -> tuple[str, int]:
        """The address and port of the coordinator."""
        return self._link.address

    @property
    def files(self) -> list[int]:
        """The files that become readable when an order has arrived."""
        return [self._link.fileno()]

    def environment(self, attempt: int) -> dict[str, str]:
        """Return the variables by which the workers of an attempt find each other."""
        from samestep.comm.store import store_variables  # needs torch

        host, port = self.coordinator
        interface = "lo" if ipaddress.ip_address(host).is_loopback else interface_towards(host)
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        sockets = {name: interface for name in names if interface and name not in os.environ}
        store = store_variables((host, port), attempt)
        return {"MASTER_ADDR": host, "MASTER_PORT": str(port), **sockets, **store}

    def report(self, what: str, **fields: Any) -> None:
        """Tell the coordinator. Raises `LaunchError` when it is gone."""
        try:
            self._link.send({"tell": what, **fields})
        except OSError as error:
            raise self._lost(str(error)) from error

    def orders(self, step: int | None) -> list[dict[str, Any]]:
        """Return what the coordinator wants done; tell it now and then that this host is there, and how many steps are done.

        Raises `LaunchError` when the coordinator is gone.
        """
        now = time.monotonic()
        begun = step is not None
        # before the run has begun, it is not taken up again
        if now >= self._beat_at or begun != self._told_begun:
            self._beat_at, self._told_begun = now + BEAT_SECONDS, begun
            self.report("beat", step=step)
        try:
            orders = self._link.poll()
        except OSError as error:
            raise self._lost(str(error)) from error
        if orders:
            self._heard_at = now
        elif now - self._heard_at > SILENCE_SECONDS:
            raise self._lost(f"nothing was heard of it for {SILENCE_SECONDS:g} s")
        self.over = self.over or any(order["order"] == "end" for order in orders)
        return [order for order in orders if order["order"] != "beat"]

    def _lost(self, reason: str) -> LaunchError:
        return LaunchError(
            f"host {self.name} has lost the first host of the run, at {write_address(*self.coordinator)}, and ends its workers: {reason}; "
            "look there for an error"
        )


@contextmanager
def join_cluster(
    gathering: ClusterSpec, workers: int, config: Config
) -> Iterator[CoordinatorClient]:
    """Join the other hosts with so many workers, from this process before it has threads; lead them where the master's address is here.

    Raises `ConfigError` for an address that cannot be used, or without lanes where hosts may come
    and go; `LaunchError` when the first host does not answer, or refuses this one.
    """
    nodes = gathering.nodes
    if nodes.least < nodes.most and config.lanes is None:
        raise ConfigError(
            f"--nodes {nodes} was given without --lanes; expected, where hosts may come and go, as many lanes as there will ever be "
            "workers: the result depends on them"
        )
    address = write_address(*gathering.master)
    listener = _listen(gathering.master)
    coordinator = member = None
    try:
        if listener is not None:
            terms = ElasticPolicy(
                nodes.least, nodes.most, config.lanes, config.max_restarts, config.grace_period
            )
            charge = CoordinatorConfig(gathering.token, terms, _same(gathering))
            coordinator = FORK.Process(
                target=coordinate, args=(charge, listener, os.getpid()), name="coordinator"
            )
            coordinator.start()
            listener.close()
        link = _connect(gathering, address)
        try:
            member = _join(link, gathering, workers, address, leads=listener is not None)
            yield member
        finally:
            link.close()
    finally:
        if coordinator is not None:
            if member is not None and member.over:
                coordinator.join(END_SECONDS)
            coordinator.kill()
            coordinator.join()
            coordinator.close()


def _listen(master: tuple[str, int]) -> socket.socket | None:
    """Listen at the master's address, if it is one of this host's and nobody has it yet."""
    host, port = master
    for family, kind, _, _, address in _addresses(host, port):
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EADDRINUSE}:
                raise ConfigError(
                    f"--master {write_address(host, port)} was given, and cannot be listened on: {error}"
                ) from error
            continue
        if _is_loopback(str(address[0])) and not _is_loopback(host):
            listener.close()
            raise ConfigError(
                f"--master {write_address(host, port)} was given, and on this host {host} is {address[0]}, which no other host reaches: "
                "give the address by which the others reach it"
            )
        return listener
    return None


def _addresses(host: str, port: int) -> list[Any]:
    # the other hosts may come to know the name later; connecting tells
    with suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return []


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _connect(gathering: ClusterSpec, address: str) -> Link:
    deadline = time.monotonic() + COME_SECONDS
    while (
        link := _try_to_connect(gathering, address, may_fail=time.monotonic() < deadline)
    ) is None:
        time.sleep(RETRY_SECONDS)
    return link


def _try_to_connect(gathering: ClusterSpec, address: str, *, may_fail: bool) -> Link | None:
    try:
        return Link(gathering.master, gathering.token, HELLO_SECONDS)
    except WorldError as error:
        raise LaunchError(
            f"--master {address} was given, and this host cannot join there: {error}"
        ) from error
    except OSError as error:
        if may_fail:
            return None
        raise LaunchError(
            f"--master {address} was given, and did not answer within {COME_SECONDS:g} s: {error}; expected the address of one of the "
            "hosts that run this command: start it there too, and look there for an error"
        ) from error


def _join(
    link: Link, gathering: ClusterSpec, workers: int, address: str, *, leads: bool
) -> CoordinatorClient:
    try:
        hello = {
            "as": "host",
            "name": socket.gethostname(),
            "workers": workers,
            "leads": leads,
            "same": _same(gathering),
        }
        answer = link.hello(hello)
    except OSError as error:
        raise LaunchError(
            f"--master {address} was given, and does not let this host join: {error}"
        ) from error
    if "refused" in answer:
        raise LaunchError(
            f"the first host of the run, at {address}, refuses this one: {answer['refused']}"
        )
    return CoordinatorClient(link, answer["welcome"], leads=leads)


def _same(gathering: ClusterSpec) -> dict[str, str]:
    """Return what must be the same on all hosts, by what it is called: they must agree on how many they are, and bits depend on torch."""
    return {
        "--nodes": str(gathering.nodes),
        "samestep": _version("samestep"),
        "torch": _version("torch"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
