"""Which workers have other bits than most, of what is the same on all of them, and its error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from samestep.errors import DivergenceError

Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=DivergenceError)

CAUSES: Final = "A processor or its memory is faulty, or an operation is not deterministic"


def majority(values: Sequence[Value]) -> Value | None:
    """Return the JSON value of more than half of at least three workers, None if there is none."""
    texts = [json.dumps(value, sort_keys=True) for value in values]
    text, votes = Counter(texts).most_common(1)[0]
    return values[texts.index(text)] if len(values) > 2 and 2 * votes > len(values) else None


def differing(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of what is not equal in all mappings."""
    names = dict.fromkeys(name for value in values for name in value)
    return [name for name in names if len({value.get(name) for value in values}) > 1]


def grouped(values: Mapping[int, Value], hosts: Sequence[str]) -> dict[Value, str]:
    """Return the workers that have each of the `values`, which are by rank."""
    workers: dict[Value, list[str]] = {}
    for rank, value in values.items():
        workers.setdefault(value, []).append(f"{rank} ({hosts[rank]})")
    return {value: f"worker {', '.join(names)}" for value, names in workers.items()}


class Disagreement:
    """Who is wrong, if the values of workers differ. `rows` have each one's host, device and value.

    `earlier` are the values, by rank, that some computed before all workers did so.
    """

    def __init__(
        self,
        rows: Sequence[tuple[str, str, Any]],
        earlier: Mapping[int, Sequence[Any]] | None = None,
    ) -> None:
        earlier = earlier or {}
        self._rows, values = rows, [value for _, _, value in rows]
        self._expected = majority(values)  # None with two workers
        self._computed = [[*earlier.get(rank, ()), value] for rank, value in enumerate(values)]
        outvoted = [rank for rank, own in enumerate(self._computed) if self._has_other(own)]
        self.is_certain = self._expected is not None and 2 * len(outvoted) < len(rows)
        self.ranks = outvoted if self.is_certain else sorted(earlier) or outvoted

    def _has_other(self, values: Sequence[Any]) -> bool:
        return any(value != self._expected for value in values)

    def describe(self, what: str) -> str:
        """Say who computed wrong bits of `what`, or which workers may have, and why."""
        rows = [(rank, *self._rows[rank]) for rank in self.ranks]
        who = " and ".join(f"worker {rank} ({host}, {device})" for rank, host, device, _ in rows)
        again = [self._computed[rank] for rank in self.ranks if self._computed[rank][1:]]
        if self.is_certain:
            then = ""
            if again:
                bits = "wrong bits again" if self._has_other(again[0][-1:]) else "the right bits"
                then = f". Computed once more, it had {bits}"
            return (
                f"{who} computed wrong bits {what}: most workers agree on others{then}. Its"
                " hardware is probably faulty"
            )
        if len(rows) == 1:
            return f"{who} computed other bits {what} when it computed them again. {CAUSES}"
        why = "there is no majority among all workers, which computed it again"
        if len(self._rows) == 2:
            why = "one of them is wrong, which a third worker could have found"
        changed = [rank for rank, *_ in rows if self._computed[rank][0] != self._computed[rank][-1]]
        unsteady = "".join(f". Worker {rank} had other bits the second time" for rank in changed)
        return f"{who} computed different bits {what}: {why}{unsteady}. {CAUSES}"

    def error(
        self, kind: type[Kind], rank: int, text: str, *, blames: bool = True, **at: Any
    ) -> Kind:
        """Return the error of worker `rank`: secondary if it is certainly right."""
        is_certain = blames and self.is_certain
        hosts, devices, _ = zip(*(self._rows[rank] for rank in self.ranks), strict=True)
        is_secondary = is_certain and rank not in self.ranks
        return kind(
            text,
            ranks=tuple(self.ranks),
            hosts=hosts,
            devices=tuple(filter(None, devices)),
            is_certain=is_certain,
            is_secondary=is_secondary,
            **at,
        )
