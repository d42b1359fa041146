"""The coordinator of a run on one host: membership decided in the launcher's own process."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

from samestep.cluster.launchers import LOOPBACK
from samestep.config import Config
from samestep.launch.membership import ElasticPolicy, Membership

LOOPBACK_ONLY: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class LocalCoordinator:
    """The interface of `CoordinatorClient` without a network; a context manager."""

    leads: Final = True
    files: Final[Sequence[int]] = ()

    def __init__(self, workers: int, config: Config) -> None:
        policy = ElasticPolicy(1, 1, None, config.max_restarts, config.grace_period)
        now = time.monotonic()
        self._membership = Membership(policy, now, open_attempt=lambda _: None, log=lambda _: None)
        self._orders: list[Mapping[str, Any]] = []
        self._node = self._membership.join(
            socket.gethostname(), workers, self._orders.append, lambda: None, now, leads=True
        )
        self._store: TCPStore | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store = None  # torch closes it with the last reference

    def report(self, what: str, **fields: Any) -> None:
        """Pass on what happened on this host."""
        self._membership.hear(self._node, {"tell": what, **fields}, time.monotonic())

    def orders(self, step: int | None) -> list[Mapping[str, Any]]:
        """Return what to do next, given the number of completed steps."""
        self.report("beat", step=step)
        self._membership.update(time.monotonic())
        orders, self._orders[:] = list(self._orders), []
        return orders

    def environment(self, attempt: int) -> dict[str, str]:
        """Open a new store for an attempt; return the variables by which its workers find it.

        The variables are torchrun's, which torch.distributed reads too: all workers are clients of
        an existing store. A TCPStore that opens its own socket listens on all addresses, so it gets
        one that listens on the loopback interface only.
        """
        self._store = None
        listener = socket.create_server((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **LOOPBACK_ONLY,
        }
