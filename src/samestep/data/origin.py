"""The samples of a batch: their indices and names in the data set, and how to load them again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.utils.data import Subset

from samestep.data.plan import Plan
from samestep.host import printable

# attributes of data sets with an entry for each sample: a path or name, or a tuple that begins so
NAMES: Final = ("samples", "imgs", "images", "paths", "files", "names")
LONGEST_NAME: Final = 200


class Origin(NamedTuple):
    """The data set of a batch, and its position in the plan: `step` of `epoch`.

    `load_at(epoch, step, lane)` loads the batch of any lane.
    """

    loop: str
    dataset: Any
    plan: Plan
    epoch: int
    step: int
    load_at: Callable[[int, int, int], Any]

    def load(self, lane: int) -> Any:
        """Load the batch of any lane now."""
        return self.load_at(self.epoch, self.step, lane)

    def indices(self, lane: int) -> list[int]:
        """Return the indices of a lane's samples, in the order of the lane batch."""
        indices: list[int] = self.plan.indices(self.epoch, self.step, lane).tolist()
        return indices

    def describe(self, lane: int) -> list[str]:
        """Return the samples of a lane as texts: the index, and the name if there is one."""
        names = ((index, name_of(self.dataset, index)) for index in self.indices(lane))
        return [f"{index} ({name})" if name else str(index) for index, name in names]


def name_of(dataset: Any, index: int) -> str:
    """Return the name of a sample, "" if the data set has none.

    It is what a method `describe(index)` returns, or the entry of an attribute of `NAMES`.
    """
    with suppress(Exception):  # of user code, for a text only
        while isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        if callable(describe := getattr(dataset, "describe", None)):
            return _short(describe(index))
        for attribute in NAMES:
            values = getattr(dataset, attribute, None)
            if values is None or callable(values) or len(values) != len(dataset):
                continue
            value = values[index]
            value = value[0] if isinstance(value, (tuple, list)) else value
            if isinstance(value, (str, Path)):
                return _short(value)
    return ""


def _short(value: object) -> str:
    return printable(str(value))[:LONGEST_NAME]
