"""The key-value store of a run, through which its workers find each other and publish their status.

The coordinator of several hosts serves it to holders of the run's token (`TokenStore`). Otherwise
it is a TCPStore of the launcher or of rank 0. `StoreClient` uses either from its own thread.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from samestep.cluster import ProcessInfo
from samestep.comm.link import Link, parse_address, to_bytes, to_text, write_address
from samestep.config import TOKEN
from samestep.errors import WorldError

STORE: Final = "SAMESTEP_INTERNAL_STORE"
CALL_SECONDS: Final = 10.0  # for a reachable store to respond
SLACK_SECONDS: Final = 30.0  # for a response, after the time that the coordinator may wait
PAUSE_SECONDS: Final = 0.01
GONE_SECONDS: Final = 0.1  # between the disconnects of both connections to a store that exits
LOOPBACK: Final = ("localhost", "127.", "::1")  # prefixes of addresses that only this host reaches
# torch keeps only the C++ half of a store alive, which is useless without the other half
_open: list[TokenStore] = []


class TokenStore(Store):
    """A connection to the store that a run's coordinator serves.

    Threads may share it, but block each other while one waits for a key: `clone` opens another
    connection. Raises what torch's own stores raise: `DistStoreError` if a key does not appear in
    time, `DistNetworkError` if the coordinator does not respond.
    """

    timeout: timedelta  # set by the C++ half

    def __init__(
        self, address: tuple[str, int], token: str, hello: Mapping[str, Any], timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._arguments = (address, token, hello)
        self._lock = threading.Lock()
        coordinator = f"the coordinator at {write_address(*address)}"
        try:
            self._link = Link(address, token, timeout.total_seconds())
            refused = self._link.hello(hello).get("refused")
        except OSError as error:
            raise WorldError(f"{coordinator} does not respond: {error}") from error
        if refused:
            raise WorldError(f"{coordinator} refused this worker: {refused}")
        _open.append(self)

    def fileno(self) -> int:
        """Return the file descriptor: readable when a response arrives or the coordinator exits."""
        return self._link.fileno()

    def clone(self) -> TokenStore:
        return TokenStore(*self._arguments, self.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        return to_bytes(self._wait_for("get", self.timeout, key=key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for("wait", timeout or self.timeout, keys=list(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", key=key, amount=amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", keys=list(keys)))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        fields: dict[str, Any] = {"key": key, "expected": _text(expected), "value": _text(value)}
        return to_bytes(self._request("compare_set", **fields))

    def append(self, key: str, value: str | bytes) -> None:
        self._request("append", key=key, value=_text(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete", key=key))

    def num_keys(self) -> int:
        return int(self._request("count"))

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  torch's C++ half calls them so

    def _wait_for(self, what: str, timeout: timedelta, **fields: Any) -> Any:
        seconds = timeout.total_seconds()
        return self._request(what, seconds, seconds=seconds, **fields)

    def _request(self, what: str, /, timeout: float = 0.0, **fields: Any) -> Any:
        with self._lock:
            try:
                self._link.send({"do": what, **fields})
                response = self._link.receive(timeout + SLACK_SECONDS)
            except BaseException as error:
                self._link.close()  # a late response would be taken as that of the next request
                if isinstance(error, OSError):
                    raise dist.DistNetworkError(f"the store does not respond: {error}") from error
                raise
        if late := response.get("late"):
            raise dist.DistStoreError(
                f"timed out after {timeout:g} s waiting for keys of the store: {', '.join(late)}"
            )
        return response.get("value")


def _text(value: str | bytes) -> str:
    return to_text(value.encode() if isinstance(value, str) else value)


def store_variables(address: tuple[str, int], attempt: int) -> dict[str, str]:
    """Return the variable through which an attempt's workers find the coordinator's store."""
    return {STORE: f"{attempt}@{write_address(*address)}"}


def join_store(environment: Mapping[str, str], timeout: timedelta) -> TokenStore | None:
    """Connect to the attempt's store; return None without a coordinator. Raises `WorldError`."""
    if STORE not in environment:
        return None
    attempt, _, address = environment[STORE].partition("@")
    hello = {
        "as": "worker",
        "attempt": int(attempt),
        "rank": int(environment["RANK"]),
        "process": f"{socket.gethostname()}:{os.getpid()}",
    }
    return TokenStore(parse_address(address, STORE), environment[TOKEN], hello, timeout)


