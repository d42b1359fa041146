"""The assignment of samples to lanes, as a pure function of seed, epoch, step and lane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from samestep.data.random_state import Permutation, key
from samestep.errors import ConfigError, DataError

Indices = NDArray[np.int64]
GroupBy = Callable[[int], Hashable] | Sequence[Hashable] | NDArray[np.generic]


@dataclass
class Plan(ABC):
    """The assignment of each sample to one step and lane per epoch."""

    size: int
    batch_size: int
    lanes: int
    seed: int
    _: KW_ONLY
    shuffle: bool = True

    def _check(self) -> None:
        if self.size < 1:
            raise DataError("the data set has no samples; check its path and filters")
        size = self.batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            expected = "batch_size must be a whole number of at least 1 (for all lanes together)"
            raise ConfigError(f"{expected}, got {size!r}")

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps that use every sample once."""

    @abstractmethod
    def counts(self, epoch: int, step: int) -> list[int]:
        """Return the number of samples of each lane; `step` counts within the epoch."""

    @abstractmethod
    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        """Return a lane's sample indices, int64 and read-only; consecutive calls are fast."""

    def describe(self) -> dict[str, int | bool]:
        """Return the values that identify the plan."""
        options = asdict(self)
        return {"samples": options.pop("size"), **options}


@dataclass(kw_only=True)
class ShuffledPlan(Plan):
    """Consecutive slices of a permutation, or of the data set without `shuffle`, in O(1) memory.

    Step s takes positions [s*batch_size, (s+1)*batch_size); lane l of b samples takes [l*b//lanes,
    (l+1)*b//lanes) of them.
    """

    drop_last: bool = False

    def __post_init__(self) -> None:
        self._check()
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"batch_size={self.batch_size} with drop_last leaves none of {self.size} samples;"
                " decrease it or keep the last batch"
            )
        self._full_counts = self._deal(self.batch_size)

    @cached_property
    def steps_per_epoch(self) -> int:
        return (self.size if self.drop_last else self.size + self.batch_size - 1) // self.batch_size

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
        return _order(self.size, self.seed, "epoch", epoch).span(start, stop)


@dataclass(kw_only=True)
class GroupedPlan(Plan):
    """Lane batches with samples of one group each, and each sample once, in O(size) memory.

    Groups are cut into chunks of ceil(batch_size / lanes) samples; the last one may be shorter.
    A step takes the next floor(batch_size / chunk) chunks in the epoch's order, one per lane.
    """

    groups: InitVar[GroupBy]

    def __post_init__(self, groups: GroupBy) -> None:
        self._check()
        self._members = _members(groups, self.size)
        self._chunk = -(-self.batch_size // self.lanes)
        self._chunks_per_step = self.batch_size // self._chunk
        self._sizes = np.asarray([len(members) for members in self._members])
        # the number of each group's first chunk, followed by the total
        self._first_chunk = np.concatenate([[0], np.cumsum(-(-self._sizes // self._chunk))])

    @cached_property
    def steps_per_epoch(self) -> int:
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
            taken = _order(chunks, self.seed, "chunks", epoch).span(start, stop)
        else:
            taken = np.arange(start, stop)
        groups = np.searchsorted(self._first_chunk, taken, side="right") - 1
        return groups, (taken - self._first_chunk[groups]) * self._chunk

    def describe(self) -> dict[str, int | bool]:
        return {**super().describe(), "groups": len(self._members)}


@lru_cache(maxsize=8)  # an order in use holds tables and blocks of a few MiB
def _order(size: int, seed: int, scope: str, epoch: int) -> Permutation:
    return Permutation(size, key(seed, scope, epoch))


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
        # tensors compare by identity: each would be a separate group
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
