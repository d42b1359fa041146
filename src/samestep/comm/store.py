"""The store over which workers find each other, and later tell where they are."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from typing import Any, Final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from samestep.cluster import ProcessInfo
from samestep.comm.token_store import TokenStore, join_store

Bell = socket.socket | TokenStore

CALL_SECONDS: Final = 10.0  # for a store that is there to answer
PAUSE_SECONDS: Final = 0.01
GONE_SECONDS: Final = 0.1  # for both connections to a store that goes to be closed
# how the addresses begin at which nobody else is to be let in
LOOPBACK: Final = ("localhost", "127.", "::1")


class StoreClient:
    """A connection to the store that says nothing on the terminal when the other end goes: torch would, with a C++ stack each time.

    So it looks first at a connection of its own whether the other end is there. Values are JSON.
    Every call raises `OSError` when it is not, and `ValueError` for what is no JSON. A store whose
    process is stopped, or whose host is gone without a word, answers never: let nobody but a thread
    of its own make these calls.
    """

    def __init__(self, store: Store, bell: Bell, *, keeps_store: bool) -> None:
        self.keeps_store = keeps_store  # whether the store goes with this process
        self._store: Store | None = store
        self._bell = bell

    def get(self, key: str) -> Any:
        """Return the value at a key, None where there is none."""
        return json.loads(self._ask("get", key)) if self._ask("check", [key]) else None

    def put(self, key: str, value: Any) -> None:
        """Set a value."""
        self._ask("set", key, json.dumps(value))

    def put_first(self, key: str, value: Any) -> Any:
        """Set a value where there is none yet; return the one that is there now."""
        return json.loads(self._ask("compare_set", key, "", json.dumps(value)))

    def count(self, key: str) -> int:
        """Count one up from 0 at a key; return what that came to."""
        return int(self._ask("add", key, 1))

    def has(self, keys: Sequence[str]) -> bool:
        """Tell whether there are values at all of these keys."""
        return bool(self._ask("check", list(keys)))

    def close(self) -> None:
        """Close the connection; the other one is the process's."""
        self._store = None

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Make a call of the store. One that is gone before the call, or goes in the middle of it, is told alike."""
        store = self._connected(0.0)
        try:
            return _call(getattr(store, call), *arguments)
        except ConnectionError:
            self._connected(GONE_SECONDS)
            raise

    def _connected(self, seconds: float) -> Store:
        """Return the store. Raises `ConnectionResetError` where it is gone, or goes within some seconds."""
        if self._store is None or wait([self._bell.fileno()], seconds):
            raise ConnectionResetError("the store is gone")
        return self._store


def open_store(place: ProcessInfo, prefix: str, seconds: float) -> tuple[Store, StoreClient]:
    """Return the store of a worker's `place`, with its keys under `prefix`, and another connection to it.

    It is that of several hosts' coordinator, the launcher's, or else rank 0's. Raises `OSError`
    where nobody listens within so many seconds, or something else does.
    """
    store, bell, keeps_store = _store(place, seconds)
    mine = PrefixStore(prefix, store)
    return mine, StoreClient(mine.clone(), bell, keeps_store=keeps_store)  # type: ignore[attr-defined]


@cache
def _store(place: ProcessInfo, seconds: float) -> tuple[Store, Bell, bool]:
    """Return where this process's worlds form; it stays open, because the next world's workers may come before it had closed."""
    joined = join_store(os.environ, timedelta(seconds=max(seconds, CALL_SECONDS)))
    if joined is not None:
        # Of a connection that nobody uses, only the coordinator's end is ever to be read.
        return joined, joined.clone(), False  # type: ignore[return-value]
    listener = _listener(place)
    if listener is None:
        bell = _ring(place, time.monotonic() + seconds)
    store = _call(
        lambda: TCPStore(
            place.address,
            place.port,
            is_master=listener is not None,
            timeout=timedelta(seconds=max(seconds, CALL_SECONDS)),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    )
    if listener is not None:
        bell = _ring(place, time.monotonic() + seconds)
    # torchrun's own store stays from one attempt to the next; its count of them may differ between
    # hosts where rank 0's is used instead.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _launcher_has_store() else "0"
    return PrefixStore(f"attempt/{attempt}", store), bell, listener is not None


def _listener(place: ProcessInfo) -> socket.socket | None:
    """Return where rank 0 lets the others in; None where a launcher does, or another rank 0 came first: that will be found out."""
    if place.rank != 0 or _launcher_has_store():
        return None
    try:
        if place.address.startswith(LOOPBACK):
            family = socket.AF_INET6 if place.address == "::1" else socket.AF_INET
            return socket.create_server((place.address, place.port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", place.port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        return socket.create_server(("", place.port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def _launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _ring(place: ProcessInfo, deadline: float) -> socket.socket:
    """Return a connection to where the store listens, or will in time."""
    while True:
        try:
            return socket.create_connection(
                (place.address, place.port), timeout=max(PAUSE_SECONDS, deadline - time.monotonic())
            )
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"MASTER_ADDR={place.address} MASTER_PORT={place.port}"
                raise OSError(
                    f"nobody listens at {where} ({error}): worker 0 did not come, or the address is not its own"
                ) from error
            time.sleep(PAUSE_SECONDS)


def _call(method: Any, *arguments: Any) -> Any:
    """Make a call of a torch store, whose errors are `RuntimeError` of several kinds."""
    try:
        return method(*arguments)
    except RuntimeError as error:
        raise ConnectionError(str(error).strip().partition("\n")[0]) from None
