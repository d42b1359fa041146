"""Where the workers of one attempt on several hosts find each other: keys and values, as torch.distributed's stores have them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from samestep.comm.link import to_bytes, to_text

MOST_SECONDS: Final = 1e9


class Keys:
    """Values by key. A request is {"do": what, …} with values in base64; the answer {"value": …}, or {"late": keys} when time ran out."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked. Raises `ValueError` for a request that makes no sense."""
        try:
            return await self._answer(request)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"no request to a store: {error}") from error

    async def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "wait":
                return await self._wait(_texts(request["keys"]), _seconds(request["seconds"]))
            case "get":
                (key,) = keys = _texts([request["key"]])
                return await self._wait(keys, _seconds(request["seconds"])) or {
                    "value": to_text(self._values[key])
                }
            case "check":
                return {"value": all(key in self._values for key in _texts(request["keys"]))}
            case "count":
                return {"value": len(self._values)}
            case _:
                return {"value": self._change(request)}

    def _change(self, request: Mapping[str, Any]) -> int | str | bool | None:
        (key,) = _texts([request["key"]])
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
                # a key that is not there counts as what was expected
                return to_text(expected if held is None else held)
            case "delete":
                return self._values.pop(key, None) is not None
        raise ValueError(f"a store cannot {request['do']!r}")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def _wait(self, keys: list[str], seconds: float) -> dict[str, Any]:
        """Return nothing when all keys are there."""
        deadline = asyncio.get_running_loop().time() + seconds
        while missing := [key for key in keys if key not in self._values]:
            arrival = asyncio.get_running_loop().create_future()
            self._waiting[missing[0]].add(arrival)
            try:
                await asyncio.wait_for(arrival, deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                return {"late": missing}
            finally:
                self._waiting[missing[0]].discard(arrival)
        return {}


def _seconds(number: Any) -> float:
    seconds = float(number)
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"a store cannot wait {seconds} s")
    return seconds


def _texts(keys: Any) -> list[str]:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{keys!r} are no keys of a store")
    return keys
