"""The key-value store of a run, through which its workers find each other and publish their status.

samestep's launchers, or else rank 0, serve it to holders of the run's token (`TokenStore`). Only
torchrun, and a script with a process group of its own, have a TCPStore, which has no
authentication. `StoreClient` uses either, with a limit for each call.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import wait
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from samestep.cluster import ProcessInfo, connect_to_master, listen_at_master
from samestep.comm.link import parse
from samestep.comm.signing import derive, sign, verified
from samestep.comm.status import list_workers
from samestep.comm.store_server import StoreServer, StoreThread
from samestep.comm.together import in_thread
from samestep.comm.token_store import TokenStore, join_store, join_store_of_rank_0
from samestep.config import TOKEN
from samestep.torch_internals import default_store

Value = TypeVar("Value")

CALL_SECONDS: Final = 10.0  # for a reachable store to be opened
ROUND: Final = "round"  # key: the attempt of torchrun that rank 0 started last
PAUSE_SECONDS: Final = 0.0005  # between checks for other workers
WAIT_SECONDS: Final = CALL_SECONDS / 2  # for a key, in one request
GONE_SECONDS: Final = 0.1  # between the disconnects of both connections to a store that exits
# becomes readable if the store's process exits; a number: a file that stays open in this process
Liveness = socket.socket | TokenStore | int


class _KeyTimeoutError(TimeoutError):
    """A key was not set in time; the store responds."""


class StoreClient:
    """A connection to the store that prints nothing if the store's process exits.

    torch would print a C++ stack each time, so each call checks a liveness socket first. Values are
    JSON. Calls raise `OSError` if the store is gone or does not respond within `seconds`, and
    `ValueError` for invalid JSON. With None for `seconds`, calls wait as long as the store's
    process is stopped or its host is down: make them in a separate thread.

    With a `key`, values are signed, and values that others wrote are treated as missing.
    """

    def __init__(
        self,
        store: Store,
        liveness: Liveness,
        *,
        hosts_store: bool,
        seconds: float | None = None,
        key: bytes | None = None,
        is_own: bool = False,
        owns_liveness: bool = False,
    ) -> None:
        self.hosts_store = hosts_store  # whether the store exits with this process
        self.seconds, self.key = seconds, key
        self._is_own = is_own  # whether samestep's launcher serves the store
        self._store: Store | None = store
        self._liveness = liveness
        self._owns_liveness = owns_liveness

    def get(self, key: str) -> Any:
        """Return the value of a key, None if it has none."""
        if not self._request("check", [key]):
            return None
        text = self._verified(key, self._request("get", key))
        return None if text is None else parse(text)

    def get_many(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of keys, None for those that have none.

        Takes two requests if all keys have values, and more for each that has none.
        """
        if not keys:
            return []
        if self.has(keys):
            return self._values(keys)
        if len(keys) == 1:
            return [None]
        middle = len(keys) // 2
        return self.get_many(keys[:middle]) + self.get_many(keys[middle:])

    def wait_for(self, keys: Sequence[str], seconds: float, workers: int) -> Iterator[list[Any]]:
        """Yield the values of keys, [] while some have none, again and again for `seconds`.

        samestep's own store responds when all are set, or after `WAIT_SECONDS`. Others are asked
        again after pauses: a call that waits would print a C++ stack if the store's process exits.
        """
        deadline, pauses = time.monotonic() + seconds, pauses_of(workers)
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            if self._is_own:
                are_set = self._are_set_within(keys, min(remaining, WAIT_SECONDS))
            else:
                are_set = self.has(keys)
            yield self._values(keys) if are_set else []
            if not remaining:
                return
            if not self._is_own:
                time.sleep(min(next(pauses), remaining))

    def put(self, key: str, value: Any) -> None:
        """Set a value."""
        self._request("set", key, self._signed(key, value))

    def put_first(self, key: str, value: Any) -> Any:
        """Set a value unless the key has one; return the current value."""
        signed, current = self._signed(key, value), b""
        while True:
            current = self._request("compare_set", key, current, signed)
            text = self._verified(key, current)  # None if it is to be replaced
            if text is not None:
                return parse(text)

    def count(self, key: str, amount: int = 1) -> int:
        """Increase a counter that starts at 0; return the result."""
        return int(self._request("add", key, amount))

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._request("check", list(keys)))

    def close(self) -> None:
        """Close the connection, unless it belongs to the process."""
        self._store = None
        if self._owns_liveness and not isinstance(self._liveness, int):
            self._liveness.close()

    def _are_set_within(self, keys: Sequence[str], seconds: float) -> bool:
        try:
            self._request("wait", list(keys), timedelta(seconds=seconds))
        except _KeyTimeoutError:
            return False
        return True

    def _values(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of keys that are set, None for those without a valid signature."""
        texts = map(self._verified, keys, self._request("multi_get", list(keys)))
        return [None if text is None else parse(text) for text in texts]

    def _signed(self, key: str, value: Any) -> bytes:
        text = json.dumps(value).encode()
        return text if self.key is None else sign(self.key, f"entry {key}", text)

    def _verified(self, key: str, data: bytes) -> bytes | None:
        """Return the text of a value, None if it is not signed."""
        return data if self.key is None else verified(self.key, f"entry {key}", data)

    def _request(self, method: str, *arguments: Any) -> Any:
        """Call the store. The error is the same whether it exits before or during the call."""
        store = self._connected(0.0)
        try:
            return within(self.seconds, _call, getattr(store, method), *arguments)
        except ConnectionError:
            self._connected(GONE_SECONDS)
            raise

    def _connected(self, seconds: float) -> Store:
        """Return the store. Raises `ConnectionResetError` if it exits within `seconds`."""
        liveness = self._liveness
        file = liveness if isinstance(liveness, int) else liveness.fileno()
        if self._store is None or file < 0 or wait([file], seconds):
            raise ConnectionResetError("lost connection to the store")
        return self._store


def pauses_of(workers: int) -> Iterator[float]:
    """Yield pauses between polls of the store that all `workers` share.

    They grow with the number of workers and with the time already waited (up to 2% of it).
    """
    started, pause = time.monotonic(), PAUSE_SECONDS
    while True:
        yield pause
        waited = time.monotonic() - started
        pause = min(2 * pause, max(PAUSE_SECONDS * workers, waited / 50))


def open_store(process: ProcessInfo, prefix: str, seconds: float) -> tuple[Store, StoreClient]:
    """Return the store and its client, with keys under `prefix`.

    Raises `OSError` on timeout, or if another user's program listens at the store's address.
    """
    in_group = process.started_by == "group"
    find = _group_store if in_group else _store
    store, liveness, hosts_store = find(process, seconds)
    prefixed = PrefixStore(prefix, store)
    limit: float | None = None
    connection: Any = store
    client_store = prefixed
    if not isinstance(store, TokenStore) or not store.is_local:
        limit = max(seconds, CALL_SECONDS)
        connection = within(limit, store.clone)  # type: ignore[attr-defined]  # missing in stubs
        client_store = PrefixStore(prefix, connection)
    client = StoreClient(
        client_store,
        connection
        if liveness is None
        else liveness,  # between requests, it becomes readable only if it is closed
        hosts_store=hosts_store,
        seconds=limit,
        key=None if isinstance(store, TokenStore) else _store_key(),
        is_own=isinstance(store, TokenStore),
        owns_liveness=in_group or connection is not store,
    )
    return prefixed, client


def _store_key() -> bytes | None:
    """Return the key for a store without authentication: a token from the user, None without."""
    return derive(os.environ[TOKEN], "entries") if TOKEN in os.environ else None


def within(seconds: float | None, function: Callable[..., Value], *arguments: Any) -> Value:
    """Call a store function that may block forever. Raises `TimeoutError` after `seconds`.

    Without a limit, the function is called in this thread.
    """
    if seconds is None:
        return function(*arguments)

    result = in_thread(partial(function, *arguments), "samestep store")
    try:
        return result.result(seconds)
    except FutureTimeoutError:
        if result.done():  # the function's own timeout
            raise
        raise TimeoutError(
            f"the store did not respond within {seconds:g} s: its process is stopped, or its host "
            "is down"
        ) from None
    finally:
        del result


def group_store() -> tuple[Store, Any]:
    """Return the store of torch.distributed's default group, and the one inside of its prefixes."""
    store = inner = default_store()
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return store, inner


def destroy_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a group; None is the default group, whose connection to the store is closed too.

    User code may have destroyed all groups.
    """
    if not dist.is_initialized():
        return
    inner = None if group else group_store()[1]
    dist.destroy_process_group(group)
    if isinstance(inner, TokenStore):
        inner.close()


def _group_store(process: ProcessInfo, seconds: float) -> tuple[Store, Liveness, bool]:
    """Return the group's store, which is not kept: its port is free again with its last user."""
    store, inner = group_store()
    if not hasattr(inner, "port"):  # a file
        return store, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), False
    return store, connect_to_master(process, time.monotonic() + seconds), process.rank == 0


