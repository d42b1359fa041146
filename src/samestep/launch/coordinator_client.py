"""A launcher's connection to the coordinator of a run on several hosts."""

from __future__ import annotations

import errno
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from multiprocessing.connection import wait
from typing import Any, Final

from samestep.cluster import interface_towards
from samestep.comm.link import HELLO_SECONDS, Delivery, Link, write_address
from samestep.config import Config
from samestep.errors import ConfigError, LaunchError, WorldError
from samestep.host import RunningClock, is_loopback
from samestep.launch.attempt import ElasticPolicy, Message
from samestep.launch.cluster_spec import ClusterSpec
from samestep.launch.coordinator import HEARTBEAT_SECONDS, CoordinatorConfig, coordinate
from samestep.launch.membership import JOIN_SECONDS, LOST_SECONDS
from samestep.launch.worker import FORK
from samestep.record.events import samestep_version

RETRY_SECONDS: Final = 0.2  # time between attempts to connect
MIN_SECONDS: Final = 0.2  # shortest time limit of an attempt to connect
# A host without messages ends its workers before the other hosts treat it as lost and continue.
SILENCE_SECONDS: Final = LOST_SECONDS - HEARTBEAT_SECONDS
QUIET_SECONDS: Final = 3.0  # time without messages after which a host connects again
END_SECONDS: Final = LOST_SECONDS + 5.0  # time for the other hosts to learn that the run has ended


