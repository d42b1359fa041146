"""Adapter from torchmetrics objects to `Metric`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch

from samestep.errors import EvaluationError

# Larger tensors among the attributes of a user's metric are weights, not sums.
MAX_ATTRIBUTE_ELEMENTS: Final = 4096


class TorchMetrics:
    """A `Metric` of copied states of a torchmetrics object and all metrics in it, one per part.

    torchmetrics' own `sync` reduces them when the value is computed, as it reduces the states of
    processes. Pickling leaves out the object itself, which may hold networks or functions.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self.metric, self._name = metric, name
        self.parts: list[list[dict[str, Any]]] = []
        self._attributes: dict[str, Any] = {}  # of users' metrics, which no update should change
        inside = _modules(metric)
        _refuse_ordered(name, inside)
        self._take(inside)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "metric": None}

    @property
    def is_collection(self) -> bool:
        """Whether `compute` returns named values of several metrics."""
        return hasattr(self.metric, "compute_groups")

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the object and append its state as another part."""
        self.reset()
        self.metric.update(*args, **kwargs)
        self._take(_modules(self.metric))
        self.reset()

    def reset(self) -> None:
        """Reset the object and every metric in it, even those that its own `reset` leaves out."""
        inside = _modules(self.metric)
        _reset(inside)
        self._check_attributes(_attributes(inside))

    def merge(self, other: TorchMetrics) -> None:
        """Append the parts of `other`."""
        self._check_attributes(other._attributes)
        self.parts.extend(other.parts)

    def compute(self) -> Any:
        """Return the object's value over all parts; the object is reset."""
        inside = _modules(self.metric)
        leaves = _leaves(inside)
        available = [leaf.distributed_available_fn for leaf in leaves]
        try:
            self.reset()
            reduced = [
                _reduced(leaf, [part[number] for part in self.parts])
                for number, leaf in enumerate(leaves)
            ]
            _reset(inside)
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
            _reset(inside)

    def _take(self, inside: Sequence[Any]) -> None:
        for module in inside:
            if hasattr(module, "compute_groups"):
                # Metrics whose states agree by chance in one block must not stay one group.
                list(module.items())  # gives each metric of a group its own copy of the state
                module.add_metrics({})  # makes the next update find the groups again
        part = [
            {name: _copied(leaf, state) for name, state in leaf.metric_state.items()}
            for leaf in _leaves(inside)
        ]
        self.parts.append(part)
        self._attributes = _attributes(inside)

    def _check_attributes(self, others: dict[str, Any]) -> None:
        """Raise if an update changed an attribute that is not a state, and so is not merged."""
        for name, value in self._attributes.items():
            if name in others and _text(value) != _text(others[name]):
                raise EvaluationError(
                    f"{self._name!r} cannot be merged, because update changes {name}, which is not "
                    "a state; create it with add_state and a dist_reduce_fx"
                )


def _modules(metric: Any) -> list[Any]:
    """Return a torchmetrics object and all modules in it, even those in plain lists and dicts."""
    kinds = _kinds("Metric", "MetricCollection")
    modules: dict[int, torch.nn.Module] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            if id(value) not in modules:
                modules[id(value)] = value
                inside = [each for name, each in vars(value).items() if name != "_modules"]
                for each in (*value.children(), *(inside if isinstance(value, kinds) else ())):
                    visit(each)
        elif isinstance(value, (list, tuple, dict)):
            for each in value.values() if isinstance(value, dict) else value:
                visit(each)

    visit(metric)
    return list(modules.values())


def _metrics(modules: Sequence[Any]) -> list[Any]:
    """Return the metrics among modules, without collections."""
    return [module for module in modules if isinstance(module, _kinds("Metric"))]


def _leaves(modules: Sequence[Any]) -> list[Any]:
    """Return the metrics that have states; torchmetrics' wrappers have none of their own."""
    return [each for each in _metrics(modules) if not isinstance(each, _stateless())]


@cache
def _kinds(*names: str) -> tuple[type, ...]:
    return tuple(getattr(sys.modules["torchmetrics"], name) for name in names)


def _is_theirs(metric: Any) -> bool:
    return type(metric).__module__.partition(".")[0] == "torchmetrics"


def _reset(modules: Sequence[Any]) -> None:
    modules[0].reset()
    for each in _metrics(modules[1:]):
        each.reset()


def _refuse_ordered(name: str, modules: Sequence[Any]) -> None:
    """Raise if one of torchmetrics' wrappers that depend on the order of calls is among modules.

    Users' metrics that hold others are merged, as torchmetrics' own wrappers without a state are.
    """
    from torchmetrics import wrappers

    ordered = (wrappers.MetricTracker, wrappers.MinMaxMetric, wrappers.Running)
    for each in modules:
        is_leaf = isinstance(each, _kinds("Metric")) and not isinstance(each, _stateless())
        has_modules = next(each.children(), None) is not None
        is_unknown = (
            is_leaf and has_modules and _is_theirs(each) and len(_leaves(_modules(each))) > 1
        )
        if isinstance(each, ordered) or is_unknown:
            raise EvaluationError(
                f"{name!r} contains {type(each).__name__}, whose state over blocks of samples "
                "cannot be merged; return the metric that it wraps"
            )


@cache
def _stateless() -> tuple[type, ...]:
    """Return torchmetrics' wrappers whose only state is that of the metrics in them."""
    from torchmetrics import wrappers
    from torchmetrics.metric import CompositionalMetric

    return (
        CompositionalMetric,
        wrappers.BootStrapper,
        wrappers.ClasswiseWrapper,
        wrappers.MetricInputTransformer,
        wrappers.MultioutputWrapper,
        wrappers.MultitaskWrapper,
    )


def _attributes(modules: Sequence[Any]) -> dict[str, Any]:
    """Return the numbers and small tensors in users' metrics that are not states, by name."""
    return {
        f"{type(each).__name__}.{name}": value.detach().clone() if is_tensor else value
        for each in _metrics(modules)
        if not _is_theirs(each)
        for name, value in (*vars(each).items(), *each.named_buffers(recurse=False))
        if name not in each.metric_state and name not in _own_attributes()
        if (is_tensor := isinstance(value, torch.Tensor)) or type(value) in {int, float}
        if not is_tensor or value.numel() <= MAX_ATTRIBUTE_ELEMENTS
    }


@cache
def _own_attributes() -> frozenset[str]:
    """Return the names of the attributes of every torchmetrics object."""
    return frozenset(vars(sys.modules["torchmetrics"].SumMetric()))


def _text(value: Any) -> str:
    """Return the values of a number or tensor as text, in which a NaN equals itself."""
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def _copied(leaf: Any, state: Any) -> Any:
    """Return a copy of one state: a tensor or a list of tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if not all(isinstance(part, torch.Tensor) for part in state):
        raise EvaluationError(
            f"{type(leaf).__name__} has a non-tensor state, which cannot be "
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
