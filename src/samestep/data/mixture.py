"""Mixtures of data sets, and which plan the options of a loop ask for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from torch.utils.data import Dataset

from samestep.data.loader import samples_of, size_of
from samestep.data.mixture_plan import BatchSize, MixturePlan, Weights
from samestep.data.orders import Order, make_plan
from samestep.data.origin import name_of
from samestep.data.plan import GroupBy, Plan
from samestep.errors import ConfigError, DataError

SOURCE: Final = "source"
SHOWN: Final = 16  # rows in a message


class Mixture(Dataset[Any]):
    """The rows of several data sets, one after the other; dicts get the number of their source."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        if not sources:
            raise DataError("the dict of data sets is empty; name at least one")
        self.sources, self.sizes = dict(sources), dict[str, int]()
        for name, dataset in sources.items():
            if not isinstance(name, str) or not name:
                raise DataError(f"the name of a source must be a text, got {name!r}")
            try:
                self.sizes[name] = 0 if isinstance(dataset, str) else size_of(dataset)
            except DataError as error:
                raise DataError(f"source {name!r}: {error}") from None
            if not self.sizes[name]:
                raise DataError(
                    f"source {name!r} has no samples; check its path and filters, and pass data"
                    " sets instead of paths"
                )
        self._ends = [*accumulate(self.sizes.values())]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices`, of which each source loads its own together."""
        samples: list[Any] = [None] * len(indices)
        own: dict[int, list[tuple[int, int]]] = {}  # by source: place in `indices`, row
        for place, index in enumerate(indices):
            source, row = self._find(index)
            own.setdefault(source, []).append((place, row))
        sources = [*self.sources.items()]
        for source, pairs in sorted(own.items()):
            name, dataset = sources[source]
            rows = [row for _, row in pairs]
            try:
                loaded = samples_of(dataset, rows)
            except Exception as error:
                raise DataError(
                    f"cannot load rows {rows[:SHOWN]} of source {name!r}: {type(error).__name__}:"
                    f" {error}"
                ) from error
            for (place, _), sample in zip(pairs, loaded, strict=True):
                samples[place] = self._marked(sample, source)
        return samples

    def describe(self, index: int) -> str:
        """Return a row's source, its number there, and its name if it has one."""
        source, row = self._find(index)
        name, dataset = [*self.sources.items()][source]
        return f"{name} {row} {name_of(dataset, row)}".rstrip()

    def _find(self, index: int) -> tuple[int, int]:
        source = bisect_right(self._ends, index)
        return source, index - (self._ends[source - 1] if source else 0)

    def _marked(self, sample: Any, source: int) -> Any:
        if not isinstance(sample, dict):
            return sample
        if SOURCE in sample:
            raise DataError(
                f"samples of source {[*self.sources][source]!r} have an entry 'source', in which a"
                " mixture puts the number of their source; rename it"
            )
        return {**sample, SOURCE: source}


def plan_for(
    dataset: Any,
    batch_size: BatchSize | None,
    lanes: int,
    seed: int,
    *,
    weights: Weights | None,
    name: str,
    shuffle: bool,
    drop_last: bool,
    group_by: GroupBy | None,
    order: Order | None,
) -> tuple[Any, Plan]:
    """Return the data set that a loop loads, and its plan.

    A dict of data sets, and one with batches that vary, have a `MixturePlan`.
    """
    is_dict = isinstance(dataset, Mapping)
    if weights is not None and not is_dict:
        raise ConfigError(
            "weights= are those of a dict of data sets, such as {'code': a, 'prose': b}; for those"
            " of single samples, write order=ss.Weighted(weights)"
        )
    if not is_dict and not callable(batch_size):
        options: dict[str, Any] = {"drop_last": drop_last, "group_by": group_by, "order": order}
        size = size_of(dataset)
        return dataset, make_plan(size, batch_size, lanes, seed, shuffle=shuffle, **options)
    what = "a dict of data sets" if is_dict else "a function as batch_size"
    for option, is_used, reason in (
        ("drop_last", drop_last, "each step is full"),
        ("group_by", group_by is not None, "rows are shuffled or in order"),
        ("order", order is not None, "rows are shuffled or in order"),
    ):
        if is_used:
            raise ConfigError(
                f"{option} cannot be used with {what}, because {reason}; leave it out"
            )
    if batch_size is None:
        raise ConfigError(f"{what} needs batch_size, the rows of a step for all lanes together")
    if not is_dict:
        sizes, weights = {name: size_of(dataset)}, {name: 1.0}
    else:
        dataset = Mixture(dataset)
        sizes = dataset.sizes
    if weights is None:
        raise ConfigError(
            f"{what} is a mixture, which needs weights=, a dict with a number for each of"
            f" {', '.join(sizes)}, such as their lengths; to train on one of them, pass that one"
        )
    return dataset, MixturePlan(sizes, batch_size, lanes, seed, weights=weights, shuffle=shuffle)
