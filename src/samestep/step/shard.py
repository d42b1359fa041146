"""Optimizers of which each worker updates its slice: less time and memory, the same bits.

Parameters move into flat storage and the optimizer gets this worker's slice of it, cut so that
vectorised kernels treat every element as in the whole parameter. After each step the slices are
gathered (Rajbhandari et al. 2020, "ZeRO", stage 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import optim

from samestep.comm.base import World
from samestep.errors import OptimizerError
from samestep.step.exchange import Exchange, buckets
from samestep.step.layout import ALIGNMENT, Piece, TensorSlice, storage_order

ELEMENTWISE: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
# one number a parameter; other tensors are one an element
SCALAR_STATE: Final = frozenset({"step", "mu_product", "eta", "mu"})


@dataclass
class Segment:
    """Neighbouring pieces of a worker's slice that an optimizer updates as one tensor; `parameter` starts at `start` of the slice."""

    pieces: list[Piece]
    parameter: torch.nn.Parameter
    start: int

    def part(self, values: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return what belongs to a piece of a tensor that has an element for each of the segment's."""
        start = piece.offset - self.start
        return values[start : start + piece.stop - piece.start]


class FlatBuffer:
    """Parameters of one dtype of an optimizer, in flat storage; of this worker's slice the optimizer gets segments.

    Neighbours share a segment while their sizes are multiples of 64 elements, so that no kernel's
    tail moves, while they are of one group of the optimizer, and while each had a gradient whenever
    the others had one.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        lanes: int,
        world: World,
        optimizer: optim.Optimizer,
    ) -> None:
        self.exchange = Exchange(parameters, lanes, world)
        self._optimizer = optimizer
        self._rank = world.rank
        self._flats = [flat for (flat,) in self.exchange.shared_storage(rows=1)]
        flat = self._flats[self.exchange.place]
        for parameter, view in zip(parameters, self.exchange.views(flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.own = self.exchange.slice_of(flat, world.rank)
        self.segments = [self._segment(pieces) for pieces in self._neighbours()]

    def _segment(self, pieces: list[Piece]) -> Segment:
        first, last = pieces[0], pieces[-1]
        values = self.own[first.offset : last.offset + last.stop - last.start]
        return Segment(pieces, torch.nn.Parameter(values), first.offset)

    def _neighbours(self) -> list[list[Piece]]:
        """Return this worker's pieces, those together that one segment may hold."""
        group_of = {
            id(parameter): n
            for n, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        groups = [group_of[id(parameter)] for parameter in self.exchange.parameters]
        together: list[list[Piece]] = []
        for piece in self.exchange.layout.pieces(self._rank):
            before = together[-1][-1] if together else None
            if (
                before
                and groups[before.index] == groups[piece.index]
                and (before.stop - before.start) % ALIGNMENT == 0
            ):
                together[-1].append(piece)
            else:
                together.append([piece])
        return together

    def divide(self, differ: Callable[[Piece, Piece], bool]) -> None:
        """Divide segments between neighbours that differ; the optimizer's state is divided with them."""
        for segment in self.segments:
            cuts = [
                n
                for n, (left, right) in enumerate(pairwise(segment.pieces), start=1)
                if differ(left, right)
            ]
            if cuts:
                self._replace(
                    segment,
                    [segment.pieces[a:b] for a, b in pairwise([0, *cuts, len(segment.pieces)])],
                )

    def _replace(self, segment: Segment, parts: list[list[Piece]]) -> None:
        new = [self._segment(pieces) for pieces in parts]
        at = self.segments.index(segment)
        self.segments = [*self.segments[:at], *new, *self.segments[at + 1 :]]
        for group in self._optimizer.param_groups:
            places = [
                n for n, parameter in enumerate(group["params"]) if parameter is segment.parameter
            ]
            for place in places:
                group["params"][place : place + 1] = [part.parameter for part in new]
        state = self._optimizer.state.pop(segment.parameter, {})
        for part in new:
            own = slice(
                part.start - segment.start, part.start - segment.start + part.parameter.numel()
            )
            part.parameter.grad = (
                None if segment.parameter.grad is None else segment.parameter.grad[own]
            )
            if state:
                self._optimizer.state[part.parameter] = {
                    name: value[own].clone() if _is_elementwise(name, value) else _copied(value)
                    for name, value in state.items()
                }

    def set_aside(self) -> None:
        """Move gradients that are there out of the exchange's memory."""
        for segment in self.segments:
            if segment.parameter.grad is not None:
                segment.parameter.grad = segment.parameter.grad.clone()

    def set_gradients(self, own_slice: torch.Tensor, present: Sequence[bool]) -> None:
        """Hand this worker's slice of the global gradient to the segments of the parameters that are `present`; adds to what is there."""
        if not all(present):
            self.divide(lambda left, right: present[left.index] != present[right.index])
        for segment in self.segments:
            if present[segment.pieces[0].index]:
                gradient, earlier = (
                    own_slice[segment.start : segment.start + segment.parameter.numel()],
                    segment.parameter.grad,
                )
                segment.parameter.grad = gradient if earlier is None else earlier.add_(gradient)

    def gradients_of(self, ids: set[int]) -> list[torch.Tensor]:
        """Return what this worker has of the gradients of the parameters with these ids, 1-D."""
        return [
            segment.part(segment.parameter.grad, piece)
            for segment in self.segments
            if segment.parameter.grad is not None
            for piece in segment.pieces
            if id(self.exchange.parameters[piece.index]) in ids
        ]

    def gather(self) -> None:
        """Give all workers the values that each has of its slice, and forget the gradients, which are used up."""
        self.exchange.complete(self._flats, "gathering parameters")
        for segment in self.segments:
            segment.parameter.grad = None  # model.zero_grad() would not reach it


class Shard:
    """What a sharded optimizer is made of. The optimizer stays the same object, so schedulers and `step` work as before.

    Raises `OptimizerError` for optimizers that are not elementwise, have state already, or share
    parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, lanes: int, world: World) -> None:
        self.optimizer = optimizer
        born_with = optimizer.state_dict()  # Adagrad's state is there before the first step
        self._parameters: list[torch.nn.Parameter] = [
            p for group in optimizer.param_groups for p in group["params"]
        ]
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        self.blocks = [
            FlatBuffer(bucket, lanes, world, optimizer)
            for bucket in buckets(self._parameters, world)
        ]
        firsts = {
            self._index(block, segment.pieces[0]): segment.parameter
            for block in self.blocks
            for segment in block.segments
        }
        index = 0
        for group, size in zip(optimizer.param_groups, self._group_sizes, strict=True):
            group["params"] = [firsts[i] for i in range(index, index + size) if i in firsts]
            index += size
        if born_with["state"]:
            self.load_state_dict(born_with)
        optimizer.register_step_post_hook(self._gather)

    def _index(self, block: FlatBuffer, piece: Piece) -> int:
        """Return the index in the optimizer, before it was sharded, of the parameter that a piece is of."""
        return self._index_of[id(block.exchange.parameters[piece.index])]

    def _gather(self, *_: object) -> None:
        for block in self.blocks:
            block.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict` with `TensorSlice` leaves for what this worker owns a part of."""
        state: dict[int, dict[str, Any]] = {}
        for block in self.blocks:
            for segment in block.segments:
                values = self.optimizer.state.get(segment.parameter, {})
                for piece in segment.pieces if values else ():
                    state[self._index(block, piece)] = self._values_of(
                        piece, segment, values, block
                    )
        groups, index = [], 0
        for group, size in zip(self.optimizer.param_groups, self._group_sizes, strict=True):
            groups.append({**group, "params": list(range(index, index + size))})
            index += size
        return {
            "state": dict(sorted((index, values) for index, values in state.items() if values)),
            "param_groups": groups,
        }

    @staticmethod
    def _values_of(
        piece: Piece, segment: Segment, values: Mapping[str, Any], block: FlatBuffer
    ) -> dict[str, Any]:
        """Return the optimizer's state of a piece; what is one a parameter is told by the worker that has its start."""
        whole = block.exchange.parameters[piece.index]
        return {
            name: TensorSlice(
                segment.part(value, piece), tuple(whole.shape), piece.start, storage_order(whole)
            )
            if _is_elementwise(name, value)
            else _copied(value)
            for name, value in values.items()
            if _is_elementwise(name, value) or piece.start == 0
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this worker's slices of an unsharded `state_dict`."""
        numbers: dict[int, int] = {}
        values = {}
        for block in self.blocks:
            of = {
                piece: state["state"].get(self._index(block, piece))
                for segment in block.segments
                for piece in segment.pieces
            }
            block.divide(lambda left, right, of=of: _once(of[left]) != _once(of[right]))  # type: ignore[misc]
            for segment in block.segments:
                first = of[segment.pieces[0]]
                numbers[id(segment.parameter)] = number = len(numbers)
                if first is not None:
                    values[number] = {name: _joined(name, segment, of, block) for name in first}
        groups = [
            {**given, "params": [numbers[id(parameter)] for parameter in group["params"]]}
            for given, group in zip(state["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        load_optimizer(self.optimizer, {"state": values, "param_groups": groups})


def _joined(name: str, segment: Segment, of: Mapping[Piece, Any], block: FlatBuffer) -> Any:
    """Return a segment's values of one name from those of the whole parameters."""
    value = of[segment.pieces[0]][name]
    if not _is_elementwise(name, value):
        return value
    wholes = [block.exchange.parameters[piece.index] for piece in segment.pieces]
    parts = [
        of[piece][name].permute(storage_order(whole))
        for piece, whole in zip(segment.pieces, wholes, strict=True)
    ]
    return torch.cat(
        [
            part.reshape(-1)[piece.start : piece.stop]
            for piece, part in zip(segment.pieces, parts, strict=True)
        ]
    )


def _once(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what of a parameter's state is one a parameter, to be compared."""
    return (
        None
        if values is None
        else {
            name: str(value) for name, value in values.items() if not _is_elementwise(name, value)
        }
    )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_elementwise(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and name not in SCALAR_STATE


def load_optimizer(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a `state_dict`, and keep the dtype of numbers that are one a parameter: torch casts them to the parameter's."""
    optimizer.load_state_dict(dict(state))
    for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], loaded["params"], strict=True):
            values = state["state"].get(number, {})
            for name in SCALAR_STATE & values.keys():
                if isinstance(values[name], torch.Tensor):
                    kept = optimizer.state[parameter]
                    kept[name] = values[name].to(kept[name].device, copy=True)


def check_shardable(optimizer: optim.Optimizer) -> None:
    """Raise `OptimizerError` unless slices of the optimizer's parameters can be updated apart from each other."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise OptimizerError(
            f"{name} cannot be sharded: only optimizers whose update of an element depends on that element alone can "
            f"({', '.join(kind.__name__ for kind in ELEMENTWISE)} of torch.optim); use it without run.shard"
        )
    if any(float(values.get("step", 1)) for values in optimizer.state.values()):
        raise OptimizerError(
            f"this {name} has state already; shard it before its first step, and load its state by run.track"
        )
    devices = {
        parameter.device for group in optimizer.param_groups for parameter in group["params"]
    }
    if len(devices) > 1:
        raise OptimizerError(
            f"this {name} has parameters on {sorted(map(str, devices))}; expected one device: replicate the model first"
        )