@cache
def _store(process: ProcessInfo, seconds: float) -> tuple[Store, Liveness | None, bool]:
    """Return the store, its liveness socket (None: that of each client), and whether it is hosted.

    It stays open, because the workers of the next world may connect before it could be reopened.
    """
    timeout = timedelta(seconds=max(seconds, CALL_SECONDS))
    joined = join_store(os.environ, timeout)
    if joined is not None:
        # A launcher on this host ends its workers when it exits, so any silent socket will do.
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if joined.is_local else None
        return joined, None if silent is None else silent.detach(), False
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline, token = time.monotonic() + seconds, os.environ.get(TOKEN, "")
    listener = None if process.rank != 0 or launcher_has_store else listen_at_master(process)
    if listener is not None:
        atexit.register(StoreThread(StoreServer(token, 0), listener).close)
    with ExitStack() as exits:  # closes the socket after an error
        liveness = exits.enter_context(connect_to_master(process, deadline))
        if not launcher_has_store:
            joined = join_store_of_rank_0((process.address, process.port), token, timeout)
            atexit.register(joined.close)  # before the server
            return joined, None, listener is not None
        store = within(
            timeout.total_seconds(),
            _call,
            lambda: dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in __all__
                process.address,
                process.port,
                is_master=False,
                timeout=timeout,
                wait_for_workers=False,
            ),
        )
        prefix = "attempt/0"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            key, limit = _store_key(), timeout.total_seconds()
            rounds = PrefixStore("samestep", store)
            client = StoreClient(rounds, liveness, hosts_store=False, seconds=limit, key=key)
            prefix = f"round/{join_round(client, process, seconds)}"
        return PrefixStore(prefix, store), liveness.detach(), False


