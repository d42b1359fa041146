"""Lists of small objects in one block of memory, which loader processes can share."""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar, overload

import torch

from samestep.errors import DataError

Item = TypeVar("Item")
PAGE_BYTES: Final = 4096
SAMPLED_ITEMS: Final = 256  # to estimate the size of the others


class PackedList(Sequence[Item]):
    """A read-only list that stores its items as bytes in one block; each access unpickles a copy.

    Reading a Python object writes to its reference count, so each loader process ends up with its
    own copy of all memory pages that hold objects. The block stays shared, and is smaller than the
    objects were. For plain values, small objects and arrays that can be pickled. Raises `DataError`
    for items that cannot be pickled, and for tensors.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        block, self._starts = io.BytesIO(), array("q", [0])
        packer = _Packer(block, protocol=pickle.HIGHEST_PROTOCOL)
        for number, item in enumerate(items):
            try:
                packer.dump(item)
            except Exception as error:
                raise DataError(
                    f"item {number}, {type(item).__name__}, cannot be packed:"
                    f" {type(error).__name__}: {error}"
                ) from error
            packer.clear_memo()
            self._starts.append(block.tell())
        self._block = block.getvalue()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
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
        data = self._block[self._starts[number] : self._starts[number + 1]]
        item: Item = pickle.loads(data)  # noqa: S301 (bytes pickled above, in this memory)
        return item


def pack_small_items(dataset: Any) -> Any:
    """Return a plain list or tuple of small objects as a `PackedList`, any other data set as it is.

    An item larger than a page is not packed: buffers have no reference count, so loader processes
    share most of its memory.
    """
    if type(dataset) not in {list, tuple}:
        return dataset
    try:
        sample = PackedList(dataset[:: max(1, len(dataset) // SAMPLED_ITEMS)])
        return PackedList(dataset) if sample.nbytes < PAGE_BYTES * len(sample) else dataset
    except DataError:
        return dataset


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise TypeError(
                "a tensor would be copied on every access; put all items into one tensor, as"
                " torch.utils.data.TensorDataset does"
            )
        return NotImplemented
