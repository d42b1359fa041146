"""The state of an optimizer: parts of it, and what stands in for that of a sharded one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final, NamedTuple, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from samestep.errors import OptimizerError

# State with one number per parameter; other state tensors have one per element.
SCALAR_STATE: Final = frozenset({"step", "mu_product", "eta", "mu"})


class DividedState(ABC):
    """What workers save in parts: `state_dict` has this worker's, as `TensorSlice` leaves."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this worker's part of the whole state."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this worker's part of the whole state."""

    def shared_state(self) -> dict[str, Any]:
        """Return what is equal on all workers."""
        return {}

    def counters_of_cut(self) -> dict[str, Any]:
        """Return the numbers in the state of tensors of which other workers have a part."""
        return {}


class LockedState:
    """Stands in for the state of a sharded optimizer, and refuses every use, also a copy."""

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise `OptimizerError`."""
        raise OptimizerError(self._refusal)


for _name in {*dir(dict)} - {*dir(object)} | {"__deepcopy__", "__reduce_ex__"}:
    setattr(LockedState, _name, LockedState.refuse)


class SavedValues(NamedTuple):
    """The state of what was one parameter of an update, at these addresses."""

    start: int
    stop: int
    values: Mapping[str, Any]


class SavedState(LockedState):
    """Stands in for the state in a `state_dict`, which may be copied and loaded."""

    def __init__(self, refusal: str, saved: list[SavedValues]) -> None:
        super().__init__(refusal)
        self.saved = saved

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copies = [each._replace(values=deepcopy(each.values, memo)) for each in self.saved]
        return type(self)(self._refusal, copies)

    def of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return the values of a parameter of an update, since then perhaps divided from others."""
        address = parameter.data_ptr()
        for start, stop, values in self.saved:
            if start <= address < stop:
                if stop - start == parameter.nbytes:
                    return values
                first = (address - start) // parameter.element_size()
                return state_of(slice(first, first + parameter.numel()), values)
        return {}


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a `state_dict`; keep the dtypes of scalars, which torch casts to the parameter's."""
    type(optimizer).load_state_dict(optimizer, dict(state))
    for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], loaded["params"], strict=True):
            values = state["state"].get(number, {})
            for name in SCALAR_STATE & values.keys():
                if isinstance(values[name], Tensor):
                    target = optimizer.state[parameter]
                    target[name] = values[name].to(target[name].device, copy=True)


def state_of(part: slice, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a part of a segment: views of what is elementwise, copies of the rest."""
    return {
        name: value[part] if is_elementwise(name, value) else copied(value)
        for name, value in state.items()
    }


def numbers_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not elementwise in a state, as JSON."""
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in state.items()
        if not is_elementwise(name, value)
    }


def copied(value: Any) -> Any:
    """Return a value of a state that shares no memory with this one."""
    return value.clone() if isinstance(value, Tensor) else value


def is_elementwise(name: str, value: Any) -> bool:
    """Return whether the value `name` of a state has one number per element."""
    return isinstance(value, Tensor) and name not in SCALAR_STATE
