"""A connection to the store that samestep's launchers serve to holders of the run's token."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from samestep.comm.link import Address, Link, parse_address, to_bytes, to_text, write_address
from samestep.config import TOKEN
from samestep.errors import WorldError

STORE: Final = "SAMESTEP_INTERNAL_STORE"
SLACK_SECONDS: Final = 30.0  # for a response, after the time that the coordinator may wait
# the same for a launcher on this host: it ends its workers if it exits, and may be stopped (Ctrl-Z)
LOCAL_SLACK_SECONDS: Final = 1e6
RETRY_SECONDS: Final = 0.1
# torch keeps only the C++ half of a store alive, which is useless without the other half
_open: list[TokenStore] = []


class TokenStore(Store):
    """A connection to the store that a run's coordinator or, on one host, its launcher serves.

    Threads may share it, but block each other while one waits for a key: `clone` opens another
    connection. Raises what torch's own stores raise: `DistStoreError` if a key does not appear in
    time, `DistNetworkError` if the coordinator does not respond.
    """

    timeout: timedelta  # set by the C++ half

    def __init__(
        self, address: Address, token: str, hello: Mapping[str, Any], timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._arguments = (address, token, hello)
        self._lock = threading.Lock()
        self.is_local = isinstance(address, str)
        coordinator, self._slack = "the launcher", LOCAL_SLACK_SECONDS
        if not isinstance(address, str):
            coordinator = f"the coordinator at {write_address(*address)}"
            self._slack = SLACK_SECONDS
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            seconds = deadline - time.monotonic()
            try:
                self._link = Link(address, token, seconds)
                refused = self._link.hello(hello, seconds).get("refused")
                break
            except OSError as error:
                # the network may lose a connection before both ends have proved who they are
                if isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                    raise WorldError(f"{coordinator} does not respond: {error}") from error
                time.sleep(RETRY_SECONDS)
        if refused:
            raise WorldError(f"{coordinator} refused this worker: {refused}")
        _open.append(self)

    def fileno(self) -> int:
        """Return the file descriptor: readable when a response arrives or the coordinator exits."""
        return self._link.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._link.close()
        if self in _open:
            _open.remove(self)

    def clone(self) -> TokenStore:
        return TokenStore(*self._arguments, self.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        return to_bytes(self._wait_for("get", self.timeout, key=key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout = self.timeout if timeout is None else timeout  # which may be 0
        self._wait_for("wait", timeout, keys=list(keys))

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
        values: list[bytes] = []
        while len(values) < len(keys):  # an answer has as many values as fit
            rest = list(keys[len(values) :])
            texts = self._wait_for("multi_get", self.timeout, keys=rest)
            values += map(to_bytes, texts)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete", key=key))

    def num_keys(self) -> int:
        return int(self._request("count"))

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  for torch's C++ half

    def _wait_for(self, what: str, timeout: timedelta, **fields: Any) -> Any:
        seconds = timeout.total_seconds()
        return self._request(what, seconds, seconds=seconds, **fields)

    def _request(self, what: str, /, timeout: float = 0.0, **fields: Any) -> Any:
        with self._lock:
            try:
                self._link.send({"do": what, **fields})
                response = self._link.receive(timeout + self._slack)
            except BaseException as error:
                self._link.close()  # a late response would be mistaken for the next request's
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


def store_variables(address: Address, attempt: int) -> dict[str, str]:
    """Return the variable through which an attempt's workers find their launcher's store."""
    text = address if isinstance(address, str) else write_address(*address)
    return {STORE: f"{attempt}@{text}"}


def join_store(environment: Mapping[str, str], timeout: timedelta) -> TokenStore | None:
    """Connect to the attempt's store; None without samestep's launcher. Raises `WorldError`."""
    if STORE not in environment:
        return None
    attempt, _, text = environment[STORE].partition("@")
    address = parse_address(text, STORE) if ":" in text else text
    hello = {"attempt": int(attempt), "rank": int(environment["RANK"]), "process": _process()}
    return TokenStore(address, environment[TOKEN], hello, timeout)


def join_store_of_rank_0(address: Address, token: str, timeout: timedelta) -> TokenStore:
    """Connect to the store of rank 0, which is for one attempt and does not check ranks.

    Workers find out themselves if two have the same rank.
    """
    return TokenStore(address, token, {"attempt": 0, "rank": _process(), "process": ""}, timeout)


def _process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
