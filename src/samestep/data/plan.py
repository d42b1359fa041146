"""The assignment of samples to lanes, as a pure function of seed, epoch, step and lane."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samestep.data.random_state import Permutation, key, keyed, uniform
from samestep.errors import ConfigError, DataError

Indices = NDArray[np.int64]
GroupBy = Callable[[int], Hashable] | Sequence[Hashable] | NDArray[np.generic]
Order = ArrayLike | Callable[[int], ArrayLike]  # indices, or a function of the epoch

CACHED_EPOCHS: Final = 4  # orders that are kept: loading ahead may begin the next epochs
ALIKE: Final = 0.9  # samples from this share of the longest one's tokens may share a lane batch


@dataclass
class Plan(ABC):
    """The assignment of samples to the steps and lanes of each epoch."""

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
    def counts(self, epoch: int, step: int) -> list[int]:
        """Return the number of samples of each lane; `step` counts within the epoch."""

    @abstractmethod
    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        """Return a lane's sample indices, int64 and read-only; consecutive calls are fast."""

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        """Return the values that identify the plan of an epoch."""
        options = asdict(self)
        del options["size"]
        return {"samples": self.samples, **options}


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
                f"batch_size={self.batch_size} with drop_last leaves none of {self.samples}"
                " samples; decrease it or keep the last batch"
            )
        self._full_counts = self._deal(self.batch_size)

    @cached_property
    def steps_per_epoch(self) -> int:
        rounded = self.samples if self.drop_last else self.samples + self.batch_size - 1
        return rounded // self.batch_size

    def counts(self, epoch: int, step: int) -> list[int]:
        left = self.samples - step * self.batch_size
        return self._full_counts.copy() if left >= self.batch_size else self._deal(left)

    def _deal(self, batch: int) -> list[int]:
        ends = [lane * batch // self.lanes for lane in range(self.lanes + 1)]
        return [stop - start for start, stop in pairwise(ends)]

    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        first = step * self.batch_size
        batch = min(self.batch_size, self.samples - first)
        start, stop = first + lane * batch // self.lanes, first + (lane + 1) * batch // self.lanes
        return self._span(epoch, start, stop)

    def _span(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop) of an epoch."""
        if not self.shuffle:
            return np.arange(start, stop)
        return _order(self.size, self.seed, "epoch", epoch).span(start, stop)


@dataclass(kw_only=True)
class WeightedPlan(ShuffledPlan):
    """As many draws per epoch as there are samples, with replacement and in proportion to weights.

    Needs 8 bytes per sample: the cumulative weights, which are summed from the first to the last in
    float64. A position's draw depends only on seed, epoch and position.
    """

    weights: InitVar[ArrayLike]

    def __post_init__(self, weights: ArrayLike) -> None:
        super().__post_init__()
        array = checked_array(weights, "weights", "numbers", "biuf").astype(np.float64)
        if len(array) != self.size:
            raise DataError(
                f"weights has {len(array)} entries for {self.size} samples; pass one weight per"
                " sample"
            )
        low, high = array.min(), array.max()
        if not (low >= 0 and high < np.inf):
            index = int(np.argmin((array >= 0) & (array < np.inf)))
            raise DataError(
                "weights must be finite numbers of at least 0, "
                f"got {array[index]} for sample {index}"
            )
        if high == 0:
            raise DataError("weights are all 0; at least one sample needs a larger weight")
        array /= high  # the sum is then 1 to `size`
        self._cumulative = np.cumsum(array, out=array)
        self._digest = array_digest(self._cumulative)

    def _span(self, epoch: int, start: int, stop: int) -> Indices:
        draws = uniform(key(self.seed, "weights", epoch), np.arange(start, stop))
        draws *= self._cumulative[-1]  # below the sum, even when rounded: the sum is at least 1
        indices: Indices = np.searchsorted(self._cumulative, draws, side="right")
        return indices

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        return {**super().describe(epoch), "weights": self._digest}


@dataclass(kw_only=True)
class OrderedPlan(ShuffledPlan):
    """An order of the user's own: indices for all epochs, or a function that returns an epoch's.

    Needs 8 bytes per index, for a function those of `CACHED_EPOCHS` epochs. All epochs have the
    length of epoch 0. While the function runs, the global generators are seeded for the epoch.
    """

    order: InitVar[Order]

    def __post_init__(self, order: Order) -> None:
        self._check()
        self._read: Callable[[int], tuple[Indices, str]]
        if callable(order):
            call = partial(_call, order, self.size, self.seed)
            self._read = lru_cache(CACHED_EPOCHS)(call)
            if call(0)[1] != self._read(0)[1]:
                raise DataError(
                    "order(0) returned other indices when it was called again; a resumed run"
                    " must get the same indices, so make it a function of the epoch alone, such as"
                    " lambda epoch: numpy.random.default_rng(epoch).permutation(100)"
                )
        else:
            indices_and_digest = _checked(order, "order", self.size)
            self._read = lambda _: indices_and_digest
        self._length = len(self._read(0)[0])
        super().__post_init__()

    @property
    def samples(self) -> int:
        return self._length

    def _span(self, epoch: int, start: int, stop: int) -> Indices:
        return self._of(epoch)[0][start:stop]

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        return {**super().describe(epoch), "order": self._of(epoch)[1]}

    def _of(self, epoch: int) -> tuple[Indices, str]:
        """Return an epoch's indices and their digest."""
        order = self._read(epoch)
        if len(order[0]) != self._length:
            raise DataError(
                f"order({epoch}) has {len(order[0])} indices and order(0) has {self._length}; all"
                " epochs of a loop must have the same number. For epochs of different lengths,"
                " write a loop per epoch: for epoch in range(run.epoch, epochs), with"
                " run.batches(..., order=indices of that epoch) in it"
            )
        return order


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

    def counts(self, epoch: int, step: int) -> list[int]:
        groups, starts = self._chunks(epoch, step)
        sizes = np.minimum(self._sizes[groups] - starts, self._chunk[groups])
        counts: list[int] = sizes.tolist()
        return counts + [0] * (self.lanes - len(counts))

    def indices(self, epoch: int, step: int, lane: int) -> Indices:
        groups, starts = self._chunks(epoch, step)
        if lane >= len(groups):
            return np.empty(0, dtype=np.int64)
        group, start = int(groups[lane]), int(starts[lane])
        members = self._members[group]
        positions = np.arange(start, min(start + int(self._chunk[group]), len(members)))
        if self.shuffle:
            positions = _group_order(len(members), self.seed, group, epoch)[positions]
        return members[positions]

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

    groups: InitVar[GroupBy]

    def __post_init__(self, groups: GroupBy) -> None:
        self._check()
        chunk = -(-self.batch_size // self.lanes)
        self._cut(_members(groups, self.size), chunk, self.batch_size // chunk)

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        return {**super().describe(epoch), "groups": len(self._members)}


@dataclass(kw_only=True)
class TokenPlan(ChunkedPlan):
    """Lane batches of samples of similar lengths, with at most `max_tokens` tokens after padding.

    Groups are made from the longest sample down. With L tokens in its longest sample, a group has
    all left of at least `ALIKE` L tokens and is cut into chunks of max_tokens // L samples; the
    next shorter samples fill its last one. The number of chunks is thus the same in every epoch,
    and only the chunk of the shortest samples may have fewer. Each step has one chunk per lane.
    """

    batch_size: int = field(init=False, default=1)  # the average of the steps, rounded up
    max_tokens: int
    lengths: InitVar[ArrayLike]

    def __post_init__(self, lengths: ArrayLike) -> None:
        self._check()
        check_positive("max_tokens", self.max_tokens, "for each lane batch, with its padding")
        array = checked_array(lengths, "lengths", "whole numbers", "iu")
        if len(array) != self.size:
            raise DataError(
                f"lengths has {len(array)} entries for {self.size} samples; pass the number of"
                " tokens of each sample"
            )
        if (low := array.min()) < 1:
            sample = int(array.argmin())
            raise DataError(f"lengths must be at least 1, got {low} for sample {sample}")
        if (high := array.max()) > self.max_tokens:
            raise DataError(
                f"sample {int(array.argmax())} has {high} tokens, more than"
                f" max_tokens={self.max_tokens}; increase max_tokens, or truncate or leave out"
                " longer samples"
            )
        negative = -array.astype(np.int64)
        self._digest = array_digest(negative)
        order = np.argsort(negative, kind="stable")
        negative = negative[order]  # ascending, as searchsorted needs
        members, chunks, start = [], [], 0
        while start < self.size:
            longest = -int(negative[start])
            chunk = min(self.max_tokens // longest, self.size)
            alike = int(np.searchsorted(negative, -ceil(ALIKE * longest), side="right")) - start
            stop = start - -alike // chunk * chunk
            members.append(order[start:stop])
            chunks.append(chunk)
            start = stop
        self._cut(members, chunks, self.lanes)
        self.batch_size = -(-self.size // self.steps_per_epoch)

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        return {**super().describe(epoch), "lengths": self._digest}


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


def _call(
    order: Callable[[int], ArrayLike], size: int, seed: int, epoch: int
) -> tuple[Indices, str]:
    """Return the checked indices of an epoch, and their digest."""
    try:
        with keyed(key(seed, "order", epoch)):
            indices = order(epoch)
    except Exception as error:
        message = f"order({epoch}) failed: {type(error).__name__}: {error}"
        raise DataError(message) from error
    return _checked(indices, f"order({epoch})", size)


def _checked(values: ArrayLike, name: str, size: int) -> tuple[Indices, str]:
    """Return indices as a read-only copy and their digest; raise `DataError` for unusable ones."""
    array = checked_array(values, name, "whole numbers", "iu")
    outside = (array < 0) | (array >= size)
    if outside.any():
        position = int(outside.argmax())
        raise DataError(
            f"{name} must have indices from 0 to {size - 1}, got {array[position]} at position"
            f" {position}"
        )
    indices = array.astype(np.int64)
    indices.flags.writeable = False
    return indices, array_digest(indices)


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
