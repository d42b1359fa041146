"""Adapter from torchmetrics objects to `Metric`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from samestep.errors import EvaluationError


class TorchMetrics:
    """A `Metric` of copied states of a torchmetrics object, one per part.

    torchmetrics' own `sync` reduces them when the value is computed, as it reduces the states of
    processes. Pickling leaves out the object itself, which may hold networks or functions.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self.metric = metric
        self.parts: list[list[dict[str, Any]]] = []
        _refuse_other_wrappers(name, metric)
        self._take()

    def __getstate__(self) -> dict[str, Any]:
        return {"metric": None, "parts": self.parts}

    @property
    def is_collection(self) -> bool:
        """Whether `compute` returns named values of several metrics."""
        return hasattr(self.metric, "compute_groups")

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the object and append its state as another part."""
        self.metric.reset()
        self.metric.update(*args, **kwargs)
        self._take()
        self.metric.reset()

    def merge(self, other: TorchMetrics) -> None:
        """Append the parts of `other`."""
        self.parts.extend(other.parts)

    def compute(self) -> Any:
        """Return the object's value over all parts; the object is reset."""
        leaves = _leaves(self.metric)
        available = [leaf.distributed_available_fn for leaf in leaves]
        try:
            self.metric.reset()
            reduced = [
                _reduced(leaf, [part[number] for part in self.parts])
                for number, leaf in enumerate(leaves)
            ]
            self.metric.reset()
            for leaf, states in zip(leaves, reduced, strict=True):
                leaf.distributed_available_fn = lambda: False  # all parts are here
                for name, state in states.items():
                    setattr(leaf, name, state)
            with warnings.catch_warnings():  # its states were set, not updated
                warnings.filterwarnings("ignore", "The ``compute`` method of metric")
                return self.metric.compute()
        finally:
            for leaf, function in zip(leaves, available, strict=True):
                leaf.distributed_available_fn = function
            self.metric.reset()

    def _take(self) -> None:
        for module in self.metric.modules():
            if hasattr(module, "compute_groups"):
                # Metrics whose states agree by chance in one block must not stay one group.
                list(module.items())  # gives each metric of a group its own copy of the state
                module.add_metrics({})  # makes the next update find the groups again
        part = [
            {name: _copied(leaf, state) for name, state in leaf.metric_state.items()}
            for leaf in _leaves(self.metric)
        ]
        self.parts.append(part)


def _metrics(metric: Any) -> list[Any]:
    """Return a torchmetrics object and those inside it, without collections."""
    kind = sys.modules["torchmetrics"].Metric
    return [module for module in metric.modules() if isinstance(module, kind)]


def _leaves(metric: Any) -> list[Any]:
    """Return the metrics that have states; wrappers have none."""
    return [each for each in _metrics(metric) if len(_metrics(each)) == 1]


def _refuse_other_wrappers(name: str, metric: Any) -> None:
    """Raise if a metric has state other than the states of the metrics inside it."""
    from torchmetrics import wrappers
    from torchmetrics.metric import CompositionalMetric

    known = (
        CompositionalMetric,
        wrappers.BootStrapper,
        wrappers.ClasswiseWrapper,
        wrappers.MultioutputWrapper,
        wrappers.MultitaskWrapper,
    )
    for each in _metrics(metric):
        if type(each) not in known and len(_metrics(each)) > 1:
            raise EvaluationError(
                f"{name!r} contains {type(each).__name__}, whose state over blocks of samples "
                "cannot be merged; return the metric that it wraps"
            )


def _copied(leaf: Any, state: Any) -> Any:
    """Return a copy of one state: a tensor or a list of tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if not all(isinstance(part, torch.Tensor) for part in state):
        raise EvaluationError(
            f"{type(leaf).__name__} has a state that is not made of tensors, which cannot be "
            "merged; use gather=True and compute it from the outputs"
        )
    return [part.detach().clone() for part in state]


def _reduced(leaf: Any, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the states over all parts, reduced as torchmetrics reduces those of processes."""
    states: dict[str, Any] = {}
    gathered: dict[int, list[torch.Tensor]] = {}
    for name, first in parts[0].items():
        if isinstance(first, list):
            states[name] = [state.to(leaf.device) for part in parts for state in part[name]]
        else:
            tensors = [part[name].to(leaf.device) for part in parts]
            gathered[id(tensors[0])] = tensors
            setattr(leaf, name, tensors[0])

    def gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
        del group
        return gathered.get(id(tensor), [tensor])

    if not gathered:
        return states
    leaf.sync(dist_sync_fn=gather, distributed_available=lambda: True)
    return {**leaf.metric_state, **states}
