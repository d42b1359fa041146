"""Means over all lanes; metrics of an evaluation: the protocol, merging, and a check of theirs."""

from __future__ import annotations

import io
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pickle import PicklingError
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from samestep.comm.base import World
from samestep.data.batch import to_device
from samestep.errors import ConfigError, EvaluationError
from samestep.step.lane_pass import LaneResult
from samestep.step.layout import Span, subtrees, tree_sum
from samestep.torchmetrics import TorchMetrics


@dataclass(frozen=True)
class Mean:
    """A float64 sum over a number of items, or over the sum of their weights."""

    total: float
    count: float

    @classmethod
    def of(cls, sums: Sequence[tuple[float, float]]) -> Mean:
        """Merge (sum, count) pairs, in any order, because their sum is rounded once."""
        total = _exact_sum([total for total, _ in sums])
        return cls(total, math.fsum(count for _, count in sums))

    @property
    def value(self) -> float:
        """The mean. Raises `EvaluationError` if there are no items."""
        if self.count == 0:
            raise EvaluationError("a mean needs at least one item, got 0")
        return self.total / self.count


class Means(Mapping[str, float]):
    """Means by name over all items of a global batch, `"loss"` first; a read-only mapping.

    They have the same bits at any number of workers. They are computed when read: each sum is exact
    and rounded once to float64.

    Example:
        >>> for batch in run.batches(train_set, 32, steps=1):
        ...     means = run.backward(loss_fn, model, batch)
        >>> means["loss"] > 0
        True
    """

    def __init__(
        self, results: Sequence[LaneResult], reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        self._results, self._sums = results, reduction == "sum"

    @cached_property
    def _names(self) -> tuple[str, ...]:
        names = (name for result in self._results for name in result.metrics if _has(result, name))
        return tuple(dict.fromkeys(names))

    def __getitem__(self, name: str) -> float:
        if name not in self._names:
            available = ", ".join(self._names) or "none, because no lane had items"
            raise KeyError(f"no metric {name!r}; available: {available}")
        return self._mean(name, self._results).value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Means({', '.join(f'{name}={self[name]:.6g}' for name in self)})"

    def by_worker(self, name: str) -> list[float]:
        """Return the mean over the items of each worker that had any, by rank.

        Example:
            >>> for batch in run.batches(train_set, 32, steps=1):
            ...     means = run.backward(loss_fn, model, batch)
            >>> len(means.by_worker("loss")) == run.world_size
            True
        """
        ranks = sorted({result.rank for result in self._results if _has(result, name)})
        return [
            self._mean(name, [result for result in self._results if result.rank == rank]).value
            for rank in ranks
        ]

    def _mean(self, name: str, results: Sequence[LaneResult]) -> Mean:
        mean = Mean.of([self._sum(name, result) for result in results if _has(result, name)])
        # without items, the sum itself: an image without boxes also has a loss
        return Mean(mean.total, 1) if self._sums and not mean.count else mean

    def _sum(self, name: str, result: LaneResult) -> tuple[float, float]:
        """Return the sum of a metric over a lane, and over how many items or entries."""
        value = result.metrics[name]
        if isinstance(value, list):  # [sum, count]
            return value[0], value[1]
        return value if self._sums else value * result.count, result.count


def _has(result: LaneResult, name: str) -> bool:
    """Return whether a lane has a metric, which is no pair with a count of 0."""
    value = result.metrics.get(name)
    return value is not None and not (isinstance(value, list) and value[1] == 0)


@runtime_checkable
class Metric(Protocol):
    """A value over many samples, computed in parts that are merged.

    A part is a new metric that was updated with some of the samples. `run.evaluate` merges parts in
    data set order, in a grouping that depends only on the number of parts. `check_metric` tests an
    implementation. Parts are pickled, so define the class at module level.

    Example:
        >>> class Largest:
        ...     def __init__(self):
        ...         self.value = float("-inf")
        ...
        ...     def update(self, values):
        ...         self.value = max(self.value, *values.tolist())
        ...
        ...     def merge(self, other):
        ...         self.value = max(self.value, other.value)
        ...
        ...     def compute(self):
        ...         return self.value
        >>> isinstance(Largest(), ss.Metric)
        True
        >>> ss.check_metric(Largest, [(torch.rand(5),), (torch.rand(3),), (torch.rand(4),)])
    """

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add samples."""

    def merge(self, other: Any) -> None:
        """Add the samples of `other`, a metric of the same kind, and leave `other` unchanged."""

    def compute(self) -> Any:
        """Return the value over all samples so far, and leave the state unchanged."""


def as_metric(name: str, value: Any) -> Metric | None:
    """Return `value` as a metric, or None if it is not one."""
    if isinstance(value, Metric):
        return value
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics and isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection)):
        return TorchMetrics(name, value)
    if hasattr(value, "compute"):
        raise EvaluationError(
            f"{name!r} must be a scalar, a samestep.Metric (update, merge, compute), or a "
            f"torchmetrics Metric or MetricCollection, got {type(value).__name__}"
        )
    return None


def copied(metric: Metric) -> Metric:
    """Return a copy of a metric with all tensors on the CPU."""
    copy: Metric = _from_bytes(_to_bytes(metric))
    if isinstance(metric, TorchMetrics) and isinstance(copy, TorchMetrics):
        copy.metric = metric.metric
    return copy


def merged_values(
    world: World, own_blocks: range, blocks: int, metrics: Sequence[dict[str, Metric]]
) -> dict[str, Any]:
    """Return the values of metrics over all blocks; `metrics` are those of `own_blocks`.

    Metrics are merged along the tree over the number of blocks: first this worker's subtrees, then
    the rest on rank 0, whose values all workers get. All workers must have the same names.
    """

    def block(span: Span) -> dict[str, Metric] | None:
        if span[1] - span[0] > 1:
            return None
        return {
            name: copied(metric) for name, metric in metrics[span[0] - own_blocks.start].items()
        }

    parts: Any
    try:
        parts = {span: tree_sum(span, block, _merge) for span in subtrees(own_blocks, blocks)}
    except EvaluationError as error:  # raised on every worker
        parts = error
    data = _to_bytes({} if world.rank == 0 else parts)
    gathered = world.gather_signed(data, "gathering metrics of an evaluation")
    values: Any = None
    if gathered is not None:
        try:
            spans: dict[Span, dict[str, Metric]] = {}
            for worker_parts in (parts, *map(_from_bytes, gathered[1:])):
                if isinstance(worker_parts, EvaluationError):
                    raise worker_parts
                spans |= worker_parts
            values = _values(tree_sum((0, blocks), spans.get, _merge))
        except EvaluationError as error:
            values = error
    values = world.broadcast_object(values, "sharing metrics of an evaluation")
    if isinstance(values, EvaluationError):
        raise values
    return dict(values)


def unique(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings in one. Raises `EvaluationError` if they share a name."""
    for name in values.keys() & more.keys():
        raise EvaluationError(
            f"two results are named {name!r}; rename one, or give its MetricCollection a prefix"
        )
    return {**values, **more}


def _merge(metrics: dict[str, Metric], others: dict[str, Metric]) -> dict[str, Metric]:
    for name, metric in metrics.items():
        metric.merge(others[name])
    return metrics


def _values(metrics: dict[str, Metric]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = _plain(metric.compute())
        is_collection = isinstance(metric, TorchMetrics) and metric.is_collection
        values = unique(values, value if is_collection else {name: value})
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return float(value) if is_scalar else to_device(value, "cpu")


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (AttributeError, PicklingError, TypeError) as error:
        raise EvaluationError(
            f"a metric cannot be pickled ({error}); define its class at module level"
        ) from error
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    # Metrics are objects of user classes; `World.gather_signed` has verified those of others.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def check_metric(
    make: Callable[[], Any],
    parts: Sequence[tuple[Any, ...]],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-8,
) -> None:
    """Check that a metric follows the laws that `run.evaluate` relies on.

    Args:
        make: Returns a new `Metric` or torchmetrics object.
        parts: The arguments of `update`, one tuple per part, at least 3, which should differ in
            their values and numbers of samples.
        rtol: Relative tolerance for values that rounding may change.
        atol: Absolute tolerance for them.

    Raises:
        AssertionError: A law is broken; the message says which.
        ConfigError: There are fewer than 3 parts.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> ss.check_metric(MeanMetric, [(torch.rand(5),), (torch.rand(3),), (torch.rand(4),)])
    """
    if len(parts) < 3:
        raise ConfigError(f"parts must have at least 3 tuples of arguments, got {len(parts)}")
    if make() is make():
        raise AssertionError("make() must return a new object in each call")
    laws = _Laws(make, parts, rtol, atol)
    laws.check_merge()
    laws.check_copies()
    laws.check_aliasing()


@dataclass(frozen=True)
class _Laws:
    make: Callable[[], Any]
    parts: Sequence[tuple[Any, ...]]
    rtol: float
    atol: float

    def check_merge(self) -> None:
        expected = self._new(*self.parts).compute()

        def check(law: str, metrics: Sequence[Metric]) -> None:
            _require(law, _merged(metrics).compute(), expected, self.rtol, self.atol)

        check("merging all parts must equal updating one metric with all of them", self._each())
        for number in range(1, len(self.parts)):
            groups = [_merged(self._each()[:number]), _merged(self._each()[number:])]
            check("merging must not depend on the grouping", groups)
        shuffler = random.Random(0)
        orders = [shuffler.sample(self.parts, len(self.parts)) for _ in range(4)]
        for order in [self.parts[::-1], *orders]:
            check("merging must not depend on the order", [self._new(args) for args in order])
        for number in range(len(self.parts) + 1):
            metrics = self._each()
            metrics.insert(number, self._new())
            check("merging an empty part must not change the value", metrics)

    def check_copies(self) -> None:
        expected = _merged(self._each()).compute()
        copies = [copied(metric) for metric in self._each()]
        _require("pickling must not change a part", _merged(copies).compute(), expected)
        metrics = self._each()
        for metric in metrics:
            metric.compute()
        _require("compute must not change the state", _merged(metrics).compute(), expected)

    def check_aliasing(self) -> None:
        law = "merge must not change the other metric, nor share its state"
        for start in ([], self.parts[:1]):
            first, second, third = self._new(*start), *self._each()[1:3]
            expected = self._new(self.parts[1]).compute()
            first.merge(second)
            merged = copied(first).compute()
            first.merge(third)
            first.update(*self.parts[2])
            _require(law, second.compute(), expected)
            first, second = self._new(*start), self._new(self.parts[1])
            first.merge(second)
            second.merge(third)
            second.update(*self.parts[2])
            _require(law, first.compute(), merged)

    def _new(self, *updates: tuple[Any, ...]) -> Metric:
        metric = as_metric("make()", self.make())
        if metric is None:
            raise EvaluationError("make() must return a metric with update, merge and compute")
        for args in updates:
            metric.update(*args)
        return metric

    def _each(self) -> list[Metric]:
        return [self._new(args) for args in self.parts]


def _require(law: str, got: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    if not _close(got, expected, rtol, atol):
        raise AssertionError(f"{law}: expected {expected!r}, got {got!r}")


def _merged(metrics: Sequence[Metric]) -> Metric:
    for other in metrics[1:]:
        metrics[0].merge(other)
    return metrics[0]


def _close(got: Any, expected: Any, rtol: float, atol: float) -> bool:
    if isinstance(expected, dict) and isinstance(got, dict):
        pairs = [(got.get(name), value) for name, value in expected.items()]
        return got.keys() == expected.keys() and all(_close(*pair, rtol, atol) for pair in pairs)
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        pairs = list(zip(got, expected, strict=False))
        return len(got) == len(expected) and all(_close(*pair, rtol, atol) for pair in pairs)
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return False
    except TypeError:  # not numbers
        return bool(got == expected)
    return True


def _exact_sum(values: Sequence[float]) -> float:
    """Return the sum of values, rounded once."""
    infinite = [value for value in values if not math.isfinite(value)]
    if infinite:
        return sum(infinite)
    try:
        return math.fsum(values)
    except OverflowError:  # of an intermediate sum, and perhaps of the total
        return math.fsum(value * 2.0**-64 for value in values) * 2.0**64
