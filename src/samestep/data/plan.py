"""The assignment of samples to lanes: a pure (seed, epoch, step, lane) → sample indices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from samestep.data.permutation import Permutation
from samestep.data.random_state import key
from samestep.errors import ConfigError, DataError

Indices = NDArray[np.int64]
GroupBy = Callable[[int], Hashable] | Sequence[Hashable] | NDArray[np.generic]


class Plan(Protocol):
    """A plan assigns every sample exactly once per epoch to a step and a lane."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that use every sample once."""

    def counts(self, epoch: int, step: int) -> list[int]:
        """Return the number of samples of each lane; `step` counts within the epoch."""

    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        """Return a lane's sample indices, int64 and read-only; consecutive calls are fast."""

    def describe(self) -> dict[str, int | bool]:
        """Return the values that identify the plan."""


class ShuffledPlan:
    """Consecutive slices of a permutation, or of the data set without `shuffle`, in O(1) memory.

    Step s takes positions [s*batch_size, (s+1)*batch_size); lane l of b samples takes [l*b//lanes,
    (l+1)*b//lanes) of them.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        lanes: int,
        seed: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        _check(size, batch_size)
        self.size, self.batch_size, self.lanes, self.seed = size, batch_size, lanes, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.steps_per_epoch = size // batch_size if drop_last else -(-size // batch_size)
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"batch_size={batch_size} with drop_last leaves none of {size} samples; decrease it"
                " or keep the last batch"
            )
        self._full_counts = self._deal(batch_size)

    def counts(self, epoch: int, step: int) -> list[int]:
        left = self.size - step * self.batch_size
        return self._full_counts.copy() if left >= self.batch_size else self._deal(left)

    def _deal(self, batch: int) -> list[int]:
        ends = [lane * batch // self.lanes for lane in range(self.lanes + 1)]
        return [stop - start for start, stop in pairwise(ends)]

    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        first = step * self.batch_size
        batch = min(self.batch_size, self.size - first)
        start, stop = first + lane * batch // self.lanes, first + (lane + 1) * batch // self.lanes
        if not self.shuffle:
            return np.arange(start, stop)
        return _epoch_order(self.size, self.seed, epoch).span(start, stop)

    def describe(self) -> dict[str, int | bool]:
        return {**_describe(self), "drop_last": self.drop_last}


class GroupedPlan:
    """Lane batches with samples of one group only, every sample once, in O(size) memory.

    Each group is cut into chunks of ceil(batch_size / lanes) samples; its last one may be shorter.
    A step takes the next floor(batch_size / chunk) chunks in the epoch's order, one per lane.
    """

    def __init__(
        self,
        groups: GroupBy,
        size: int,
        batch_size: int,
        lanes: int,
        seed: int,
        *,
        shuffle: bool = True,
    ) -> None:
        _check(size, batch_size)
        self.size, self.batch_size, self.lanes = size, batch_size, lanes
        self.seed, self.shuffle = seed, shuffle
        self._members = _members(groups, size)
        self._chunk = -(-batch_size // lanes)
        self._chunks_per_step = batch_size // self._chunk
        self._sizes = np.asarray([len(members) for members in self._members])
        # of each group, followed by the total
        self._first_chunk = np.concatenate([[0], np.cumsum(-(-self._sizes // self._chunk))])

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps that use every chunk once."""
        return -(-int(self._first_chunk[-1]) // self._chunks_per_step)

    def counts(self, epoch: int, step: int) -> list[int]:
        groups, starts = self._chunks(epoch, step)
        counts: list[int] = np.minimum(self._sizes[groups] - starts, self._chunk).tolist()
        return counts + [0] * (self.lanes - len(counts))

    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        groups, starts = self._chunks(epoch, step)
        if lane >= len(groups):
            return np.empty(0, dtype=np.int64)
        group, start = int(groups[lane]), int(starts[lane])
        members = self._members[group]
        positions = np.arange(start, min(start + self._chunk, len(members)))
        if self.shuffle:
            positions = _group_order(len(members), self.seed, group, epoch)[positions]
        return members[positions]

    def _chunks(self, epoch: int, step: int) -> tuple[Indices, Indices]:
        """Return the group of each chunk of a step, and its start in the group."""
        chunks = int(self._first_chunk[-1])
        start, stop = step * self._chunks_per_step, min((step + 1) * self._chunks_per_step, chunks)
        if self.shuffle:
            taken = _chunk_order(chunks, self.seed, epoch).span(start, stop)
        else:
            taken = np.arange(start, stop)
        groups = np.searchsorted(self._first_chunk, taken, side="right") - 1
        return groups, (taken - self._first_chunk[groups]) * self._chunk

    def describe(self) -> dict[str, int | bool]:
        return {**_describe(self), "groups": len(self._members)}


@lru_cache(maxsize=4)  # an order in use holds tables and blocks of a few MiB
def _epoch_order(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, key(seed, "epoch", epoch))


@lru_cache(maxsize=4)
def _chunk_order(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, key(seed, "chunks", epoch))


@lru_cache(maxsize=64)
def _group_order(size: int, seed: int, group: int, epoch: int) -> Permutation:
    return Permutation(size, key(seed, f"group {group}", epoch))


def _members(groups: GroupBy, size: int) -> list[Indices]:
    """Return the sample indices of each group, ordered by the groups' first samples."""
    if callable(groups):
        labels = [groups(index) for index in range(size)]
    else:
        labels = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(labels) != size:
        raise DataError(
            f"group_by has {len(labels)} entries for {size} samples; pass one entry per sample or"
            " a function of the index"
        )
    members: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        # tensors compare by identity, so each would be its own group
        group = label.tolist() if hasattr(label, "tolist") else label
        try:
            members.setdefault(group, []).append(index)
        except TypeError:
            raise DataError(
                f"group_by must return hashable values, got {group!r} for sample {index}"
            ) from None
    return [np.asarray(indices, dtype=np.int64) for indices in members.values()]


def check_end(name: str, value: int | None) -> None:
    """Raise `ConfigError` unless `value` is a number of epochs or steps; None means no end."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{name} must be a whole number of at least 0 or None, got {value!r}")


def _describe(plan: ShuffledPlan | GroupedPlan) -> dict[str, int | bool]:
    names = ("batch_size", "lanes", "seed", "shuffle")
    return {"samples": plan.size, **{name: getattr(plan, name) for name in names}}


def _check(size: int, batch_size: int) -> None:
    if size < 1:
        raise DataError("the data set has no samples; check its path and filters")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            f"batch_size (of the global batch) must be a whole number of at least 1,"
            f" got {batch_size!r}"
        )
