"""A number that is known to lie in a range: medians with their spread, and what is computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Range:
    """The `lowest`, the `middle` and the `highest` that a number may be."""

    lowest: float
    middle: float
    highest: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        """Return the range of a number that is known."""
        return cls(value, value, value)

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        """Return the median of some measurements, of which there must be one at least, between the lowest and the highest."""
        some = sorted(values)
        return cls(some[0], median(some), some[-1])

    def __add__(self, other: Range) -> Range:
        return Range(
            self.lowest + other.lowest, self.middle + other.middle, self.highest + other.highest
        )

    def times(self, factor: float) -> Range:
        """Return the range of the number times a factor of at least 0."""
        return Range(self.lowest * factor, self.middle * factor, self.highest * factor)

    def over(self, other: Range) -> Range:
        """Return the range of the number divided by another, which must be above 0."""
        return Range(
            self.lowest / other.highest, self.middle / other.middle, self.highest / other.lowest
        )

    def __contains__(self, value: float) -> bool:
        return self.lowest <= value <= self.highest
