"""The scalars of a run: a curve by name, to which many rows are appended at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from samestep.record.source import StepPosition
from samestep.watch.curves import Curve, to_float

MOST_SCALARS: Final = 10_000  # by name: each takes about 1 KB, but only some bytes of a record
FEW_ROWS: Final = 8  # for which arrays do not pay
PLAIN: Final = {float, int}


class ScalarEvent(NamedTuple):
    """The scalars of an event by name, and the edges of their band, empty if there is none."""

    position: StepPosition
    time: float
    values: Mapping[str, Any]
    low: Mapping[str, Any]
    high: Mapping[str, Any]


class Rows:
    """Events with the same names of scalars: as they were, and as rows of numbers."""

    def __init__(self) -> None:
        self.events: list[ScalarEvent] = []
        # [step, is between steps, time, values, and with a band their low and high edges]
        self.numbers: list[list[float]] = []


class Scalars:
    """The curves of a run by name.

    Appending rows at once takes a tenth of the time. `curves` have all that was added after
    `append_rows`.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.is_cut = False  # there are more than `MOST_SCALARS` names
        # by names, and whether there is a band; a name is only in one of them
        self._rows: dict[tuple[tuple[str, ...], bool], Rows] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all curves."""
        return sum(curve.nbytes for curve in self.curves.values())

    def add(self, event: ScalarEvent) -> None:
        """Add the values of an event. Values that no run writes are ignored."""
        position, time, values, low, high = event
        names = tuple(values)
        numbers, has_band = [*values.values()], bool(low or high)
        if has_band:
            numbers += [edges.get(name, math.nan) for edges in (low, high) for name in names]
        if not set(map(type, numbers)) <= PLAIN:
            self.append_rows()
            self._append(event)
            return
        if (rows := self._rows.get((names, has_band))) is None:
            if any(not set(names).isdisjoint(others) for others, _ in self._rows):
                self.append_rows()  # a curve has its points in order
            rows = self._rows[names, has_band] = Rows()
        rows.events.append(event)
        rows.numbers.append([position[0], not position[1], time, *numbers])

    def append_rows(self) -> None:
        """Append what was added to the curves."""
        waiting, self._rows = self._rows, {}
        for (names, has_band), rows in waiting.items():
            try:
                columns = np.array(rows.numbers, np.float64).T
            except OverflowError:  # an integer that no float can hold
                columns = np.empty((0, 0))
            if not len(columns) or columns.shape[1] < FEW_ROWS:
                for event in rows.events:
                    self._append(event)
                continue
            for number, name in enumerate(names, start=3):
                if (curve := self._curve(name)) is not None:
                    band = columns[number + len(names) :: len(names)] if has_band else None
                    curve.extend(columns[[0, 1, 2, number]], band)

    def _append(self, event: ScalarEvent) -> None:
        position, time, values, low, high = event
        for name, value in values.items():
            if isinstance(value, (int, float)) and (curve := self._curve(name)) is not None:
                edges = to_float(low.get(name)), to_float(high.get(name))
                curve.append(position, time, to_float(value), *edges)

    def _curve(self, name: str) -> Curve | None:
        if (curve := self.curves.get(name)) is None:
            if len(self.curves) == MOST_SCALARS:
                self.is_cut = True
                return None
            curve = self.curves[name] = Curve()
        return curve

    def discard_after(self, last: StepPosition) -> None:
        """Remove all points after a position."""
        self.append_rows()
        for curve in self.curves.values():
            curve.discard_after(last)
        self.curves = {name: curve for name, curve in self.curves.items() if len(curve)}

    def flush(self, rows: int) -> None:
        """Keep curves in arrays, of at most `rows` points each."""
        for curve in self.curves.values():
            curve.flush(rows)