def join_round(client: StoreClient, process: ProcessInfo, seconds: float) -> str:
    """Return a name that all workers of this attempt share, and no worker of an earlier one had.

    torchrun's store outlives attempts, and the number of restarts that it sets may differ between
    hosts. So rank 0 names a new round, the others join the newest one, and rank 0 confirms it once
    all have. A worker that reads a round of an earlier attempt finds its rank taken, or never gets
    that confirmation, because earlier workers have exited. Raises `TimeoutError`.
    """
    rank, size = process.rank, process.world_size
    nonce, others = os.urandom(16).hex(), range(1, size)
    newest, joined, pauses = "", False, pauses_of(size)
    if rank == 0:
        newest = f"{size}/{nonce}"  # workers of a round have the same world size
        client.put(ROUND, newest)
    deadline = time.monotonic() + seconds
    while True:
        if rank == 0:
            if size == 1 or client.has([f"{newest}/{other}" for other in others]):
                client.put(f"{newest}/confirmed", nonce)
                return newest
            if client.get(ROUND) is None:  # a process without the token replaced it
                client.put(ROUND, newest)
        else:
            current = client.get(ROUND)
            if current != newest and str(current).startswith(f"{size}/"):
                newest = current
                joined = client.put_first(f"{newest}/{rank}", nonce) == nonce
            if joined and client.get(f"{newest}/confirmed") is not None:
                return newest
        if time.monotonic() > deadline:
            missing = [each for each in others if not client.has([f"{newest}/{each}"])]
            raise TimeoutError(
                f"timed out after {seconds:g} s waiting for "
                f"{list_workers((missing or others) if rank == 0 else [0])} to join this attempt "
                "of torchrun; increase timeout if some start late, or set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
            )
        time.sleep(next(pauses))


def _call(method: Any, *arguments: Any) -> Any:
    """Call a torch store, which raises several kinds of `RuntimeError`."""
    try:
        return method(*arguments)
    except dist.DistStoreError as error:
        raise _KeyTimeoutError(str(error)) from None
    except RuntimeError as error:
        raise ConnectionError(str(error).strip().partition("\n")[0]) from None
