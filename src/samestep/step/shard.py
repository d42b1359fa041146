"""Sharded optimizers: each worker updates its slice, in less time and memory, with the same bits.

Parameters move into flat storage, and the optimizer gets this worker's slice of it. Slices are cut
so that vectorized kernels treat every element as in the complete parameter. After each step, they
are gathered (Rajbhandari et al. 2020, "ZeRO", stage 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from samestep.comm.base import World
from samestep.errors import OptimizerError
from samestep.step.exchange import Exchange, buckets
from samestep.step.gradients import Parameters
from samestep.step.layout import ALIGNMENT, Fragment, TensorSlice, storage_order

ELEMENTWISE: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
    optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
# State with one number per parameter; other state tensors have one per element.
SCALAR_STATE: Final = frozenset({"step", "mu_product", "eta", "mu"})


@dataclass
class Segment:
    """Adjacent fragments, from `start` of a worker's slice, updated as one tensor `parameter`."""

    fragments: list[Fragment]
    parameter: Parameter
    start: int

    def view_in(self, own_slice: Tensor) -> Tensor:
        """Return this segment's elements of the worker's slice."""
        return own_slice[self.start : self.start + self.parameter.numel()]

    def part(self, values: Tensor, fragment: Fragment) -> Tensor:
        """Return a fragment's elements of `values`, which has one per element of the segment."""
        start = fragment.offset - self.start
        return values[start : start + fragment.stop - fragment.start]


