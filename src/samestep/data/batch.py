"""One global batch as a worker sees it: the batches of the lanes that it carries."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass
class Batch:
    """What `run.batches` and `run.streams` yield for a step; iterate it for this worker's lane batches, in lane order.

    Lane batches are as `collate_fn` (or the stream) made them; lanes without samples have none. A
    batch may be iterated more than once. `counts` holds the samples of each of the run's lanes
    where a plan knows them.
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
        """Yield (lane, lane batch), loading what was not loaded before."""
        lanes_with_samples = [
            lane for lane in self.lanes if self.counts is None or self.counts[lane]
        ]
        for number, lane in enumerate(lanes_with_samples):
            if number == len(self._loaded):
                started = time.perf_counter()
                self._loaded.append((lane, next(self.source)))
                self.data_seconds += time.perf_counter() - started
            yield self._loaded[number]

    def load(self) -> None:
        """Load what nobody iterated, so that the source stands at the next step."""
        for _ in self.lane_batches():
            pass


def items_in(batch: Any) -> int:
    """Return the length of the first tensor or sequence found in a collated batch; 1 where there is none."""
    if hasattr(batch, "shape"):
        return int(batch.shape[0]) if len(batch.shape) else 1
    if isinstance(batch, dict):
        return items_in(next(iter(batch.values()))) if batch else 0
    if isinstance(batch, tuple) and batch:
        return items_in(batch[0])
    return len(batch) if hasattr(batch, "__len__") else 1


def to_device(batch: Any, device: Any) -> Any:
    """Return a collated batch with every tensor in it on `device`; containers keep their types."""
    if hasattr(batch, "to"):
        # on its way to the CPU it would be read before it has arrived
        return batch.to(device, non_blocking=str(device) != "cpu")
    if isinstance(batch, dict):
        return type(batch)((name, to_device(value, device)) for name, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
