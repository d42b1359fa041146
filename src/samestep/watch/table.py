"""Columns of numbers that grow row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

ROWS_AT_A_TIME: Final = 4096


class Table:
    """Rows that are appended at the end and struck out anywhere; they lie as one array a column, with up to half as much room again.

    What `columns` returned is never written to again, so that whoever has it may go on reading
    while the table changes.
    """

    def __init__(self, *dtypes: DTypeLike) -> None:
        self._arrays: list[NDArray[Any]] = [np.empty(0, dtype) for dtype in dtypes]
        self._rows = 0
        self._pending: list[Sequence[Any]] = []

    def __len__(self) -> int:
        return self._rows + len(self._pending)

    def append(self, row: Sequence[Any]) -> None:
        """Add a row: a number a column."""
        self._pending.append(row)
        if len(self._pending) >= ROWS_AT_A_TIME:
            self._flush()

    def columns(self) -> tuple[NDArray[Any], ...]:
        """Return each column as an array of all rows."""
        self._flush()
        return tuple(array[: self._rows] for array in self._arrays)

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Strike out all rows but those marked true."""
        self._arrays = [column[rows] for column in self.columns()]
        self._rows = int(np.count_nonzero(rows))

    def _flush(self) -> None:
        if not self._pending:
            return
        rows = self._rows + len(self._pending)
        if rows > len(self._arrays[0]):
            room = rows if self._rows == 0 else max(rows, self._rows * 3 // 2)
            self._arrays = [_enlarged(array, self._rows, room) for array in self._arrays]
        for array, values in zip(self._arrays, zip(*self._pending, strict=True), strict=True):
            array[self._rows : rows] = values
        self._rows = rows
        self._pending.clear()


def _enlarged(array: NDArray[Any], rows: int, room: int) -> NDArray[Any]:
    larger = np.empty(room, array.dtype)
    larger[:rows] = array[:rows]
    return larger
