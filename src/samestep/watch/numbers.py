"""Numbers out of events that anybody may have written, and into JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST: Final = 2.0**53  # steps and times beyond it are of no run


def number(value: object) -> float | None:
    """Return a number that a step or a time can be."""
    if isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST:
        return float(value)
    return None


def whole(value: object) -> int | None:
    """Return a number that counts something."""
    known = number(value)
    return None if known is None else int(known)


def real(value: object) -> float:
    """Return a number of any size, also one that is not finite; NaN where there is none."""
    if type(value) is float:  # nearly all are
        return value
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return math.nan


def to_json(values: NDArray[Any]) -> list[float | None]:
    """Return values as JSON has them: what is not finite is null."""
    return [
        value if finite else None
        for value, finite in zip(values.tolist(), np.isfinite(values).tolist(), strict=True)
    ]