class FlatBuffer:
    """Parameters of one dtype in flat storage; the optimizer updates segments of a worker's slice.

    Adjacent fragments share a segment if their sizes are multiples of 64 elements (so that no
    kernel's tail moves), they are in one parameter group, and all or none had a gradient.
    """

    def __init__(
        self, parameters: Parameters, lanes: int, world: World, optimizer: optim.Optimizer
    ) -> None:
        self.exchange = Exchange(parameters, lanes, world)
        self._optimizer = optimizer
        self._flats = [flat for (flat,) in self.exchange.shared_storage(rows=1)]
        flat = self._flats[self.exchange.local_rank]
        for parameter, view in zip(parameters, self.exchange.views(flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.own = self.exchange.slice_of(flat, world.rank)
        self.fragments = self.exchange.layout.fragments(world.rank)
        self.segments = [self._segment(group) for group in self._adjacent()]

    def parameter_of(self, fragment: Fragment) -> Tensor:
        """Return the complete parameter of a fragment."""
        return self.exchange.parameters[fragment.index]

    def _segment(self, fragments: list[Fragment]) -> Segment:
        first, last = fragments[0], fragments[-1]
        values = self.own[first.offset : last.offset + last.stop - last.start]
        return Segment(fragments, Parameter(values), first.offset)

    def _adjacent(self) -> list[list[Fragment]]:
        """Group the fragments that can share a segment."""
        group_of = {
            id(parameter): number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        numbers = [group_of[id(parameter)] for parameter in self.exchange.parameters]
        groups = [self.fragments[:1]] if self.fragments else []
        for left, right in pairwise(self.fragments):
            aligned = (left.stop - left.start) % ALIGNMENT == 0
            if aligned and numbers[left.index] == numbers[right.index]:
                groups[-1].append(right)
            else:
                groups.append([right])
        return groups

    def split(self, key: Callable[[Fragment], object]) -> None:
        """Split segments, and the optimizer's state, between fragments with different keys."""
        for segment in self.segments:
            groups = [list(group) for _, group in groupby(segment.fragments, key)]
            if len(groups) > 1:
                self._replace(segment, groups)

    def _replace(self, segment: Segment, groups: list[list[Fragment]]) -> None:
        new = [self._segment(fragments) for fragments in groups]
        at = self.segments.index(segment)
        self.segments = [*self.segments[:at], *new, *self.segments[at + 1 :]]
        for group in self._optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter is segment.parameter:
                    group["params"][number : number + 1] = [part.parameter for part in new]
                    break
        state = self._optimizer.state.pop(segment.parameter, {})
        gradient = segment.parameter.grad
        for part in new:
            start = part.start - segment.start
            own = slice(start, start + part.parameter.numel())
            part.parameter.grad = None if gradient is None else gradient[own]
            if state:
                self._optimizer.state[part.parameter] = {
                    name: value[own].clone() if _is_elementwise(name, value) else _copied(value)
                    for name, value in state.items()
                }

    def stash_gradients(self) -> None:
        """Move unused gradients of an earlier call out of the exchange's memory."""
        for segment in self.segments:
            if segment.parameter.grad is not None:
                segment.parameter.grad = segment.parameter.grad.clone()

    def set_gradients(self, own_slice: Tensor, present: Sequence[bool]) -> None:
        """Add this worker's slice of the gradient to the segments of `present` parameters."""
        if not all(present):
            self.split(lambda fragment: present[fragment.index])
        for segment in self.segments:
            if present[segment.fragments[0].index]:
                gradient, earlier = segment.view_in(own_slice), segment.parameter.grad
                segment.parameter.grad = gradient if earlier is None else earlier.add_(gradient)

    def gradients_of(self, ids: set[int]) -> list[Tensor]:
        """Return this worker's parts of the gradients of the parameters with these ids, 1-D."""
        return [
            segment.part(segment.parameter.grad, fragment)
            for segment in self.segments
            if segment.parameter.grad is not None
            for fragment in segment.fragments
            if id(self.parameter_of(fragment)) in ids
        ]

    def gather(self) -> None:
        """Gather all workers' slices of the parameters, and clear the used gradients."""
        self.exchange.all_gather(self._flats, "gathering parameters")
        for segment in self.segments:
            segment.parameter.grad = None  # model.zero_grad() would not reach it


class Shard:
    """The flat buffers of a sharded optimizer.

    The optimizer stays the same object, so learning-rate schedulers and `step` work as before.
    """

    def __init__(self, optimizer: optim.Optimizer, lanes: int, world: World) -> None:
        self.optimizer = optimizer
        initial = optimizer.state_dict()  # Adagrad has state before its first step
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._group_indices = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        self.flat_buffers = [
            FlatBuffer(bucket, lanes, world, optimizer) for bucket in buckets(parameters, world)
        ]
        firsts = {
            self._index(buffer, segment.fragments[0]): segment.parameter
            for buffer in self.flat_buffers
            for segment in buffer.segments
        }
        for group, indices in zip(optimizer.param_groups, self._group_indices, strict=True):
            group["params"] = [firsts[index] for index in indices if index in firsts]
        if initial["state"]:
            self.load_state_dict(initial)
        optimizer.register_step_post_hook(self._gather)

    def _index(self, buffer: FlatBuffer, fragment: Fragment) -> int:
        """Return the index that a fragment's parameter had in the unsharded optimizer."""
        return self._index_of[id(buffer.parameter_of(fragment))]

    def _gather(self, *_: object) -> None:
        for buffer in self.flat_buffers:
            buffer.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded `state_dict`, with this worker's parts as `TensorSlice` leaves."""
        state: dict[int, dict[str, Any]] = {}
        for buffer in self.flat_buffers:
            for segment in buffer.segments:
                values = self.optimizer.state.get(segment.parameter, {})
                for fragment in segment.fragments:
                    if own := _fragment_state(fragment, segment, values, buffer):
                        state[self._index(buffer, fragment)] = own
        pairs = zip(self.optimizer.param_groups, self._group_indices, strict=True)
        groups = [{**group, "params": list(indices)} for group, indices in pairs]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this worker's slices of an unsharded `state_dict`."""
        numbers: dict[int, int] = {}
        values = {}
        for buffer in self.flat_buffers:
            of = {one: state["state"].get(self._index(buffer, one)) for one in buffer.fragments}
            scalars = {fragment: _scalar_state(entry) for fragment, entry in of.items()}
            buffer.split(scalars.__getitem__)
            for segment in buffer.segments:
                first = of[segment.fragments[0]]
                numbers[id(segment.parameter)] = number = len(numbers)
                if first is not None:
                    values[number] = {name: _joined(name, segment, of, buffer) for name in first}
        groups = [
            {**given, "params": [numbers[id(parameter)] for parameter in group["params"]]}
            for given, group in zip(state["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        load_optimizer(self.optimizer, {"state": values, "param_groups": groups})


def _fragment_state(
    fragment: Fragment, segment: Segment, values: Mapping[str, Any], buffer: FlatBuffer
) -> dict[str, Any]:
    """Return a fragment's optimizer state; scalars belong to the worker with the first element."""
    parameter = buffer.parameter_of(fragment)
    shape, order = tuple(parameter.shape), storage_order(parameter)
    return {
        name: TensorSlice(segment.part(value, fragment), shape, fragment.start, order)
        if _is_elementwise(name, value)
        else _copied(value)
        for name, value in values.items()
        if _is_elementwise(name, value) or fragment.start == 0
    }


def _joined(name: str, segment: Segment, of: Mapping[Fragment, Any], buffer: FlatBuffer) -> Any:
    """Return the value `name` of a segment's state from that of complete parameters."""
    value = of[segment.fragments[0]][name]
    if not _is_elementwise(name, value):
        return value
    parts = []
    for fragment in segment.fragments:
        order = storage_order(buffer.parameter_of(fragment))
        flat = of[fragment][name].permute(order).reshape(-1)
        parts.append(flat[fragment.start : fragment.stop])
    return torch.cat(parts)


def _scalar_state(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return the values that are not elementwise, as text for comparison."""
    if values is None:
        return None
    return {name: str(value) for name, value in values.items() if not _is_elementwise(name, value)}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_elementwise(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name not in SCALAR_STATE


def load_optimizer(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a `state_dict`; keep the dtypes of scalars, which torch casts to the parameter's."""
    optimizer.load_state_dict(dict(state))
    for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], loaded["params"], strict=True):
            values = state["state"].get(number, {})
            for name in SCALAR_STATE & values.keys():
                if isinstance(values[name], Tensor):
                    target = optimizer.state[parameter]
                    target[name] = values[name].to(target[name].device, copy=True)


def check_shardable(optimizer: optim.Optimizer) -> None:
    """Raise `OptimizerError` unless the optimizer can update slices of parameters separately."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise OptimizerError(
            f"{name} cannot be sharded: only elementwise optimizers can, which are"
            f" {', '.join(kind.__name__ for kind in ELEMENTWISE)}; use it without run.shard"
        )
    if any(float(values.get("step", 1)) for values in optimizer.state.values()):
        raise OptimizerError(
            f"this {name} has state already; shard it before its first step, and load state through"
            " run.track"
        )
    devices = {str(one.device) for group in optimizer.param_groups for one in group["params"]}
    if len(devices) > 1:
        raise OptimizerError(
            f"{name} must have parameters on one device, got {', '.join(sorted(devices))};"
            " replicate the model first"
        )
