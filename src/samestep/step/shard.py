"""Optimizers of which each worker updates its slice: less time and memory, the same bits.

Parameters move into flat storage and the optimizer gets this worker's pieces of them, one a parameter and
starting on multiples of 64 elements, so that vectorised kernels treat every element as in the whole parameter.
After each step the slices are gathered (Rajbhandari et al. 2020, "ZeRO", stage 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import optim

from samestep.errors import OptimizerError
from samestep.step.gradients import Exchange, take_gradients
from samestep.step.slices import TensorSlice, storage_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from samestep.step.layout import Piece
    from samestep.world import World

ELEMENTWISE: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
SCALAR_STATE: Final = frozenset({"step", "mu_product", "eta", "mu"})  # one number a parameter; other tensors are one an element


@dataclass
class Block:
    """The parameters of one dtype of a sharded optimizer, in flat storage."""

    exchange: Exchange
    flat: torch.Tensor
    own: torch.Tensor
    pieces: list[Piece]
    own_parameters: list[torch.nn.Parameter]

    @classmethod
    def of(cls, parameters: Sequence[torch.nn.Parameter], lanes: int, world: World) -> Block:
        exchange = Exchange(parameters, lanes, world)
        flat = exchange.storage()
        for parameter, view in zip(parameters, exchange.views(flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        size = exchange.layout.slice_size
        own = flat[world.rank * size : (world.rank + 1) * size]
        pieces = exchange.layout.pieces(world.rank)
        return cls(exchange, flat, own, pieces, [torch.nn.Parameter(part) for part in cls._parts(own, pieces)])

    @staticmethod
    def _parts(own_slice: torch.Tensor, pieces: Iterable[Piece]) -> list[torch.Tensor]:
        return [own_slice[piece.offset : piece.offset + piece.stop - piece.start] for piece in pieces]

    def own_of(self, ids: set[int]) -> list[torch.nn.Parameter]:
        """Return this worker's pieces of the parameters with these ids."""
        owners = [id(self.exchange.parameters[piece.index]) for piece in self.pieces]
        return [own for owner, own in zip(owners, self.own_parameters, strict=True) if owner in ids]

    def set_gradients(self, own_slice: torch.Tensor, present: Sequence[bool]) -> None:
        """Hand this worker's slice of the global gradient to its pieces of the parameters that are `present`."""
        for piece, parameter, part in zip(self.pieces, self.own_parameters, self._parts(own_slice, self.pieces), strict=True):
            parameter.grad = part if present[piece.index] else None


class Shard:
    """What a sharded optimizer is made of. The optimizer stays the same object, so schedulers and `step` work as before.

    Raises `OptimizerError` for optimizers that are not elementwise, have state already, or share parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, lanes: int, world: World) -> None:
        self.optimizer = optimizer
        self._world = world
        born_with = optimizer.state_dict()  # Adagrad's state is there before the first step
        self._parameters: list[torch.nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        dtypes = dict.fromkeys(parameter.dtype for parameter in self._parameters)
        self.blocks = [Block.of([p for p in self._parameters if p.dtype == dtype], lanes, world) for dtype in dtypes]
        own = {index: piece for index, _, piece in self._own_pieces()}
        index = 0
        for group, size in zip(optimizer.param_groups, self._group_sizes, strict=True):
            group["params"] = [own[i] for i in range(index, index + size) if i in own]
            index += size
        if born_with["state"]:
            self.load_state_dict(born_with)
        optimizer.register_step_post_hook(self._gather)

    def _own_pieces(self) -> list[tuple[int, Piece, torch.nn.Parameter]]:
        """Return (index of the parameter in the optimizer, its piece, the piece's own parameter), by index."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        found = [
            (index_of[id(block.exchange.parameters[piece.index])], piece, parameter)
            for block in self.blocks
            for piece, parameter in zip(block.pieces, block.own_parameters, strict=True)
        ]
        return sorted(found, key=lambda entry: entry[0])

    def _gather(self, *_: object) -> None:
        for block in self.blocks:
            block.exchange.complete(block.flat, block.own, "gathering parameters")
            take_gradients(block.own_parameters)  # used up: model.zero_grad() would not reach the pieces

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict` with `TensorSlice` leaves for what this worker owns a part of."""
        state: dict[int, dict[str, Any]] = {}
        for index, piece, own in self._own_pieces():
            whole = self._parameters[index]
            values = {name: _as_slice(name, value, piece, whole) for name, value in self.optimizer.state.get(own, {}).items()}
            values = {name: value for name, value in values.items() if isinstance(value, TensorSlice) or piece.start == 0}
            if values:
                state[index] = values
        groups, index = [], 0
        for group, size in zip(self.optimizer.param_groups, self._group_sizes, strict=True):
            groups.append({**group, "params": list(range(index, index + size))})
            index += size
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this worker's slices of an unsharded `state_dict`."""
        own = self._own_pieces()
        number_of = {index: number for number, (index, _, _) in enumerate(own)}
        values = {
            number_of[index]: {name: _part_of(name, value, piece, self._parameters[index]) for name, value in state["state"][index].items()}
            for index, piece, _ in own
            if index in state["state"]
        }
        groups = [{**group, "params": [number_of[i] for i in group["params"] if i in number_of]} for group in state["param_groups"]]
        load_optimizer(self.optimizer, {"state": values, "param_groups": groups})


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
        raise OptimizerError(f"this {name} has state already; shard it before its first step, and load its state by run.track")
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    if len(devices) > 1:
        raise OptimizerError(f"this {name} has parameters on {sorted(map(str, devices))}; expected one device: replicate the model first")


def _as_slice(name: str, value: Any, piece: Piece, whole: torch.Tensor) -> Any:
    if name in SCALAR_STATE or not isinstance(value, torch.Tensor):
        return value
    return TensorSlice(value, tuple(whole.shape), piece.start, storage_order(whole))


def _part_of(name: str, value: Any, piece: Piece, whole: torch.Tensor) -> Any:
    if name in SCALAR_STATE or not isinstance(value, torch.Tensor):
        return value
    return value.permute(storage_order(whole)).reshape(-1)[piece.start : piece.stop].clone()
