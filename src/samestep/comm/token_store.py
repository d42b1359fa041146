"""A store of torch.distributed that the coordinator of a run on several hosts serves to those who hold the run's token."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from samestep.comm.link import Link, parse_address, to_bytes, to_text, write_address
from samestep.config import TOKEN
from samestep.errors import WorldError

STORE: Final = "SAMESTEP_INTERNAL_STORE"
# for an answer to arrive, on top of the time that the coordinator may take for it
SLACK_SECONDS: Final = 30.0
# torch keeps stores by their C++ half alone, which is of no use without the other
_open: list[TokenStore] = []


def store_variables(address: tuple[str, int], attempt: int) -> dict[str, str]:
    """Return the variable by which the workers of an attempt find their store."""
    return {STORE: f"{attempt}@{write_address(*address)}"}


def join_store(environment: Mapping[str, str], timeout: timedelta) -> TokenStore | None:
    """Return a connection of its own to the store of this worker's attempt; None where its launcher is alone, or another's.

    Raises `WorldError` where the coordinator does not answer, or has no place for this worker.
    """
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


class TokenStore(Store):
    """One connection to the coordinator. Threads may share it, but while one waits for a key the others wait for it: `clone` makes another.

    Raises what torch's own stores raise: `DistStoreError` for a key that does not come in time,
    `DistNetworkError` for no answer at all.
    """

    def __init__(
        self, address: tuple[str, int], token: str, hello: Mapping[str, Any], timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._made_from = (address, token, hello)
        self._lock = threading.Lock()
        try:
            self._link = Link(address, token, timeout.total_seconds())
            refused = self._link.hello(hello).get("refused")
        except OSError as error:
            raise WorldError(
                f"the coordinator at {write_address(*address)} does not answer: {error}"
            ) from error
        if refused:
            raise WorldError(
                f"the coordinator at {write_address(*address)} refuses this worker: {refused}"
            )
        _open.append(self)

    @property
    def _timeout(self) -> timedelta:
        found: timedelta = self.timeout  # type: ignore[attr-defined]  # its C++ half keeps it
        return found

    def fileno(self) -> int:
        """Return the file that becomes readable when an answer came, or the coordinator is gone."""
        return self._link.fileno()

    def clone(self) -> Store:
        return TokenStore(*self._made_from, self._timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        return to_bytes(self._wait_for("get", self._timeout, key=key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for("wait", timeout or self._timeout, keys=list(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key=key, amount=amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys=list(keys)))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        return to_bytes(
            self._ask("compare_set", key=key, expected=_text(expected), value=_text(value))
        )

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key=key, value=_text(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key=key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  as torch's C++ half calls them

    def _wait_for(self, what: str, timeout: timedelta, **request: Any) -> Any:
        return self._ask(what, timeout.total_seconds(), seconds=timeout.total_seconds(), **request)

    def _ask(self, what: str, timeout: float = 0.0, **request: Any) -> Any:
        with self._lock:
            try:
                self._link.send({"do": what, **request})
                answer = self._link.receive(timeout + SLACK_SECONDS)
            except OSError as error:
                self._link.close()
                raise DistNetworkError(f"the store of this run does not answer: {error}") from error
            except BaseException:
                # an answer that is still to come would be taken for that of the next request
                self._link.close()
                raise
        if late := answer.get("late"):
            raise DistStoreError(
                f"waited {timeout:g} s for the keys {', '.join(late)} of the store of this run, and they did not come"
            )
        return answer.get("value")


def _text(value: str | bytes) -> str:
    return to_text(value.encode() if isinstance(value, str) else value)
