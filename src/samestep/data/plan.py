"""The assignment of samples to lanes, as a pure function of seed, epoch, step and lane."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samestep.data.random_state import Permutation, key
from samestep.errors import ConfigError, DataError

Indices = NDArray[np.int64]
NONE: Final[Indices] = np.empty(0, dtype=np.int64)
GroupBy = Callable[[int], Hashable] | Sequence[Hashable] | NDArray[np.generic]
SEARCHED: Final = 2**20  # positions of an order that are searched together


def dealt(batch: int, lanes: int) -> list[int]:
    """Return the samples of each lane if a batch is cut into slices of consecutive samples."""
    ends = [lane * batch // lanes for lane in range(lanes + 1)]
    return [stop - start for start, stop in pairwise(ends)]


@dataclass
class Plan(ABC):
    """The assignment of samples to the steps and lanes of each epoch.

    `kind` is its name in the record of a run.
    """

    kind: ClassVar[str]
    size: int
    batch_size: int
    lanes: int
    seed: int
    _: KW_ONLY
    shuffle: bool = True

    def _check(self) -> None:
        if self.size < 1:
            raise DataError("the data set has no samples; check its path and filters")
        check_positive("batch_size", self.batch_size, "for all lanes together")

    @property
    def samples(self) -> int:
        """Samples of an epoch; they may repeat."""
        return self.size

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps that use all samples of an epoch."""

    @abstractmethod
    def planned_counts(self, epoch: int, step: int) -> list[int]:
        """Return what `counts` does, with the samples that are left out."""

    @abstractmethod
    def planned(self, epoch: int, step: int, lane: int) -> Indices:
        """Return what `indices` does, with the samples that are left out."""

    @abstractmethod
    def uses(self, epoch: int, samples: Indices, steps: range) -> Indices:
        """Return where some steps of an epoch use some samples, each of which is given once.

        int64 [uses, 3]: step within the epoch, lane and sample, in the order of steps and lanes.
        """

    varies = False  # from step to step, by functions of the user
    is_fixed = True  # any step can be computed at any time
    excluded = NONE  # sorted indices of samples that are left out

    def exclude(self, indices: Indices) -> None:
        """Leave out samples, by their sorted indices; all others stay in their steps and lanes."""
        self.excluded = indices

    def check_left(self) -> None:
        """Raise `DataError` if no step of the first epoch has a sample that is not left out."""
        steps = range(self.steps_per_epoch) if len(self.excluded) else ()
        if steps and not any(any(self.counts(0, step)) for step in steps):
            raise DataError(
                f"exclude leaves out all samples that an epoch uses, {self.samples} in"
                f" {self.steps_per_epoch} steps; leave out fewer"
            )

    def counts(self, epoch: int, step: int) -> list[int]:
        """Return the number of samples of each lane; `step` counts within the epoch."""
        planned = self.planned_counts(epoch, step)
        if not len(self.excluded):
            return planned
        lanes = enumerate(planned)
        return [len(self.indices(epoch, step, lane)) if count else 0 for lane, count in lanes]

    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        """Return a lane's sample indices, int64 and read-only; consecutive calls are fast."""
        return self._kept(self.planned(epoch, step, lane))

    def indices_of_step(self, epoch: int, step: int) -> Indices:
        """Return the sample indices of all lanes, those of lane 0 first: int64 and read-only."""
        return self._kept(self.planned_of_step(epoch, step))

    def planned_of_step(self, epoch: int, step: int) -> Indices:
        """Return what `indices_of_step` does, with the samples that are left out."""
        return np.concatenate([self.planned(epoch, step, lane) for lane in range(self.lanes)])

    def _kept(self, planned: Indices) -> Indices:
        return planned[~are_in(planned, self.excluded)] if len(self.excluded) else planned

    def first_step_with(self, samples: Indices, epoch: int, stop: int) -> int | None:
        """Return the first of the steps before `stop` of an epoch in whose batch a sample is.

        The samples are sorted, and may be left out; None if no batch has any of them.
        """
        if not len(samples):
            return None
        uses = self.uses(epoch, samples, range(stop))
        return int(uses[0, 0]) if len(uses) else None

    def compared(self, epoch: int, step: int) -> dict[str, int | bool | str]:
        """Return the values in which workers must agree, at a step of an epoch."""
        return self.describe(epoch)

    @property
    def array(self) -> NDArray[Any] | None:
        """The user's array that the order is computed from, None if there is none."""
        return None

    def use_array(self, array: NDArray[Any]) -> None:  # noqa: B027  most plans have none
        """Compute the order from another `array`, of the same plan in another process."""

    def to_record(self) -> dict[str, Any]:
        """Return what makes this plan again, with the array of `basis`, as JSON."""
        return {"kind": self.kind, **asdict(self), **self._describe_excluded()}

    def basis(self, epoch: int) -> tuple[NDArray[Any], str] | None:
        """Return the array that an epoch's order is computed from, and its digest, if any."""
        return None

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        """Return the values that identify the plan of an epoch."""
        options = asdict(self)
        del options["size"]
        return {"samples": self.samples, **options, **self._describe_excluded()}

    def _describe_excluded(self) -> dict[str, str]:
        return {"exclude": array_digest(self.excluded)} if len(self.excluded) else {}


