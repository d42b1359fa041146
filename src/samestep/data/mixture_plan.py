"""The plan of a mixture: rows of several sources by weights, which may change from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any, Final, NamedTuple

import numpy as np

from samestep.data.plan import (
    Indices,
    Plan,
    are_in,
    check_positive,
    dealt,
    in_order,
    lanes_of_places,
)
from samestep.data.random_state import Permutation, key
from samestep.errors import ConfigError, DataError

ROW: Final = 1 << 48  # parts of a row: what sources are owed is whole numbers, which are exact
KEPT: Final = 64  # steps before the last complete one, whose batches may be loaded again

Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]]
BatchSize = int | Callable[[int], int]


class Taken(NamedTuple):
    """What a step takes: rows of each source, by its batch size and the shares of a `ROW`."""

    rows: list[int]
    batch_size: int
    shares: list[int]


class Given(NamedTuple):
    """What sources have given before a step, in rows, and what they are owed, in parts of one.

    A source is owed its shares of all batches, minus what it has given.
    """

    rows: list[int]
    owed: list[int]


class MixturePlan(Plan):
    """Full batches, of which every source has its share; what each has given is all of the state.

    A source's row number n is row n % size of its epoch n // size, which has an order of its own.
    Weights and batch sizes may be functions of the loop's step, counted over all epochs: `begin`
    says which step of which epoch that is. Steps are computed one after the other, ahead of the
    loop, and the last `KEPT` complete ones are kept.
    """

    kind = "mixture"
    is_fixed = False  # a step follows from those before it

    def __init__(
        self,
        sizes: Mapping[str, int],
        batch_size: BatchSize,
        lanes: int,
        seed: int,
        *,
        weights: Weights,
        shuffle: bool,
    ) -> None:
        super().__init__(sum(sizes.values()), 1, lanes, seed, shuffle=shuffle)
        self._check()
        self._sizes, self._first = [*sizes.values()], [0, *accumulate(sizes.values())]
        self._names = [*sizes]
        self._weights, self._batch_size = weights, batch_size
        self.varies = callable(weights) or callable(batch_size)
        if not callable(batch_size):
            check_positive("batch_size", batch_size, "for all lanes together")
        self._shares = None if callable(weights) else shares_of(weights, self._names, "weights")
        self._steps_per_epoch: int | None = None
        self._order = lru_cache(2 * len(sizes))(self._permutation)
        self._indices = lru_cache(4)(self._indices_of)
        self.begin({}, 0, 0, 0)

    @property
    def steps_per_epoch(self) -> int:
        if self._steps_per_epoch is None:  # of a loop that begins
            self._steps_per_epoch = max(1, self.size // self._size_of_batch(0))
        return self._steps_per_epoch

    @property
    def fixed_batch_size(self) -> int | None:
        """The rows of every step, None if a function returns them."""
        return None if callable(self._batch_size) else self._batch_size

    def resume(self, state: Mapping[str, Any]) -> Given:
        """Use what `state` returned, {} at the start; return what sources had given."""
        self._steps_per_epoch = state.get("steps_per_epoch")
        self._others: dict[str, Any] = dict(state.get("sources", {}))
        rows, owed = [], []
        for name, size in zip(self._names, self._sizes, strict=True):
            source = self._others.pop(name, {"rows": 0, "owed": 0, **self._fixed(size)})
            changed = {key for key, value in self._fixed(size).items() if source[key] != value}
            for option in sorted(changed):
                raise DataError(
                    f"source {name!r} had {option}={source[option]} in the snapshot and has"
                    f" {option}={self._fixed(size)[option]} now, so that its rows would be lost or"
                    " repeated; restore it, or give the source a new name, with which it begins"
                )
            rows.append(source["rows"])
            owed.append(source["owed"])
        return Given(rows, owed)

    def begin(self, state: Mapping[str, Any], done: int, number: int, steps_per_epoch: int) -> None:
        """Go on at the loop's step `done`, which is `number` of steps of epochs from epoch 0."""
        given = self.resume(state)
        self._offset, self._epoch_steps = done - number, steps_per_epoch
        self._taken: dict[int, Taken] = {}
        self._given = {done: given}  # before a step
        self._indices.cache_clear()

    def state(self, done: int) -> dict[str, Any]:
        """Return what `resume` needs after `done` steps of the loop, as JSON, once these ended.

        Raises `DataError` if a function would choose otherwise now for the last one.
        """
        if (last := self._taken.get(done - 1)) is not None and self.varies:
            self._refuse_changed(done - 1, last)
        while (old := next(iter(self._given))) < done - KEPT:
            del self._given[old], self._taken[old]
        sources = {
            name: {"rows": rows, "owed": owed, **self._fixed(size)}
            for name, rows, owed, size in zip(
                self._names, *self._given[done], self._sizes, strict=True
            )
        }
        return {"steps_per_epoch": self.steps_per_epoch, "sources": {**self._others, **sources}}

    def chosen(self, number: int) -> dict[str, Any]:
        """Return the batch size of one of the last steps, and the sources' shares of a `ROW`."""
        taken = self._taken[number]
        shares = dict(zip(self._names, taken.shares, strict=True))
        return {"batch_size": taken.batch_size, "shares": shares}

    def to_record(self) -> dict[str, Any]:
        shares = None
        if self._shares is not None:
            shares = dict(zip(self._names, self._shares, strict=True))
        return {
            "kind": self.kind,
            "sizes": dict(zip(self._names, self._sizes, strict=True)),
            "batch_size": self.fixed_batch_size,
            "shares": shares,
            **self.describe(),
        }

    def uses(self, epoch: int, samples: Indices, steps: range) -> Indices:
        """Do what a plan does, for steps that follow those that `begin` was called with."""
        rows = [np.empty((0, 3), dtype=np.int64)]
        for step in steps:
            indices = self._indices(self._number(epoch, step))
            places = np.flatnonzero(np.isin(indices, samples))
            lanes = lanes_of_places(places, len(indices), self.lanes)
            rows.append(in_order(np.full_like(places, step), lanes, indices[places]))
        return np.concatenate(rows)

    def used(self, done: int) -> dict[str, tuple[int, float]]:
        """Return the rows and epochs that each source has given after `done` steps of the loop."""
        rows = zip(self._names, self._given[done].rows, self._sizes, strict=True)
        return {name: (number, number / size) for name, number, size in rows}

    def planned_counts(self, epoch: int, step: int) -> list[int]:
        return dealt(self._take(self._number(epoch, step)).batch_size, self.lanes)

    def planned_of_step(self, epoch: int, step: int) -> Indices:
        return self._indices(self._number(epoch, step))

    def planned(self, epoch: int, step: int, lane: int) -> Indices:
        indices = self.planned_of_step(epoch, step)
        batch = len(indices)
        return indices[lane * batch // self.lanes : (lane + 1) * batch // self.lanes]

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        # sizes are compared at any step, and the others may change
        options = {"lanes": self.lanes, "seed": self.seed, "shuffle": self.shuffle}
        return {**options, **self._describe_excluded()}

    def first_step_with(self, samples: Indices, epoch: int, stop: int) -> int | None:
        """Return 0 if the run has used a sample up to a step, None if not.

        Also None before `begin`, after which a loop asks again.
        """
        given = self._given.get(self._number(epoch, stop), Given([], [])).rows
        used = (
            self._span(n, 0, min(rows, size))
            for n, (rows, size) in enumerate(zip(given, self._sizes, strict=False))
            if rows
        )
        return 0 if len(samples) and any(are_in(rows, samples).any() for rows in used) else None

    def compared(self, epoch: int, step: int) -> dict[str, int | bool | str]:
        number = self._number(epoch, step)
        taken, given = self._take(number), self._given[number]
        columns = zip(self._names, self._sizes, given.rows, taken.rows, taken.shares, strict=True)
        sources = [
            f"{name} ({size} rows, {before} used, {now} now, share {share / ROW:.4g})"
            for name, size, before, now, share in columns
        ]
        plan = self.describe(epoch)
        return {**plan, "batch_size": taken.batch_size, "sources": ", ".join(sources)}

    def _fixed(self, size: int) -> dict[str, int | bool]:
        """Return what must stay the same for a source with rows that are used."""
        return {"size": size, "shuffle": self.shuffle}

    def _number(self, epoch: int, step: int) -> int:
        return self._offset + epoch * self._epoch_steps + step

    def _take(self, number: int) -> Taken:
        """Return what a step of the loop takes, after computing those before it."""
        for n in range(max(self._given), number + 1):
            given, chosen = self._given[n], self._choose(n)
            if self.varies and not self._taken:  # at once, not only after the step
                self._refuse_changed(n, chosen)
            rows = rows_due(chosen.shares, given.owed, chosen.batch_size)
            columns = zip(given.owed, chosen.shares, rows, strict=True)
            self._given[n + 1] = Given(
                [before + now for before, now in zip(given.rows, rows, strict=True)],
                [owed + chosen.batch_size * share - ROW * now for owed, share, now in columns],
            )
            self._taken[n] = chosen._replace(rows=rows)
        return self._taken[number]

    def _choose(self, number: int) -> Taken:
        shares = self._shares
        if shares is None:
            weights = _called(self._weights, "weights", number)
            shares = shares_of(weights, self._names, f"weights({number})")
        return Taken([], self._size_of_batch(number), shares)

    def _size_of_batch(self, number: int) -> int:
        if not callable(self._batch_size):
            return self._batch_size
        size: int = _called(self._batch_size, "batch_size", number)
        check_positive(f"batch_size({number})", size, "for all lanes together")
        return size

    def _refuse_changed(self, number: int, taken: Taken) -> None:
        again = self._choose(number)
        for name in ("batch_size", "shares"):
            if getattr(again, name) != getattr(taken, name):
                option = "weights" if name == "shares" else name
                raise DataError(
                    f"{option}({number}) returned another value when it was called again; steps are"
                    " loaded ahead and repeated after a resume, so make it a function of the step"
                    " alone"
                )

    def _indices_of(self, number: int) -> Indices:
        """Return the indices of a step, in the order of its lanes."""
        taken, given = self._take(number).rows, self._given[number].rows
        spans = [self._span(n, given[n], count) for n, count in enumerate(taken) if count]
        indices = np.concatenate(spans)
        if len(spans) > 1:
            # row j of n is (j + 1/2) / n of the way, so that all lanes have their share of each
            # source, and turned, so that these are not the same lanes in every step
            places = np.concatenate([(np.arange(len(span)) + 0.5) / len(span) for span in spans])
            turn = key(self.seed, "turn", number) % len(indices)
            indices = np.roll(indices[np.argsort(places, kind="stable")], turn)
        indices.flags.writeable = False
        return indices

    def _span(self, source: int, start: int, count: int) -> Indices:
        """Return `count` rows of a source from its row number `start`, which may begin epochs."""
        size, stop = self._sizes[source], start + count
        parts = []
        while start < stop:
            epoch, first = divmod(start, size)
            last = min(size, first + stop - start)
            rows = np.arange(first, last)
            if self.shuffle:
                rows = self._order(source, epoch).span(first, last)
            parts.append(self._first[source] + rows)
            start += last - first
        return np.concatenate(parts)

    def _permutation(self, source: int, epoch: int) -> Permutation:
        return Permutation(
            self._sizes[source], key(self.seed, f"source {self._names[source]}", epoch)
        )


def rows_due(shares: Sequence[int], owed: Sequence[int], batch_size: int) -> list[int]:
    """Return how many rows of each source a step takes: `batch_size`, none of those without share.

    Row j of a source may be taken when its shares exceed j - 1 rows, and is due when they are j. A
    step takes what is due, and then what is due next. So while shares stay the same, a source has
    never given one row more or less than its shares: the earliest deadline first meets all of them
    if any order does (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).
    If shares change, too much may be due at once; sources that are owed least then wait.
    """
    due = [before + batch_size * share for before, share in zip(owed, shares, strict=True)]
    taken = [max(0, parts // ROW) if share else 0 for parts, share in zip(due, shares, strict=True)]
    active = [source for source, share in enumerate(shares) if share]

    def until_due(source: int) -> tuple[bool, float]:
        parts = (taken[source] + 1) * ROW - due[source]
        return parts >= ROW, parts / shares[source]

    while (left := batch_size - sum(taken)) > 0:
        for source in sorted(active, key=until_due)[:left]:
            taken[source] += 1
    while (excess := sum(taken) - batch_size) > 0:
        taking = [source for source in active if taken[source]]
        for source in sorted(taking, key=lambda n: due[n] - taken[n] * ROW)[:excess]:
            taken[source] -= 1
    return taken


def shares_of(weights: Any, names: Sequence[str], what: str) -> list[int]:
    """Return each source's share of a row. Raises `ConfigError` for unusable weights."""
    if isinstance(weights, Mapping) and [*weights] == [*names]:
        whole = [*weights.values()]
        if all(type(share) is int and share >= 0 for share in whole) and sum(whole) == ROW:
            return whole  # shares already, as in a record
    expected = f"{what} must be a dict with a number for each of {', '.join(names)}"
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{expected}, got {type(weights).__name__}")
    if wrong := set(names) ^ weights.keys():
        name = min(wrong, key=str)
        problem = "misses" if name in names else "has no data set for"
        raise ConfigError(f"{expected}; it {problem} {name!r}")
    values = []
    for name in names:
        try:
            values.append(float(weights[name]))
        except (TypeError, ValueError):
            got = type(weights[name]).__name__
            raise ConfigError(f"{expected}, got {got} for {name!r}") from None
        if not (isfinite(values[-1]) and values[-1] >= 0):
            raise ConfigError(
                f"{what} must be finite numbers of at least 0, got {values[-1]} for {name!r}"
            )
    if (high := max(values)) == 0:
        raise ConfigError(f"{what} are all 0; at least one source needs a larger weight")
    sums = [*accumulate(value / high for value in values)]
    ends = [0, *(round(ROW * (end / sums[-1])) for end in sums)]
    return [stop - start for start, stop in pairwise(ends)]


def _called(function: Any, name: str, step: int) -> Any:
    try:
        return function(step)
    except Exception as error:
        message = f"{name}({step}) failed: {type(error).__name__}: {error}"
        raise ConfigError(message) from error
