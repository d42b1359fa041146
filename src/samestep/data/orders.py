"""Values of `order=` of `run.batches`, and the plans that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samestep.data.plan import (
    ChunkedPlan,
    GroupBy,
    GroupedPlan,
    Indices,
    Plan,
    ShuffledPlan,
    array_digest,
    check_positive,
    checked_array,
    dealt,
    in_order,
    search,
    small_permutation,
)
from samestep.data.random_state import Permutation, key, keyed, uniform
from samestep.errors import ConfigError, DataError

CACHED_EPOCHS: Final = 4  # orders that are kept: loading ahead may begin the next epochs
EpochOrder = ArrayLike | Callable[[int], ArrayLike]  # indices, or a function of the epoch
ALIKE: Final = 0.9  # samples from this share of the longest one's tokens may share a lane batch


class Weighted:
    """Random draws with replacement, each with a probability in proportion to a weight.

    An epoch has as many draws as the data set has samples. A draw depends only on the seed, the
    epoch and its position in the epoch. Needs 8 bytes per sample: the sums of the weights from the
    first to the last in float64, which are searched for a uniform random number.

    Args:
        weights: Finite numbers of at least 0, one per sample: a list, array or tensor.

    Raises:
        DataError: Weights are not such numbers, or all are 0.

    Example:
        >>> order = ss.Weighted([1, 1, 2])  # a quarter, a quarter and half of the draws
        >>> order.cumulative.tolist()
        [0.5, 1.0, 2.0]
    """

    def __init__(self, weights: ArrayLike) -> None:
        array = checked_array(weights, "weights", "numbers", "biuf").astype(np.float64)
        low, high = array.min(), array.max()
        if not (low >= 0 and high < np.inf):
            index = int(np.argmin((array >= 0) & (array < np.inf)))
            raise DataError(
                "weights must be finite numbers of at least 0, "
                f"got {array[index]} for sample {index}"
            )
        if high == 0:
            raise DataError("weights are all 0; at least one sample needs a larger weight")
        array /= high  # the sum is then 1 to the number of samples
        self.cumulative: NDArray[np.float64] = np.cumsum(array, out=array)


@dataclass(kw_only=True)
class WeightedPlan(ShuffledPlan):
    """The plan of `Weighted`."""

    kind = "weighted"
    order: InitVar[Weighted]

    def __post_init__(self, order: Weighted) -> None:
        super().__post_init__()
        if (entries := len(order.cumulative)) != self.size:
            raise DataError(
                f"weights has {entries} entries for {self.size} samples; pass one weight per sample"
            )
        self.use_array(order.cumulative)

    @property
    def array(self) -> NDArray[np.float64]:
        return self._cumulative

    def use_array(self, array: NDArray[np.float64]) -> None:
        if len(array) == self.size:  # otherwise the data set has changed, which is reported later
            self._cumulative, self._digest = array, array_digest(array)

    def basis(self, epoch: int) -> tuple[NDArray[np.float64], str]:
        return self._cumulative, self._digest

    def _span(self, epoch: int, start: int, stop: int) -> Indices:
        draws = uniform(key(self.seed, "weights", epoch), np.arange(start, stop))
        draws *= self._cumulative[-1]  # below the sum, even when rounded: the sum is at least 1
        indices: Indices = np.searchsorted(self._cumulative, draws, side="right")
        return indices

    def _find(self, epoch: int, samples: Indices, start: int, stop: int) -> tuple[Indices, Indices]:
        return search(partial(self._span, epoch), samples, start, stop)

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        return {**super().describe(epoch), "weights": self._digest}


@dataclass(kw_only=True)
class OrderedPlan(ShuffledPlan):
    """An order of the user's own: indices for all epochs, or a function that returns an epoch's.

    Needs 8 bytes per index, for a function those of `CACHED_EPOCHS` epochs. All epochs have the
    length of epoch 0. While the function runs, the global generators are seeded for the epoch.
    """

    kind = "ordered"
    order: InitVar[EpochOrder]

    def __post_init__(self, order: EpochOrder) -> None:
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
            self._array = None
        else:
            self._array, _ = indices_and_digest = _checked(order, "order", self.size)
            self._read = lambda _: indices_and_digest
        self._length = len(self._read(0)[0])
        super().__post_init__()

    @property
    def array(self) -> Indices | None:
        return self._array

    def use_array(self, array: Indices) -> None:
        if self._array is not None and array.dtype == np.int64:
            vars(self).pop("steps_per_epoch", None)  # computed for the other one
            self.__post_init__(array)

    @property
    def samples(self) -> int:
        return self._length

    def _span(self, epoch: int, start: int, stop: int) -> Indices:
        return self._of(epoch)[0][start:stop]

    def basis(self, epoch: int) -> tuple[Indices, str]:
        return self._of(epoch)

    def _find(self, epoch: int, samples: Indices, start: int, stop: int) -> tuple[Indices, Indices]:
        return search(partial(self._span, epoch), samples, start, stop)

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


class ByLength:
    """Lane batches of samples of similar lengths, with at most `max_tokens` tokens after padding.

    Each sample is used once per epoch. With L tokens in its longest sample, a lane batch has up to
    max_tokens // L samples; a step has one per lane. Limiting tokens instead of samples is known
    from fairseq (`--max-tokens`). Needs 8 bytes per sample.

    Args:
        lengths: Tokens of each sample: whole numbers of at least 1 in a list, array or tensor.
        max_tokens: Largest number of tokens of a lane batch: its samples times the tokens of its
            longest one.

    Raises:
        ConfigError: `max_tokens` is not a whole number of at least 1.
        DataError: `lengths` are not such numbers, or one is larger than `max_tokens`.

    Example:
        >>> order = ss.ByLength([5, 3, 8], max_tokens=16)
        >>> order.lengths.tolist(), order.max_tokens
        ([5, 3, 8], 16)
    """

    def __init__(self, lengths: ArrayLike, *, max_tokens: int) -> None:
        check_positive("max_tokens", max_tokens, "for each lane batch, with its padding")
        array = checked_array(lengths, "lengths", "whole numbers", "iu")
        if (low := array.min()) < 1:
            sample = int(array.argmin())
            raise DataError(f"lengths must be at least 1, got {low} for sample {sample}")
        if (high := array.max()) > max_tokens:
            raise DataError(
                f"sample {int(array.argmax())} has {high} tokens, more than"
                f" max_tokens={max_tokens}; increase max_tokens, or truncate or leave out"
                " longer samples"
            )
        self.lengths: Indices = array.astype(np.int64)
        self.max_tokens = max_tokens


@dataclass(kw_only=True)
class TokenPlan(ChunkedPlan):
    """The plan of `ByLength`.

    Groups are made from the longest sample down. With L tokens in its longest sample, a group has
    all left of at least `ALIKE` L tokens and is cut into chunks of max_tokens // L samples; the
    next shorter samples fill its last one. The number of chunks is thus the same in every epoch,
    and only the chunk of the shortest samples may have fewer. Each step has one chunk per lane.
    """

    kind = "by length"
    batch_size: int = field(init=False, default=1)  # the average of the steps, rounded up
    max_tokens: int = field(init=False)
    order: InitVar[ByLength]

    def __post_init__(self, order: ByLength) -> None:
        self._check()
        if (entries := len(order.lengths)) != self.size:
            raise DataError(
                f"lengths has {entries} entries for {self.size} samples; pass the tokens of each"
            )
        self.max_tokens = order.max_tokens
        negative = -order.lengths
        self._digest = array_digest(negative)
        self._lengths = order.lengths.astype(np.min_scalar_type(order.max_tokens))
        by_length = np.argsort(negative, kind="stable")
        negative = negative[by_length]  # ascending, as searchsorted needs
        by_length = by_length.astype(np.min_scalar_type(self.size))
        members, chunks, start = [], [], 0
        while start < self.size:
            longest = -int(negative[start])
            chunk = min(self.max_tokens // longest, self.size)
            alike = int(np.searchsorted(negative, -ceil(ALIKE * longest), side="right")) - start
            stop = start - -alike // chunk * chunk
            members.append(by_length[start:stop])
            chunks.append(chunk)
            start = stop
        self._cut(members, chunks, self.lanes)
        self.batch_size = -(-self.size // self.steps_per_epoch)

    def basis(self, epoch: int) -> tuple[NDArray[Any], str]:
        lengths = self._lengths.astype(np.int64)
        return lengths, array_digest(lengths)

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        return {**super().describe(epoch), "lengths": self._digest}


class ShardOrder:
    """A random order for `run.batches(order=...)` that reads few shards at a time.

    Every epoch shuffles the shards and gives each lane its share of them. A lane shuffles the
    samples of `window` shards, uses them, and goes on to the next ones. So a worker reads only the
    shards of its own lanes, at most `2 * window` of each lane in a step, and every sample is used
    once per epoch. The order depends on the seed, the epoch and the number of lanes. It needs a few
    bytes per shard.

    Args:
        sizes: Number of samples of each shard, in the order of the data set.
        window: Number of shards whose samples a lane mixes.

    Raises:
        ConfigError: `window` is not a whole number of at least 1.
        DataError: `sizes` are not whole numbers of at least 0.

    Example:
        >>> order = ss.ShardOrder([1000, 1000, 500], window=2)
        >>> int(order.sizes.sum())
        2500
    """

    def __init__(self, sizes: ArrayLike, window: int = 8) -> None:
        check_positive("window", window, "of shards")
        self.window = window
        self.sizes: Indices = checked_array(sizes, "sizes", "whole numbers", "iu").astype(np.int64)
        if (low := self.sizes.min()) < 0:
            raise DataError(
                f"sizes must be at least 0, got {low} for shard {int(self.sizes.argmin())}"
            )


@dataclass(kw_only=True)
class ShardPlan(ShuffledPlan):
    """The plan of a `ShardOrder`.

    The samples of the shuffled shards are numbered from 0. Each lane has a range of these numbers,
    as long as its number of samples in an epoch, so lanes share at most the shards at the ends.
    """

    kind = "shards"
    order: InitVar[ShardOrder]
    planned_of_step = Plan.planned_of_step  # lanes are not slices of one span

    def __post_init__(self, order: ShardOrder) -> None:
        self._sizes, self._window = order.sizes, order.window
        if (total := int(self._sizes.sum())) != self.size:
            raise DataError(
                f"order has shards with {total} samples in all for a data set with {self.size};"
                " pass the number of samples of each shard to ShardOrder"
            )
        super().__post_init__()
        self._first_sample = np.cumsum(self._sizes) - self._sizes
        full_steps, rest = divmod(self.samples, self.batch_size)
        last = [0] * self.lanes if self.drop_last else dealt(rest, self.lanes)
        lengths = [
            full_steps * full + more for full, more in zip(self._full_counts, last, strict=True)
        ]
        self._lane_start = [0, *accumulate(lengths)]
        self._digest = array_digest(np.append(self._sizes, self._window))
        self._shards = lru_cache(CACHED_EPOCHS)(self._shuffled)

    def planned(self, epoch: int, step: int, lane: int) -> Indices:
        at = self._lane_start[lane] + step * self._full_counts[lane]
        return self._lane_span(epoch, lane, at, at + self.planned_counts(epoch, step)[lane])

    def _lane_span(self, epoch: int, lane: int, at: int, stop: int) -> Indices:
        """Return the samples with the numbers [at, stop), which are a lane's."""
        shards, starts = self._shards(epoch)
        begin, end = self._lane_start[lane : lane + 2]
        # lanes start within a window, so that they do not all begin new ones in the same step
        origin = int(np.searchsorted(starts, begin, side="right")) - 1 - lane % self._window
        spans = [np.empty(0, dtype=np.int64)]
        while at < stop:
            shard = int(np.searchsorted(starts, at, side="right")) - 1
            number = (shard - origin) // self._window
            first = origin + number * self._window
            low = max(begin, int(starts[max(0, first)]))
            high = min(end, int(starts[min(first + self._window, len(shards))]))
            order = small_permutation(high - low, self.seed, "window", epoch, lane, number)
            until = min(stop, high)
            spans.append(low + order.span(at - low, until - low))
            at = until
        numbers = np.concatenate(spans)
        places = np.searchsorted(starts, numbers, side="right") - 1
        offsets = numbers - starts[places]
        # lanes share the shards at their ends, of which each gets random samples
        for end_place in set(np.searchsorted(starts, [begin, end - 1], side="right") - 1):
            shard, is_in_shard = int(shards[end_place]), places == end_place
            if is_in_shard.any():
                size = int(self._sizes[shard])
                order = small_permutation(size, self.seed, "shard", epoch, shard)
                offsets[is_in_shard] = order[offsets[is_in_shard]]
        return self._first_sample[shards[places]] + offsets

    def uses(self, epoch: int, samples: Indices, steps: range) -> Indices:
        full_steps, rows = self.samples // self.batch_size, [np.empty((0, 3), dtype=np.int64)]
        for lane, full in enumerate(self._full_counts):
            begin, end = self._lane_start[lane : lane + 2]
            first, stop = (
                begin + n * full if n <= full_steps else end for n in (steps.start, steps.stop)
            )
            found, numbers = search(partial(self._lane_span, epoch, lane), samples, first, stop)
            step = np.full_like(numbers, full_steps)  # of a lane with a sample in a short step only
            if full:
                step = np.minimum((numbers - begin) // full, full_steps)
            rows.append(in_order(step, np.full_like(step, lane), found))
        return in_order(*np.concatenate(rows).T)

    def to_record(self) -> dict[str, Any]:
        return {**super().to_record(), "window": self._window}

    def basis(self, epoch: int) -> tuple[Indices, str]:
        return self._sizes, array_digest(self._sizes)

    def describe(self, epoch: int = 0) -> dict[str, int | bool | str]:
        return {**super().describe(epoch), "order": self._digest}

    def _shuffled(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the shards in an epoch's order, and the number of each one's first sample."""
        order = Permutation(len(self._sizes), key(self.seed, "shards", epoch))
        shards = order[np.arange(len(order))]
        return shards, np.concatenate([[0], np.cumsum(self._sizes[shards])])


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


Order = EpochOrder | Weighted | ByLength | ShardOrder


def make_plan(
    size: int,
    batch_size: int | None,
    lanes: int,
    seed: int,
    *,
    shuffle: bool,
    drop_last: bool,
    group_by: GroupBy | None,
    order: Order | None,
) -> Plan:
    """Return the assignment of a data set's samples to steps and lanes."""
    if isinstance(order, type):
        raise ConfigError(f"order must be a value, got the class {order.__name__}; create one")
    grouped, by_length = group_by is not None, isinstance(order, ByLength)
    weighted = isinstance(order, Weighted)
    for conflict, is_present in {
        ("group_by", "order", "both select the samples"): grouped and order is not None,
        ("drop_last", "group_by", "any grouped batch may be short"): grouped and drop_last,
        ("drop_last", "ByLength", "each sample is used once"): by_length and drop_last,
        ("batch_size", "ByLength", "max_tokens replaces it"): by_length and batch_size is not None,
        ("shuffle=False", "Weighted", "weights draw at random"): weighted and not shuffle,
    }.items():
        if is_present:
            raise ConfigError(
                "{} cannot be used with {}, because {}; leave out one of the two".format(*conflict)
            )
    if isinstance(order, ByLength):
        return TokenPlan(size, lanes, seed, shuffle=shuffle, order=order)
    if batch_size is None:
        raise ConfigError(
            "batch_size must be a whole number of at least 1 (for all lanes together), got None;"
            " pass it, or order=ss.ByLength(lengths, max_tokens=...)"
        )
    sizes = size, batch_size, lanes, seed  # what every other plan needs
    if group_by is not None:
        return GroupedPlan(*sizes, shuffle=shuffle, groups=group_by)
    if order is None:
        return ShuffledPlan(*sizes, shuffle=shuffle, drop_last=drop_last)
    if isinstance(order, Weighted):
        return WeightedPlan(*sizes, drop_last=drop_last, order=order)
    if isinstance(order, ShardOrder):
        return ShardPlan(*sizes, drop_last=drop_last, order=order)
    return OrderedPlan(*sizes, shuffle=False, drop_last=drop_last, order=order)
