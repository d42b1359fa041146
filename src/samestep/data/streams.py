"""Endless sources, one a lane: iterable data and environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from samestep.data.batch import Batch
from samestep.data.plan import check_end
from samestep.data.random_state import key, keyed
from samestep.errors import DataError


class LaneStream:
    """One lane's source: counts what it gave, and draws every item under a key of its own.

    A source with `state_dict` and `load_state_dict` is put back by them; any other is made again
    and read up to where it was.
    """

    def __init__(self, make_stream: Callable[[int], Any], name: str, lane: int, seed: int) -> None:
        self._name, self._lane, self._seed = name, lane, seed
        self._given = 0
        with keyed(key(seed, f"stream {name}", lane)):
            self._source = make_stream(lane)
            self._items = iter(self._source)

    def __iter__(self) -> LaneStream:
        return self

    def __next__(self) -> Any:
        with keyed(key(self._seed, f"stream {self._name}", self._lane, self._given)):
            try:
                item = next(self._items)
            except StopIteration:
                raise DataError(
                    f"stream {self._name!r} of lane {self._lane} ended after {self._given} items; expected an endless one: "
                    "repeat it inside make_stream"
                ) from None
        self._given += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the number of items given, and the source's own state where it has one."""
        has_state = hasattr(self._source, "state_dict")
        return {"given": self._given, "source": self._source.state_dict() if has_state else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        if state["source"] is None:
            while self._given < state["given"]:
                next(self)
        else:
            self._source.load_state_dict(state["source"])
            # many sources look at their state only when an iteration starts
            self._items = iter(self._source)
            self._given = state["given"]


def stream_batches(
    streams: Mapping[int, LaneStream], lanes: range, steps: int | None = None
) -> Iterator[Batch]:
    """Yield a `Batch` a step with an item of each lane's stream, for `steps` steps or for ever."""
    for _ in count() if steps is None else range(steps):
        batch = Batch(0, lanes, None, (next(streams[lane]) for lane in lanes))
        yield batch
        batch.load()


def steps_left(steps: int | None, done: int) -> int | None:
    """Return how many of a loop's `steps` are left after `done`, None where it has no end. Raises `ConfigError` for a wrong number."""
    check_end("steps", steps)
    return None if steps is None else max(0, steps - done)