Liveness = socket.socket | TokenStore  # becomes readable if the store's process exits


class StoreClient:
    """A connection to the store that prints nothing if the store's process exits.

    torch would print a C++ stack each time, so each call checks a liveness socket first. Values are
    JSON. Calls raise `OSError` if the store is gone, `ValueError` for invalid JSON. If the store's
    process is stopped or its host is down, calls never return: make them in a separate thread.
    """

    def __init__(self, store: Store, liveness: Liveness, *, hosts_store: bool) -> None:
        self.hosts_store = hosts_store  # whether the store exits with this process
        self._store: Store | None = store
        self._liveness = liveness

    def get(self, key: str) -> Any:
        """Return the value of a key, None if it has none."""
        return json.loads(self._request("get", key)) if self._request("check", [key]) else None

    def put(self, key: str, value: Any) -> None:
        """Set a value."""
        self._request("set", key, json.dumps(value))

    def put_first(self, key: str, value: Any) -> Any:
        """Set a value unless the key has one; return the current value."""
        return json.loads(self._request("compare_set", key, "", json.dumps(value)))

    def count(self, key: str) -> int:
        """Increment a counter that starts at 0; return the result."""
        return int(self._request("add", key, 1))

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._request("check", list(keys)))

    def close(self) -> None:
        """Close the connection; the liveness socket belongs to the process."""
        self._store = None

    def _request(self, method: str, *arguments: Any) -> Any:
        """Call the store. The error is the same whether it exits before or during the call."""
        store = self._connected(0.0)
        try:
            return _call(getattr(store, method), *arguments)
        except ConnectionError:
            self._connected(GONE_SECONDS)
            raise

    def _connected(self, seconds: float) -> Store:
        """Return the store. Raises `ConnectionResetError` if it exits within `seconds`."""
        if self._store is None or wait([self._liveness.fileno()], seconds):
            raise ConnectionResetError("lost connection to the store")
        return self._store


def open_store(process: ProcessInfo, prefix: str, seconds: float) -> tuple[Store, StoreClient]:
    """Return the store and its client, with keys under `prefix`. Raises `OSError` on timeout."""
    store, liveness, hosts_store = _store(process, seconds)
    prefixed = PrefixStore(prefix, store)
    own: Store = prefixed.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return prefixed, StoreClient(own, liveness, hosts_store=hosts_store)


@cache
def _store(process: ProcessInfo, seconds: float) -> tuple[Store, Liveness, bool]:
    """Return the store, its liveness socket, and whether this process hosts it.

    It stays open, because the workers of the next world may connect before it could be reopened.
    """
    timeout = timedelta(seconds=max(seconds, CALL_SECONDS))
    joined = join_store(os.environ, timeout)
    if joined is not None:
        # an unused connection becomes readable only if the coordinator closes it
        return joined, joined.clone(), False
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = None if process.rank != 0 or launcher_has_store else _listen(process)
    deadline = time.monotonic() + seconds
    if listener is None:
        liveness = _connect(process, deadline)
    store = _call(
        lambda: dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in __all__
            process.address,
            process.port,
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    )
    if listener is not None:
        liveness = _connect(process, deadline)
    # torchrun's store outlives an attempt; without that store, the count may differ between hosts
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launcher_has_store else "0"
    return PrefixStore(f"attempt/{attempt}", store), liveness, listener is not None


def _listen(process: ProcessInfo) -> socket.socket | None:
    """Return rank 0's listening socket, None if the port is taken, perhaps by another rank 0."""
    try:
        local = process.address if process.address.startswith(LOOPBACK) else ""
        both = not local and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or local == "::1" else socket.AF_INET
        return socket.create_server((local, process.port), family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def _connect(process: ProcessInfo, deadline: float) -> socket.socket:
    """Return a connection to the store's address, once something listens there."""
    while True:
        seconds = max(PAUSE_SECONDS, deadline - time.monotonic())
        try:
            return socket.create_connection((process.address, process.port), timeout=seconds)
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"nothing listens at MASTER_ADDR={process.address} MASTER_PORT={process.port} "
                    f"({error}): worker 0 did not start, or this is not its address"
                ) from error
            time.sleep(PAUSE_SECONDS)


def _call(method: Any, *arguments: Any) -> Any:
    """Call a torch store, which raises several kinds of `RuntimeError`."""
    try:
        return method(*arguments)
    except RuntimeError as error:
        raise ConnectionError(str(error).strip().partition("\n")[0]) from None
