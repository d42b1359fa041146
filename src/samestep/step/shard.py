"""Sharded optimizers: each worker updates its slice, in less time and memory, with the same bits.

Parameters move into flat storage, and the optimizer gets this worker's slice of it. Slices are cut
so that vectorized kernels treat every element as in the complete parameter. After each step, they
are gathered (Rajbhandari et al. 2020, "ZeRO", stage 1), unless each host updates all of them.

An update that needs all of a matrix, such as that of Muon (Jordan et al. 2024, "Muon",
https://kellerjordan.github.io/posts/muon/), is computed by one owner: slices end between
parameters, and are chosen so that workers have equal work.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor, optim

from samestep.comm.base import World
from samestep.errors import OptimizerError
from samestep.host import available_bytes
from samestep.step.across_hosts import choose_exchange
from samestep.step.exchange import Across, ExchangeSpec, all_gather, buckets
from samestep.step.flat_buffer import FlatBuffer, Segment
from samestep.step.gradients import Parameters, parameters_of
from samestep.step.guards import Contents
from samestep.step.layout import Assignment, Fragment, TensorSlice, flattened, storage_order
from samestep.step.optimizer_state import (
    DividedState,
    copied,
    is_elementwise,
    load_optimizer,
    numbers_of,
)
from samestep.torch_internals import step_without_hooks

ELEMENTWISE: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
    optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip


def newton_schulz_cost(matrix: Tensor) -> int:
    """Return a number in proportion to the work of orthogonalizing a matrix."""
    return matrix.numel() * min(matrix.shape)


# Those that update each parameter alone, from all of its elements, with the cost of that.
WHOLE: Final[Mapping[type, Callable[[Tensor], int]]] = {
    getattr(optim, name): cost
    for name, cost in (("Adafactor", Tensor.numel), ("Muon", newton_schulz_cost))
    if hasattr(optim, name)  # Muon is in torch since 2.9
}
SHARDABLE: Final = (*ELEMENTWISE, *WHOLE)

SHARE_OF_MEMORY: Final = 0.5  # of the available memory, for state that hosts have in common


class DividedOptimizer(DividedState):
    """An optimizer of which each worker updates a part: `contents` has what it gets then."""

    optimizer: optim.Optimizer
    contents: Contents
    flat_buffers: Sequence[Any]  # `FlatBuffer`, or what has its methods for other storage
    _group_indices: Sequence[Sequence[int]]  # of complete parameters, by group

    @abstractmethod
    def complete(self) -> None:
        """Wait for gradients that still arrive."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for gradients that still arrive, and drop those that user code has cleared."""

    def shared_state(self) -> dict[str, Any]:
        """Return what is equal on all workers: the options of the parameter groups."""
        groups = self.optimizer.param_groups
        options = [{name: group[name] for name in group if name != "params"} for group in groups]
        return {"param_groups": options}

    def _saved(self, state: Mapping[int, Any]) -> dict[str, Any]:
        """Return a `state_dict` with the state of complete parameters, by their indices."""
        pairs = zip(self.optimizer.param_groups, self._group_indices, strict=True)
        groups = [{**group, "params": [*indices]} for group, indices in pairs]
        return {"state": dict(sorted(state.items())), "param_groups": groups}


