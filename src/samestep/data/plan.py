"""Which sample goes to which lane: the pure function (seed, epoch, step, lane) → sample indices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from samestep.data.permutation import Permutation
from samestep.data.random_state import key
from samestep.errors import ConfigError, DataError

Indices = NDArray[np.int64]
GroupBy = Callable[[int], Hashable] | Sequence[Hashable] | NDArray[np.generic]


class Plan(Protocol):
    """Every sample exactly once an epoch, dealt to `lanes` lanes."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that use every sample once."""

    def counts(self, epoch: int, step: int) -> list[int]:
        """Return the number of samples of each lane; `step` counts within the epoch."""

    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        """Return the sample indices of a lane, int64, not to be written to; lanes and steps near each other are cheap in turn."""

    def describe(self) -> dict[str, int | bool]:
        """Return what must be equal for two plans to be the same."""


class ShuffledPlan:
    """Consecutive slices of a permutation (or of the data set, without `shuffle`): O(1) memory at any size.

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
                f"batch_size={batch_size} with drop_last leaves none of {size} samples: lower it or keep the last batch"
            )
        self._full_counts = self._deal(batch_size)

    def counts(self, epoch: int, step: int) -> list[int]:
        left = self.size - step * self.batch_size
        return self._full_counts.copy() if left >= self.batch_size else self._deal(left)

    def _deal(self, batch: int) -> list[int]:
        return [
            (lane + 1) * batch // self.lanes - lane * batch // self.lanes
            for lane in range(self.lanes)
        ]

    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        first = step * self.batch_size
        batch = min(self.batch_size, self.size - first)
        start, stop = first + lane * batch // self.lanes, first + (lane + 1) * batch // self.lanes
        return (
            _epoch_order(self.size, self.seed, epoch).span(start, stop)
            if self.shuffle
            else np.arange(start, stop)
        )

    def describe(self) -> dict[str, int | bool]:
        return {
            "samples": self.size,
            "batch_size": self.batch_size,
            "lanes": self.lanes,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }


class GroupedPlan:
    """Lane batches that hold samples of one group only, every sample once.

    Each group is cut into chunks of ceil(batch_size / lanes) samples (its last one may be shorter)
    and a step takes the next floor(batch_size / chunk) chunks in an order drawn for the epoch, a
    lane each. O(size) memory.
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
        self.size, self.batch_size, self.lanes, self.seed, self.shuffle = (
            size,
            batch_size,
            lanes,
            seed,
            shuffle,
        )
        self._members = _members(groups, size)
        self._chunk = -(-batch_size // lanes)
        self._chunks_per_step = batch_size // self._chunk
        self._sizes = np.asarray([len(members) for members in self._members])
        # of each group, and the end
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
        return members[
            _group_order(len(members), self.seed, group, epoch)[positions]
            if self.shuffle
            else positions
        ]

    def _chunks(self, epoch: int, step: int) -> tuple[Indices, Indices]:
        """Return the group of each chunk of a step, and where in the group it starts."""
        chunks = int(self._first_chunk[-1])
        start, stop = step * self._chunks_per_step, min((step + 1) * self._chunks_per_step, chunks)
        taken = (
            _chunk_order(chunks, self.seed, epoch).span(start, stop)
            if self.shuffle
            else np.arange(start, stop)
        )
        groups = np.searchsorted(self._first_chunk, taken, side="right") - 1
        return groups, (taken - self._first_chunk[groups]) * self._chunk

    def describe(self) -> dict[str, int | bool]:
        return {
            "samples": self.size,
            "batch_size": self.batch_size,
            "lanes": self.lanes,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "groups": len(self._members),
        }


@lru_cache(maxsize=4)  # orders that are walked hold tables and blocks of a few MiB
def _epoch_order(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, key(seed, "epoch", epoch))


@lru_cache(maxsize=4)
def _chunk_order(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, key(seed, "chunks", epoch))


@lru_cache(maxsize=64)
def _group_order(size: int, seed: int, group: int, epoch: int) -> Permutation:
    return Permutation(size, key(seed, f"group {group}", epoch))


def _members(groups: GroupBy, size: int) -> list[Indices]:
    """Return the sample indices of each group, groups in the order of their first sample."""
    if callable(groups):
        labels = [groups(index) for index in range(size)]
    else:
        labels = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(labels) != size:
        raise DataError(
            f"group_by has {len(labels)} entries for {size} samples; expected one a sample, or a function of the index"
        )
    members: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        # a plain value: each tensor would be a group of its own
        group = label.tolist() if hasattr(label, "tolist") else label
        try:
            members.setdefault(group, []).append(index)
        except TypeError:
            raise DataError(
                f"group_by gives {group!r} for sample {index}; expected what can be a key of a dict"
            ) from None
    return [np.asarray(indices, dtype=np.int64) for indices in members.values()]


def check_end(name: str, value: int | None) -> None:
    """Raise `ConfigError` unless `value` can be how many epochs or steps, as `name` says, a loop has; None is no end."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(
            f"{name}={value!r} was given; expected a whole number of at least 0, or None"
        )


def _check(size: int, batch_size: int) -> None:
    if size < 1:
        raise DataError(
            "the data set has no samples; expected at least 1: check its path and filters"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            f"batch_size={batch_size!r} was given; expected a whole number of at least 1 (it is the global batch size)"
        )
