"""The protocol of metrics, and their merging over the blocks of all workers."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from pickle import PicklingError
from typing import Any, Protocol, runtime_checkable

import torch

from samestep.comm.base import World
from samestep.data.batch import to_device
from samestep.errors import EvaluationError
from samestep.step.tree import Span, subtrees, tree_sum
from samestep.torchmetrics import TorchMetrics


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
    world: World, own: range, blocks: int, metrics: Sequence[dict[str, Metric]]
) -> dict[str, Any]:
    """Return the values of metrics over all blocks; `metrics` are those of this worker's `own`.

    Metrics are merged along the tree over the number of blocks: first this worker's subtrees, then
    the rest on rank 0, whose values all workers get. All workers must have the same names.
    """

    def block(span: Span) -> dict[str, Metric] | None:
        if span[1] - span[0] > 1:
            return None
        return {name: copied(metric) for name, metric in metrics[span[0] - own.start].items()}

    parts: dict[Span, dict[str, Metric]] = {
        span: tree_sum(span, block, _merge) for span in subtrees(own, blocks)
    }
    data = _to_bytes({} if world.rank == 0 else parts)
    gathered = world.gather_bytes(data, "gathering metrics of an evaluation")
    values: Any = None
    if gathered is not None:
        for other in gathered[1:]:
            parts |= _from_bytes(other)
        try:
            values = _values(tree_sum((0, blocks), parts.get, _merge))
        except EvaluationError as error:  # raised on every worker
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
    # Metrics are objects of user classes, sent between the workers of one run.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
