"""Metrics that lanes must not update, and the variables of a loop's body that they must not change.

Each worker's metric would have the samples of its own lanes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal

from torch import Tensor
from torch.nn import Module

from samestep.data.attributes import plain_attributes
from samestep.data.search import is_metric, is_metric_class, own_dict
from samestep.errors import LossError
from samestep.guards.reach import Reach
from samestep.step.lane_pass import LanePass, StepPlugin
from samestep.user_code import is_installed

MOST_CLASSES: Final = 256
MOST_ITEMS: Final = 16  # of a container that is searched for metrics
MOST_ELEMENTS: Final = 2**20  # of a tensor that may be a state of a loop's body
# of a variable; `own` is an object of a user's class
Role = Literal["metric", "tensor", "module", "container", "own"]


class MetricGuard(StepPlugin):
    """Refuses metric objects that a loss function updates, such as those of torchmetrics.

    Each worker's object would have the samples of its own lanes, and rank 0 would log its part.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._before: list[tuple[str, Any, Any]] = []  # metrics with their names and states
        self._has_body = False

    def begin(self, lane_pass: LanePass) -> None:
        """Note the states of metrics that the loss function and the model reach.

        Also of the variables of a loop's body.
        """
        loss = lane_pass.loss
        body = loss.body if loss.embed is None else {}
        self._has_body = bool(body)
        of_body = [pair for pair in body.items() if _accumulates(pair[1])]
        metrics = [*self._reach.metrics(loss.embed or loss.fn), *of_body]
        self._before = [(name, metric, _state_of(metric)) for name, metric in metrics]

    def report(self) -> None:
        """Raise `LossError` if a lane has updated one of them."""
        before, self._before = self._before, []
        for name, metric, state in before:
            if _state_of(metric) != state:
                raise _updated(name, metric, in_body=self._has_body)


def _updated(name: str, metric: Any, *, in_body: bool) -> LossError:
    start = f"the loss function updated {name}"
    if in_body:
        start = f"the body of the loop over lanes updated {name}"
    advice = (
        "Return an entry per item, for example (loss,"
        ' {"accuracy": logits.argmax(1) == labels}), or a value of a function without a'
        " state, such as those of torchmetrics.functional; run.evaluate merges metrics"
    )
    if not is_metric(metric):
        advice = (
            "Pass numbers as metrics, such as batch.backward(loss, accuracy=...), and update it"
            " from batch.means after the loop over lanes"
        )
    return LossError(
        f"{start}, a {type(metric).__name__}: each worker's would hold the samples of its own"
        " lanes, so that its value would depend on the number of workers. " + advice
    )


def state_of_body(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a loop's body that lanes must not change: metrics, modules, tensors.

    Also dicts and objects of numbers, such as an average meter. Not large tensors, nor those of a
    graph, such as a former lane's, which would stay in memory.
    """
    state: dict[str, Any] = {}
    for name, value in variables.items():
        role = _role_of(type(value))  # type: ignore[arg-type]
        if role is None:
            continue
        if role == "tensor":
            if value.grad_fn is None and value.numel() <= MOST_ELEMENTS:
                state[name] = value
        elif role == "module" or _accumulates(value):
            state[name] = value
        elif role == "container" and len(value) <= MOST_ITEMS:
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            state |= {f"{name}[{key!r}]": part for key, part in items if _accumulates(part)}
    return state


def _accumulates(value: Any) -> bool:
    """Return whether a value is a metric, or a dict or an object of a user's class with numbers."""
    role = _role_of(type(value))  # type: ignore[arg-type]
    if role == "metric":
        return True
    if role != "own" and type(value) is not dict:
        return False
    attributes = value if type(value) is dict else own_dict(value)
    if not 0 < len(attributes) <= MOST_ITEMS:
        return False
    kinds = set(map(type, attributes.values()))  # numbers and little else
    are_plain = all(issubclass(kind, (int, float, str, type(None))) for kind in kinds)
    return are_plain and not kinds.isdisjoint({int, float})


@lru_cache(maxsize=MOST_CLASSES)  # each step of a loop over lanes asks for each of its variables
def _role_of(kind: type) -> Role | None:
    if is_metric_class(kind):
        return "metric"
    if issubclass(kind, Tensor):
        return "tensor"
    if issubclass(kind, Module):
        return "module"
    if issubclass(kind, (dict, list, tuple)):
        return "container"
    is_own = not is_installed(kind) or kind.__module__.startswith("samestep.")  # ss.Patience counts
    return "own" if is_own else None


def _state_of(metric: Any) -> tuple[Any, ...]:
    if type(metric) is dict:
        return (repr(metric),)
    lengths = [len(value) for value in own_dict(metric).values() if isinstance(value, list)]
    return plain_attributes(metric), lengths
