"""One global batch as a worker sees it: the batches of the lanes that it carries."""

from __future__ import annotations

import io
import pickle
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, overload

import torch

from samestep.errors import DataError


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


Item = TypeVar("Item")
PAGE_BYTES: Final = 4096
LOOKED_AT: Final = 256  # items that tell how large the others are


class PackedList(Sequence[Item]):
    """A read-only list that stores its items as bytes in one block of memory.

    Reading a Python object changes its reference count, so each loader process ends up with its own
    copy of the memory pages that hold such objects. The block stays shared, and takes less memory
    than the objects. Each access creates the item again.

    Args:
        items: Plain values, small objects or arrays that can be pickled.

    Raises:
        DataError: An item cannot be pickled, or contains a tensor.

    Example:
        >>> records = ss.PackedList([{"file": "a.png", "label": 3}, {"file": "b.png", "label": 5}])
        >>> records[1]["label"], len(records)
        (5, 2)
    """

    def __init__(self, items: Iterable[Item]) -> None:
        block, self._starts = io.BytesIO(), array("q", [0])
        packer = _Packer(block, protocol=pickle.HIGHEST_PROTOCOL)
        for number, item in enumerate(items):
            try:
                packer.dump(item)
            except Exception as error:
                raise DataError(
                    f"item {number}, {type(item).__name__}, cannot be packed: {type(error).__name__}: {error}"
                ) from error
            packer.clear_memo()
            self._starts.append(block.tell())
        self._block = block.getvalue()

    @property
    def nbytes(self) -> int:
        """Bytes of all items together."""
        return len(self._block)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        # bytes made above, in this memory
        item: Item = pickle.loads(self._block[self._starts[number] : self._starts[number + 1]])  # noqa: S301
        return item


def packed_where_it_pays(dataset: Any) -> Any:
    """Return a plain list or tuple of many small objects packed, and any other data set as it is.

    An item of more than a page costs a loader process less than its bytes, since buffers have no
    count of references.
    """
    if type(dataset) not in {list, tuple}:
        return dataset
    try:
        some = PackedList(dataset[:: max(1, len(dataset) // LOOKED_AT)])
        return PackedList(dataset) if some.nbytes < PAGE_BYTES * len(some) else dataset
    except DataError:
        return dataset


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise TypeError(
                "a tensor would be copied whole, and slowly; keep tensors in one, as torch.utils.data.TensorDataset does"
            )
        return NotImplemented