class CoordinatorClient:
    """The connection of one host's launcher to the coordinator.

    Attributes: `leads` (bool): the coordinator runs on this host. `is_over` (bool): the run has
    ended on all hosts. `address`: host and port of the coordinator. `files`: open files that become
    readable when an order arrives.

    A thread sends, receives and connects again, so that the host counts as present while its
    launcher waits for a disk. If the host is silent for too long, the run continues without it: the
    order `lost` tells the launcher to end its workers and to report `ready`, as a new host.
    """

    def __init__(self, spec: ClusterSpec, hello: Message) -> None:
        """Join the run. Raises `LaunchError` if nothing responds, or this host is refused."""
        self.leads, self.is_over = bool(hello["leads"]), False
        self._spec, self._hello = spec, hello
        self._lock = threading.Lock()  # of all that both threads use: up to `_failure`
        self._begin_session()
        self._orders: list[Message] = []
        self._step: int | None = None
        self._failure: LaunchError | None = None
        self._heartbeat_at, self._lost_at, self._end_at = 0.0, math.inf, math.inf
        self._received_at, self._clock = time.monotonic(), RunningClock()
        self._is_closed = self._reported_begin = False
        self._signals = 0  # reported
        self._link = self._join()
        self.address = self._link.address
        self._has_orders, self._has_reports = (
            os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)
        )
        self.files = [self._has_orders]
        self._thread = threading.Thread(target=self._run, name="samestep coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect; no call follows."""
        self._is_closed = True
        os.eventfd_write(self._has_reports, 1)
        self._thread.join()
        self._link.close()
        for file in (self._has_orders, self._has_reports):
            os.close(file)

    def environment(self, attempt: int) -> dict[str, str]:
        """Return the variables that the workers of an attempt need to find each other."""
        from samestep.comm.token_store import store_variables  # needs torch

        host, port = self.address
        interface = "lo" if is_loopback(host) else interface_towards(host)
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        sockets = {name: interface for name in names if interface and name not in os.environ}
        store = store_variables(self.address, attempt)
        return {"MASTER_ADDR": host, "MASTER_PORT": str(port), **sockets, **store}

    def report(self, what: str, now: float | None = None, **fields: Any) -> None:
        """Report an event on this host. The coordinator has another clock than `now`."""
        self._signals += what == "signaled"
        with self._lock:
            self._delivery.add({"report": what, **fields})
        os.eventfd_write(self._has_reports, 1)

    def orders(self, step: int | None) -> list[Message]:
        """Return the next orders, given the number of completed steps.

        Raises `LaunchError` if the coordinator is gone.
        """
        _clear(self._has_orders)
        has_begun, self._step = step is not None, step
        # the coordinator restarts workers only after the run has begun
        if has_begun != self._reported_begin:
            self._reported_begin = has_begun
            self.report("heartbeat", step=step)
        with self._lock:
            orders, self._orders = self._orders, []
            if self._failure is not None and not orders:
                raise self._failure
        return orders

    # The methods below run in the thread.

    def _run(self) -> None:
        failure: LaunchError | None = None
        try:
            while not (self._is_closed or self.is_over):
                try:
                    self._talk()
                except (OSError, ValueError) as error:
                    self._link.abort()
                    self._reconnect(str(error))
        except LaunchError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  the launcher must not wait for this thread
            failure = self._lost(f"{type(error).__name__}: {error}")
        with self._lock:
            self._failure = failure
        os.eventfd_write(self._has_orders, 1)

    def _talk(self) -> None:
        """Send reports and receive orders until the end, or until the connection is lost."""
        while not (self._is_closed or self.is_over):
            now = time.monotonic()
            if now >= self._heartbeat_at:
                self._heartbeat_at = now + HEARTBEAT_SECONDS
                self.report("heartbeat", step=self._step)
            with self._lock:
                due = self._delivery.due()
            for message in due:
                self._link.send(message)
            wait([self._link.fileno(), self._has_reports], self._heartbeat_at - now)
            _clear(self._has_reports)
            messages = self._link.poll()
            self._clock.now()
            self._received_at = max(self._received_at, self._clock.resumed_at)
            if messages:
                self._received_at = time.monotonic()
                self._receive(messages)
            elif time.monotonic() - self._received_at > QUIET_SECONDS:
                raise TimeoutError(f"no message for {QUIET_SECONDS:g} s")

    def _receive(self, messages: Sequence[dict[str, Any]]) -> None:
        with self._lock:
            orders = [self._delivery.accept(message) for message in messages]
            orders = [order for order in orders if order["order"] != "heartbeat"]
            self._orders += orders
        self.is_over = any(order["order"] == "end" for order in orders)
        if orders:
            os.eventfd_write(self._has_orders, 1)

    def _reconnect(self, reason: str) -> None:
        """Connect again. Raises `LaunchError` if that is not possible."""
        self._lost_at = min(self._lost_at, self._received_at + SILENCE_SECONDS)
        while not self._is_closed:
            now = time.monotonic()
            if now >= self._lost_at:
                self._lose(reason)
            # without workers there is nothing to save; a second signal does not wait for that
            has_workers = self._end_at == math.inf
            if self._signals > (1 if has_workers else 0):
                raise self._lost(f"{reason}; stopped by a signal")
            if now >= self._end_at:
                raise self._lost(f"{reason}; it has not responded for {JOIN_SECONDS:g} s since")
            try:
                self._link = self._join_once()
            except ConnectionRefusedError as error:
                if self.leads:  # its process has exited
                    raise self._lost(reason) from error
            except OSError as error:
                reason = str(error)
            else:
                self.address, self._received_at = self._link.address, time.monotonic()
                self._lost_at = self._end_at = math.inf
                return
            time.sleep(RETRY_SECONDS)

    def _lose(self, reason: str) -> None:
        """Let the launcher end its workers, because the run continues without them."""
        order = {"order": "lost", "reason": f"{self._lost(reason)}; trying to join again"}
        self._lost_at, self._end_at = math.inf, time.monotonic() + JOIN_SECONDS
        with self._lock:
            self._begin_session()
            self._orders = [order]
        os.eventfd_write(self._has_orders, 1)

    def _lost(self, reason: str) -> LaunchError:
        return LaunchError(
            f"host {socket.gethostname()} lost the connection to the first host at "
            f"{write_address(*self.address)} and stops its workers: {reason}; "
            "look for an error on the first host"
        )

    def _begin_session(self) -> None:
        self._session, self._delivery, self._has_joined = secrets.token_hex(16), Delivery(), False

    def _join(self) -> Link:
        """Join the run for the first time."""
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            is_last = time.monotonic() >= deadline
            try:
                return self._join_once()
            except OSError as error:
                if is_last:
                    raise LaunchError(
                        f"{self._name} did not respond within {JOIN_SECONDS:g} s: {error}; it must "
                        "be the address of a host that runs this command: start it there, or look "
                        "for an error there"
                    ) from error
            time.sleep(RETRY_SECONDS)

    def _join_once(self) -> Link:
        """Begin or continue this host's session. Raises `OSError`; `LaunchError` if refused."""
        received = self._delivery.received if self._has_joined else None
        identity = {"as": "host", "name": socket.gethostname(), "session": self._session}
        # half for each part, so that workers end in time
        seconds = min(HELLO_SECONDS, max(MIN_SECONDS, (self._lost_at - time.monotonic()) / 2))
        try:
            link = Link(self._spec.master, self._spec.token, seconds)
            answer = link.hello({**identity, "received": received, **self._hello}, seconds)
        except WorldError as error:
            raise LaunchError(f"this host cannot join at {self._name}: {error}") from error
        if "refused" in answer:
            address = write_address(*link.address)
            raise LaunchError(f"the first host at {address} refused this host: {answer['refused']}")
        if "unknown" in answer:
            link.close()
            self._lose("the run ended or continued without this host")
            raise ConnectionResetError("it has no record of this host's workers")
        with self._lock:
            self._delivery.resume(answer["received"])
        self._has_joined = True
        return link

    @property
    def _name(self) -> str:
        return f"--master {write_address(*self._spec.master)}"


def _clear(file: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(file)


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
    settings = {"--nodes": str(nodes), "samestep": samestep_version(), "torch": version("torch")}
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
        hello = {"workers": workers, "leads": listener is not None, "settings": settings}
        with closing(CoordinatorClient(spec, hello)) as client:
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
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EADDRINUSE}:
                raise ConfigError(f"cannot listen on {name}: {error}") from error
            continue
        if is_loopback(str(address[0])) and not is_loopback(host):
            listener.close()
            raise ConfigError(
                f"{name} must be an address that the other hosts can reach; "
                f"{host} is {address[0]} on this host"
            )
        return listener
    return None
