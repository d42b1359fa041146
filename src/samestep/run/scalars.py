"""Scalars as the record takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from samestep.step.means import Means

Scalars: TypeAlias = dict[str, float]


def scalars_of(
    means: Mapping[str, Any], others: Mapping[str, Any]
) -> tuple[Scalars, Scalars, Scalars]:
    """Return values by name and, of those that are means over items, the lowest and the highest worker's.

    A mapping among `others` gives a value for each of its names, which get its own name and a slash
    in front.
    """
    values: Scalars = {}
    by_worker: dict[str, list[float]] = {}
    for name, value in [("", means), *others.items()]:
        if not isinstance(value, Mapping):
            values[name] = float(value)
            continue
        for inner, one in value.items():
            full = f"{name}/{inner}" if name else inner
            values[full] = float(one)
            if isinstance(value, Means):
                by_worker[full] = value.by_worker(inner)
    return (
        values,
        {name: min(some) for name, some in by_worker.items()},
        {name: max(some) for name, some in by_worker.items()},
    )
