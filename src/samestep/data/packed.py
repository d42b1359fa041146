"""Lists of Python objects that loader processes share without copying them."""

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
LOOKED_AT: Final = 256  # items that tell how large the others are


class PackedList(Sequence[Item]):
    """A read-only list that keeps its items as bytes, in one block of memory; looking one up makes it anew.

    Whoever looks at a Python object writes to its count of references. So each loader process comes
    to own a copy of all pages that hold such objects, while the block stays shared, and takes less
    memory than the objects did. For plain values, small objects and arrays that can be pickled.
    Raises `DataError` for items that cannot be, and for tensors.
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