class Shard(DividedOptimizer):
    """The flat buffers of a sharded optimizer.

    The optimizer stays the same object, so learning-rate schedulers and `step` work as before.
    Gradients are rounded to `round_to` as in `Exchange`; the optimizer gets the parameters' dtype.
    `places` numbers parameters by id in the order of their models.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        assignment: Assignment,
        world: World,
        round_to: torch.dtype | None = None,
        across: Across = "world",
        places: Mapping[int, int] | None = None,
    ) -> None:
        self.optimizer = optimizer
        initial = optimizer.state_dict()  # Adagrad has state before its first step
        self.contents = contents = Contents(optimizer)
        parameters = contents.parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._group_indices = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        cost = WHOLE.get(type(optimizer))
        owners = {} if cost is None else owners_of(parameters, world.size, cost)
        exchanges = []
        for bucket in buckets(parameters, world, round_to, places):
            bucket.sort(key=lambda parameter: owners.get(id(parameter), 0))  # stable
            numbers = tuple(owners[id(parameter)] for parameter in bucket) if owners else None
            spec = ExchangeSpec(
                bucket, assignment, world, round_to, across, is_sharded=True, owners=numbers
            )
            exchanges.append(choose_exchange(spec))
        self.across = exchanges[0].across
        self._check: Callable[[], None] | None = None  # of the next update
        self.flat_buffers = [FlatBuffer(exchange, contents) for exchange in exchanges]
        firsts = {
            self._index(buffer, segment.fragments[0]): segment.parameter
            for buffer in self.flat_buffers
            for segment in buffer.segments
        }
        # a segment of several parameters has the place of its first one
        updated = [[firsts[n] for n in indices if n in firsts] for indices in self._group_indices]
        contents.divide(updated, self)
        if initial["state"]:
            self.load_state_dict(initial)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._gather)
        contents.nest_hooks()
        contents.close()

    def _index(self, buffer: FlatBuffer, fragment: Fragment) -> int:
        """Return the index that a fragment's parameter had in the unsharded optimizer."""
        return self._index_of[id(buffer.parameter_of(fragment))]

    def groups(self) -> dict[int, int]:
        """Return the number of the parameter group of each complete parameter, by its id."""
        numbers = {
            index: number for number, indices in enumerate(self._group_indices) for index in indices
        }
        return {place: numbers[index] for place, index in self._index_of.items()}

    def after_update(self, check: Callable[[], None]) -> None:
        """Call `check` once the next update is made, and all workers have its parameters."""
        self._check = check

    def complete(self) -> None:
        """Wait for gradients that still arrive."""
        for buffer in self.flat_buffers:
            buffer.complete()

    def settle(self) -> None:
        """Wait for gradients that still arrive, and drop those that user code has cleared."""
        for buffer in self.flat_buffers:
            buffer.drop_cleared()

    def _before_step(self, _: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        arriving = [buffer for buffer in self.flat_buffers if buffer.arriving]
        for buffer in self.flat_buffers:
            buffer.is_in_step = True
            if buffer not in arriving:  # it is updated first
                buffer.drop_cleared()
        if len(args) == 1 and not kwargs:  # no closure beside the optimizer itself
            self._update_early()
        for buffer in arriving:
            buffer.drop_cleared()

    def _update_early(self) -> None:
        """Update parameters whose gradients have arrived while those of others arrive.

        The optimizer leaves out parameters without a gradient. Hooks run once, before all of them.
        """
        update = step_without_hooks(self.optimizer)
        # each arrives after those behind it; the caller updates the last one
        order = [buffer for buffer in self.flat_buffers[::-1] if buffer.arriving]
        if update is None or not order:
            return
        # [buffers, segments] placeholders, given back to one buffer at a time
        placeholders = [
            [segment.parameter.grad for segment, _ in buffer.arriving] for buffer in order
        ]
        for buffer in order:
            for segment, _ in buffer.arriving:
                segment.parameter.grad = None
        for buffer, gradients in zip(order, placeholders, strict=True):
            for (segment, _), gradient in zip(buffer.arriving, gradients, strict=True):
                segment.parameter.grad = gradient
            is_updated = buffer.update_in_parts(partial(self._update, update))
            if not is_updated and buffer is not order[-1]:
                buffer.drop_cleared()
                self._update(update)

    def _update(self, update: Callable[[optim.Optimizer], object]) -> None:
        """Update the parameters that have a gradient, and clear it."""
        update(self.optimizer)
        for buffer in self.flat_buffers:
            for segment in buffer.segments:
                segment.parameter.grad = None

    def _gather(self, *_: object) -> None:
        # across "host", all slices are updated in the memory of each host, and none is sent
        flats = [(buffer.exchange, buffer.flats) for buffer in self.flat_buffers]
        all_gather(flats, "gathering parameters")
        for buffer in self.flat_buffers:
            buffer.clear()
            buffer.is_in_step = False
        if self._check is not None:
            check, self._check = self._check, None
            check()

    def counters_of_cut(self) -> dict[str, Any]:
        """Return the numbers in the state of parameters of which other workers have a part."""
        ends = [
            (buffer, segment, fragment)
            for buffer in self.flat_buffers
            for segment in (buffer.segments[:1] + buffer.segments[-1:])
            for fragment in (segment.fragments[0], segment.fragments[-1])
        ]
        counters = {
            self._index(buffer, fragment): numbers_of(
                self.contents.state.get(segment.parameter, {})
            )
            for buffer, segment, fragment in ends
            if fragment.stop - fragment.start < buffer.parameter_of(fragment).numel()
        }
        return {"state": counters}

    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded `state_dict`, with this worker's parts as `TensorSlice` leaves."""
        state: dict[int, dict[str, Any]] = {}
        for buffer in self.flat_buffers:
            for segment in buffer.segments:
                values = self.contents.state.get(segment.parameter, {})
                for fragment in filter(None, map(buffer.own_part, segment.fragments)):
                    if entry := _fragment_state(fragment, segment, values, buffer):
                        state[self._index(buffer, fragment)] = entry
        return self._saved(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this worker's slices of an unsharded `state_dict`."""
        numbers: dict[int, int] = {}
        values = {}
        for buffer in self.flat_buffers:
            of = {
                fragment: state["state"].get(self._index(buffer, fragment))
                for fragment in buffer.fragments
            }
            scalars = {fragment: _scalar_state(entry) for fragment, entry in of.items()}
            # a segment has one "step", so its fragments must agree
            buffer.split(scalars.__getitem__)
            for segment in buffer.segments:
                first = of[segment.fragments[0]]
                numbers[id(segment.parameter)] = number = len(numbers)
                if first is not None:
                    values[number] = {name: _joined(name, segment, of, buffer) for name in first}
        groups = [
            {**saved, "params": [numbers[id(parameter)] for parameter in parameters]}
            for saved, parameters in zip(state["param_groups"], self.contents.updated, strict=True)
        ]
        with self.contents.opened():
            load_optimizer(self.optimizer, {"state": values, "param_groups": groups})


def _fragment_state(
    fragment: Fragment, segment: Segment, values: Mapping[str, Any], buffer: FlatBuffer
) -> dict[str, Any]:
    """Return a fragment's optimizer state; scalars belong to the worker with the first element."""
    parameter, state = buffer.parameter_of(fragment), dict[str, Any]()
    for name, value in values.items():
        if is_elementwise(name, value):
            # that of a whole parameter may have another shape, such as one number per row
            like = value if buffer.is_whole else parameter
            part = flattened(value) if buffer.is_whole else segment.part(value, fragment)
            order = storage_order(like)
            state[name] = TensorSlice(part, tuple(like.shape), fragment.start, order)
        elif fragment.start == 0:
            state[name] = copied(value)
    return state


def _joined(name: str, segment: Segment, of: Mapping[Fragment, Any], buffer: FlatBuffer) -> Any:
    """Return the value `name` of a segment's state from that of complete parameters."""
    value = of[segment.fragments[0]][name]
    if not is_elementwise(name, value):
        return value
    if buffer.is_whole:
        return value.clone()  # the snapshot's memory is freed
    parts = []
    for fragment in segment.fragments:
        order = storage_order(buffer.parameter_of(fragment))
        flat = of[fragment][name].permute(order).reshape(-1)  # [numel] in storage order
        parts.append(flat[fragment.start : fragment.stop])
    return torch.cat(parts)


def _scalar_state(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return the values that are not elementwise, as text for comparison."""
    if values is None:
        return None
    return {name: str(value) for name, value in values.items() if not is_elementwise(name, value)}


def owners_of(
    parameters: Parameters, workers: int, cost: Callable[[Tensor], int]
) -> dict[int, int]:
    """Return the number of the slice that has each parameter, by id, so that all cost the same.

    The one with the highest cost comes first, and each goes to the slice with the least until then.
    """
    costs, owners = [0] * workers, dict[int, int]()
    for parameter in sorted(parameters, key=cost, reverse=True):  # of equal ones, the first
        owners[id(parameter)] = number = costs.index(min(costs))
        costs[number] += cost(parameter)
    return owners


def choose_across(parameters: Parameters, world: World) -> Across:
    """Return "host" if it hides messages, and half the free memory has room. Collective.

    That is, if gradients can be added up during backward; parameters are sent after the update.
    The room is that of Adam's two tensors on the host with the least memory.
    """
    hosts = len(world.hosts)
    on_cpus = {parameter.device.type for parameter in parameters} <= {"cpu"}
    if hosts == 1 or not on_cpus or len(set(map(len, world.hosts))) > 1:
        return "world"  # one host, GPUs, or hosts of different sizes
    free = world.all_gather_json(available_bytes(), "comparing free memory")
    # each host has all of the state, instead of its part of it
    more = 2 * sum(parameter.nbytes for parameter in parameters) * (hosts - 1) // hosts
    fits = more <= SHARE_OF_MEMORY * min(
        (nbytes for nbytes in free if nbytes is not None), default=more
    )
    return "host" if fits and (hosts == 2 or world.partners is not None) else "world"


def _extent(parameter: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last one."""
    pairs = zip(parameter.shape, parameter.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = parameter.data_ptr()
    return start, start + (last + 1) * parameter.element_size()


def check_shardable(optimizer: optim.Optimizer, *, is_full: bool = False) -> None:
    """Raise `OptimizerError` unless parameters, or slices of them, can be updated separately."""
    name = type(optimizer).__name__
    if is_full and type(optimizer) in WHOLE:
        raise OptimizerError(
            f"{name} needs whole parameters, and those of a model with shard='full' are divided:"
            " replicate the model, or use an elementwise optimizer"
        )
    if type(optimizer) not in SHARDABLE:
        raise OptimizerError(
            f"{name} cannot be sharded: only elementwise optimizers can, which are"
            f" {', '.join(kind.__name__ for kind in ELEMENTWISE)}, and those of torch.optim that"
            " update each parameter alone, which are Adafactor and, since PyTorch 2.9, Muon; use it"
            " without run.shard"
        )
    if any(float(values.get("step", 1)) for values in optimizer.state.values()):
        raise OptimizerError(
            f"this {name} has state already; shard it before its first step, and load state through"
            " run.track"
        )
    if is_full:  # of a sharded model
        return
    parameters = parameters_of(optimizer)
    devices = {str(parameter.device) for parameter in parameters}
    if len(devices) > 1:
        raise OptimizerError(
            f"{name} must have parameters on one device, got {', '.join(sorted(devices))};"
            " replicate the model first"
        )
    extents = sorted(_extent(parameter) for parameter in parameters if parameter.numel())
    if any(start < end for (_, end), (start, _) in pairwise(extents)):
        raise OptimizerError(
            f"{name} has parameters that share memory, which run.shard would separate; to tie them,"
            " let modules share one parameter, as in decoder.weight = encoder.weight"
        )
