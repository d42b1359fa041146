"""The key-value store of one attempt, with the operations of torch.distributed's stores."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, Final

from samestep.comm.link import to_bytes, to_text
from samestep.launch.attempt import Message

MAX_SECONDS: Final = 1e9


class KeyValueStore:
    """Values by key, in memory.

    A request is `{"do": operation, …}` with values in base64. The answer is `{"value": …}`, or
    `{"late": keys}` if the keys were not set in time.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    async def handle(self, request: Message) -> dict[str, Any]:
        """Carry out a request. Raises `ValueError` if it is invalid."""
        try:
            return await self._handle(request)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"invalid request to a store: {error}") from error

    async def _handle(self, request: Message) -> dict[str, Any]:
        match request["do"]:
            case "wait":
                return await self._wait(_keys(request["keys"]), _seconds(request["seconds"]))
            case "get":
                (key,) = keys = _keys([request["key"]])
                return await self._wait(keys, _seconds(request["seconds"])) or {
                    "value": to_text(self._values[key])
                }
            case "check":
                return {"value": all(key in self._values for key in _keys(request["keys"]))}
            case "count":
                return {"value": len(self._values)}
            case _:
                return {"value": self._change(request)}

    def _change(self, request: Message) -> int | str | bool | None:
        (key,) = _keys([request["key"]])
        held = self._values.get(key)
        match request["do"]:
            case "set":
                self._set(key, to_bytes(request["value"]))
                return None
            case "append":
                self._set(key, (held or b"") + to_bytes(request["value"]))
                return None
            case "add":
                total = int(held or 0) + int(request["amount"])
                self._set(key, b"%d" % total)
                return total
            case "compare_set":
                expected, desired = to_bytes(request["expected"]), to_bytes(request["value"])
                if held == expected or (held is None and not expected):
                    self._set(key, desired)
                    return to_text(desired)
                # torch's stores return the expected value for a missing key
                return to_text(expected if held is None else held)
            case "delete":
                return self._values.pop(key, None) is not None
        raise ValueError(f"a store has no operation {request['do']!r}")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def _wait(self, keys: list[str], seconds: float) -> dict[str, Any]:
        """Return {} when all keys are set, and the missing keys after a timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while missing := [key for key in keys if key not in self._values]:
            arrival = loop.create_future()
            self._waiting[missing[0]].add(arrival)
            try:
                await asyncio.wait_for(arrival, deadline - loop.time())
            except asyncio.TimeoutError:
                return {"late": missing}
            finally:
                self._waiting[missing[0]].discard(arrival)
        return {}


def _seconds(number: Any) -> float:
    seconds = float(number)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"seconds must be from 0 to {MAX_SECONDS:g}, got {seconds}")
    return seconds


def _keys(keys: Any) -> list[str]:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"keys must be a list of strings, got {keys!r}")
    return keys
