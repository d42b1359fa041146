"""The batches of one step as a worker sees them, and the endless streams that can fill them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from samestep.data.plan import check_end
from samestep.data.random_state import key, keyed
from samestep.errors import DataError


@dataclass
class Batch:
    """A step's global batch from `run.batches` or `run.streams`; iterates over lane batches.

    Those are the batches of this worker's lanes, in lane order, as returned by `collate_fn` or the
    stream. Lanes without samples are skipped. A batch may be iterated more than once. `counts`
    holds the number of samples of each of the run's lanes, if a plan knows them.
    """

    epoch: int
    lanes: range
    counts: Sequence[int] | None
    source: Iterator[Any]
    data_seconds: float = 0.0
    _loaded: list[tuple[int, Any]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        return (data for _, data in self.lane_batches())

    def lane_batches(self) -> Iterator[tuple[int, Any]]:
        """Yield (lane, lane batch), loading those that were not loaded before."""
        with_samples = [lane for lane in self.lanes if self.counts is None or self.counts[lane]]
        for number, lane in enumerate(with_samples):
            if number == len(self._loaded):
                started = time.perf_counter()
                self._loaded.append((lane, next(self.source)))
                self.data_seconds += time.perf_counter() - started
            yield self._loaded[number]

    def load(self) -> None:
        """Load the lane batches that were not iterated, so that the source is at the next step."""
        for _ in self.lane_batches():
            pass


def items_in(batch: Any) -> int:
    """Return the length of the first tensor or sequence in a collated batch, 1 if there is none."""
    if hasattr(batch, "shape"):
        return int(batch.shape[0]) if len(batch.shape) else 1
    if isinstance(batch, dict):
        return items_in(next(iter(batch.values()))) if batch else 0
    if isinstance(batch, tuple) and batch:
        return items_in(batch[0])
    return len(batch) if hasattr(batch, "__len__") else 1


def to_device(batch: Any, device: Any) -> Any:
    """Return a collated batch with every tensor on `device`; containers keep their types."""
    if hasattr(batch, "to"):
        # a non-blocking copy to the CPU could be read before it is complete
        return batch.to(device, non_blocking=str(device) != "cpu")
    if isinstance(batch, dict):
        return type(batch)((name, to_device(value, device)) for name, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class LaneStream:
    """The source of one lane: counts its items, and seeds every generator before each item.

    A source with `state_dict` and `load_state_dict` is restored by them. Any other is created again
    and read up to its position.
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
                    f"stream {self._name!r} of lane {self._lane} must be endless, but ended after"
                    f" {self._given} items; repeat it inside make_stream"
                ) from None
        self._given += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the number of items so far, and the source's own state if it has one."""
        has_state = hasattr(self._source, "state_dict")
        return {"given": self._given, "source": self._source.state_dict() if has_state else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        if state["source"] is None:
            while self._given < state["given"]:
                next(self)
        else:
            self._source.load_state_dict(state["source"])
            self._items = iter(self._source)  # many sources read their state when iteration starts
            self._given = state["given"]


def stream_batches(
    streams: Mapping[int, LaneStream], lanes: range, steps: int | None = None
) -> Iterator[Batch]:
    """Yield a `Batch` per step with one item of each lane's stream; without `steps`, forever."""
    for _ in count() if steps is None else range(steps):
        batch = Batch(0, lanes, None, (next(streams[lane]) for lane in lanes))
        yield batch
        batch.load()


def steps_left(steps: int | None, done: int) -> int | None:
    """Return how many of a loop's `steps` are left after `done`, None if it has no end."""
    check_end("steps", steps)
    return None if steps is None else max(0, steps - done)
