"""A test of the laws of metrics, for metrics of users."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.errors import ConfigError, EvaluationError
from samestep.metrics import Metric, as_metric, copied


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
        return got.keys() == expected.keys() and all(
            _close(got[name], value, rtol, atol) for name, value in expected.items()
        )
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        pairs = zip(got, expected, strict=False)
        return len(got) == len(expected) and all(_close(*pair, rtol, atol) for pair in pairs)
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return False
    except TypeError:  # not numbers
        return bool(got == expected)
    return True