@dataclass(kw_only=True)
class ShuffledPlan(Plan):
    """Consecutive slices of a permutation, or of the data set without `shuffle`, in O(1) memory.

    Step s takes positions [s*batch_size, (s+1)*batch_size); lane l of b samples takes [l*b//lanes,
    (l+1)*b//lanes) of them.
    """

    kind = "shuffled"
    drop_last: bool = False

    def __post_init__(self) -> None:
        self._check()
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"batch_size={self.batch_size} with drop_last leaves none of {self.samples}"
                " samples; decrease it or keep the last batch"
            )
        self._full_counts = dealt(self.batch_size, self.lanes)

    @cached_property
    def steps_per_epoch(self) -> int:
        rounded = self.samples if self.drop_last else self.samples + self.batch_size - 1
        return rounded // self.batch_size

    def planned_counts(self, epoch: int, step: int) -> list[int]:
        left = self.samples - step * self.batch_size
        return self._full_counts.copy() if left >= self.batch_size else dealt(left, self.lanes)

    def planned(self, epoch: int, step: int, lane: int) -> Indices:
        first = step * self.batch_size
        batch = min(self.batch_size, self.samples - first)
        start, stop = first + lane * batch // self.lanes, first + (lane + 1) * batch // self.lanes
        return self._span(epoch, start, stop)

    def planned_of_step(self, epoch: int, step: int) -> Indices:
        first = step * self.batch_size
        return self._span(epoch, first, min(first + self.batch_size, self.samples))

    def _span(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop) of an epoch."""
        if not self.shuffle:
            return np.arange(start, stop)
        return _order(self.size, self.seed, "epoch", epoch).span(start, stop)

    def uses(self, epoch: int, samples: Indices, steps: range) -> Indices:
        first, end = steps.start * self.batch_size, steps.stop * self.batch_size
        found, positions = self._find(epoch, samples, first, min(end, self.samples))
        is_asked = (positions >= first) & (positions < end)
        step, place = np.divmod(positions[is_asked], self.batch_size)
        batch = np.minimum(self.batch_size, self.samples - step * self.batch_size)
        return in_order(step, lanes_of_places(place, batch, self.lanes), found[is_asked])

    def _find(self, epoch: int, samples: Indices, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return samples with their positions in an epoch, at least those in [start, stop)."""
        if not self.shuffle:
            return samples, samples
        return samples, _order(self.size, self.seed, "epoch", epoch).inverse(samples)


@dataclass(kw_only=True)
class ChunkedPlan(Plan):
    """Lane batches that are chunks of one group each, and each sample once, in O(size) memory.

    An epoch shuffles the samples of each group, cuts every group into chunks, of which the last may
    be shorter, and shuffles the chunks of all groups. A step takes the next ones, one per lane.
    """

    def _cut(self, members: list[Indices], chunk: ArrayLike, chunks_per_step: int) -> None:
        """Cut groups into chunks of `chunk` samples: one number for all groups, or one each."""
        self._members = members
        self._sizes = np.asarray([len(group) for group in members])
        self._chunk = np.broadcast_to(np.asarray(chunk, dtype=np.int64), self._sizes.shape)
        self._chunks_per_step = chunks_per_step
        # the number of each group's first chunk, followed by the total
        self._first_chunk = np.concatenate([[0], np.cumsum(-(-self._sizes // self._chunk))])

    @cached_property
    def steps_per_epoch(self) -> int:
        return -(-int(self._first_chunk[-1]) // self._chunks_per_step)

    def planned_counts(self, epoch: int, step: int) -> list[int]:
        groups, starts = self._chunks(epoch, step)
        sizes = np.minimum(self._sizes[groups] - starts, self._chunk[groups])
        counts: list[int] = sizes.tolist()
        return counts + [0] * (self.lanes - len(counts))

    def planned(self, epoch: int, step: int, lane: int) -> Indices:
        groups, starts = self._chunks(epoch, step)
        if lane >= len(groups):
            return np.empty(0, dtype=np.int64)
        group, start = int(groups[lane]), int(starts[lane])
        members = self._members[group]
        positions = np.arange(start, min(start + int(self._chunk[group]), len(members)))
        if self.shuffle:
            order = small_permutation(len(members), self.seed, f"group {group}", epoch)
            positions = order[positions]
        return members[positions].astype(np.int64)  # groups may have smaller integers

    def uses(self, epoch: int, samples: Indices, steps: range) -> Indices:
        members, starts = np.concatenate(self._members), np.cumsum(self._sizes) - self._sizes
        by_sample = np.argsort(members)
        at = by_sample[np.searchsorted(members, samples, sorter=by_sample)]
        groups = np.searchsorted(starts, at, side="right") - 1
        places = at - starts[groups]
        if self.shuffle:
            for group in np.unique(groups).tolist():
                is_of_group, size = groups == group, len(self._members[group])
                order = small_permutation(size, self.seed, f"group {group}", epoch)
                places[is_of_group] = order.inverse(places[is_of_group])
        chunks = self._first_chunk[groups] + places // self._chunk[groups]
        if self.shuffle:
            total = int(self._first_chunk[-1])
            chunks = _order(total, self.seed, "chunks", epoch).inverse(chunks)
        step, lane = np.divmod(chunks, self._chunks_per_step)
        is_asked = (step >= steps.start) & (step < steps.stop)
        return in_order(step[is_asked], lane[is_asked], samples[is_asked])

    def _chunks(self, epoch: int, step: int) -> tuple[Indices, Indices]:
        """Return the group of each chunk of a step, and its start in the group."""
        chunks = int(self._first_chunk[-1])
        start, stop = step * self._chunks_per_step, min((step + 1) * self._chunks_per_step, chunks)
        if self.shuffle:
            chunk_numbers = _order(chunks, self.seed, "chunks", epoch).span(start, stop)
        else:
            chunk_numbers = np.arange(start, stop)
        groups = np.searchsorted(self._first_chunk, chunk_numbers, side="right") - 1
        return groups, (chunk_numbers - self._first_chunk[groups]) * self._chunk[groups]


@dataclass(kw_only=True)
class GroupedPlan(ChunkedPlan):
    """The groups of the user, cut into chunks of ceil(batch_size / lanes) samples."""

    kind = "grouped"
    groups: InitVar[GroupBy]

    def __post_init__(self, groups: GroupBy) -> None:
        self._check()
        chunk = -(-self.batch_size // self.lanes)
        self._cut(_members(groups, self.size), chunk, self.batch_size // chunk)

    def basis(self, epoch: int) -> tuple[NDArray[Any], str]:
        numbers = np.empty(self.size, dtype=np.int64)
        for group, members in enumerate(self._members):
            numbers[members] = group
        return numbers, array_digest(numbers)

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        return {**super().describe(epoch), "groups": len(self._members)}


@lru_cache(maxsize=8)  # an order in use holds tables and blocks of a few MiB
def _order(size: int, seed: int, scope: str, epoch: int) -> Permutation:
    return Permutation(size, key(seed, scope, epoch))


@lru_cache(maxsize=128)  # of groups, or several for each lane of a worker
def small_permutation(size: int, seed: int, scope: str, *numbers: int) -> Permutation:
    """Return a permutation of part of the samples that depends on all arguments."""
    return Permutation(size, key(seed, scope, *numbers))


def search(
    span_of: Callable[[int, int], Indices], samples: Indices, start: int, stop: int
) -> tuple[Indices, Indices]:
    """Return samples with their positions in [start, stop) of an order that has no inverse.

    `span_of(start, stop)` returns the samples there.
    """
    found, positions = [NONE], [NONE]
    for first in range(start, stop, SEARCHED):
        span = span_of(first, min(first + SEARCHED, stop))
        places = np.flatnonzero(np.isin(span, samples))
        found.append(span[places])
        positions.append(first + places)
    return np.concatenate(found), np.concatenate(positions)


def lanes_of_places(places: Indices, batch: ArrayLike, lanes: int) -> Indices:
    """Return the lane of each place in a batch that is cut as `dealt` says."""
    lane: Indices = ((places + 1) * lanes - 1) // np.asarray(batch)
    return lane  # the last one that begins by then


def in_order(step: Indices, lane: Indices, sample: Indices) -> Indices:
    """Return int64 [uses, 3], sorted by step, lane and sample."""
    order = np.lexsort((sample, lane, step))
    return np.stack([step, lane, sample], axis=1)[order]


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


def checked_array(values: Any, name: str, of: str, kinds: str) -> NDArray[Any]:
    """Return a one-dimensional array of one of the kinds of dtype; raise `DataError` for others."""
    expected = f"{name} must be a one-dimensional list, array or tensor of {of}"
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{expected}: {error}") from None
    if array.ndim == 1 and not len(array):
        raise DataError(f"{name} is empty; {expected}, with at least one")
    if array.ndim != 1 or array.dtype.kind not in kinds:
        shape = f" of {array.dtype} {list(array.shape)}" if array.ndim else ""
        raise DataError(f"{expected}, got {type(values).__name__}{shape}")
    return array


def are_in(indices: Indices, wanted: Indices) -> NDArray[np.bool_]:
    """Return which indices are among the `wanted` ones, at least one, which are sorted."""
    places = np.searchsorted(wanted, indices).clip(max=len(wanted) - 1)
    found: NDArray[np.bool_] = wanted[places] == indices
    return found


def array_digest(array: NDArray[Any]) -> str:
    """Return 16 hexadecimal digits that depend on the array's bytes."""
    return hashlib.blake2b(array.data, digest_size=8).hexdigest()


def check_positive(name: str, value: int, of: str = "") -> None:
    """Raise `ConfigError`, which says what the number is `of`, unless `value` is at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        note = f" ({of})" if of else ""
        raise ConfigError(f"{name} must be a whole number of at least 1{note}, got {value!r}")


def check_end(name: str, value: int | None) -> None:
    """Raise `ConfigError` unless `value` is a number of epochs or steps; None means no end."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{name} must be a whole number of at least 0 or None, got {value!r}")
