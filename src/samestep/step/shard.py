"""Sharded optimizers: each worker updates its slice, in less time and memory, with the same bits.

Parameters move into flat storage, and the optimizer gets this worker's slice of it. Slices are cut
so that vectorized kernels treat every element as in the complete parameter. After each step, they
are gathered (Rajbhandari et al. 2020, "ZeRO", stage 1), unless each host updates all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from samestep.comm.base import World
from samestep.errors import OptimizerError
from samestep.host import available_bytes
from samestep.step.exchange import Across, Exchange, all_gather, buckets
from samestep.step.gradients import Parameters, SlicedGradient, have_none
from samestep.step.guards import refuse_unless_zero
from samestep.step.layout import Fragment, TensorSlice, storage_order
from samestep.torch_internals import step_pre_hooks, step_without_hooks

ELEMENTWISE: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
    optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
# State with one number per parameter; other state tensors have one per element.
SCALAR_STATE: Final = frozenset({"step", "mu_product", "eta", "mu"})

PACKAGE: Final = __name__.partition(".")[0]
SHARE_OF_MEMORY: Final = 0.5  # of the available memory, for state that hosts have in common


@dataclass
class Segment:
    """Adjacent fragments, from `start` of a worker's slice, updated as one tensor `parameter`."""

    fragments: list[Fragment]
    parameter: Parameter  # 1-D, a view of flat storage
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

    Across "host", they are segments of all slices that the worker holds, of which it saves its own.
    Adjacent fragments share a segment if their sizes are multiples of 64 elements (so that no
    kernel's tail moves), they are in one parameter group, and all or none had a gradient.
    """

    def __init__(
        self,
        parameters: Parameters,
        lanes: int,
        world: World,
        optimizer: optim.Optimizer,
        round_to: torch.dtype | None = None,
        across: Across = "world",
    ) -> None:
        self.exchange = exchange = Exchange(parameters, lanes, world, round_to, across)
        exchange.converts = True  # an optimizer needs gradients in the dtype of its parameters
        self._optimizer = optimizer
        # [local_workers, flat_size], in the memory that they share
        self.flats = [flat for (flat,) in self.exchange.shared_storage(1, parameters[0].dtype)]
        flat = self.flats[self.exchange.local_rank]
        for parameter, view in zip(parameters, self.exchange.views(flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view  # the module keeps its Parameter objects
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self.own = exchange.slices(flat, exchange.held)  # 1-D, len(held) * slice_size
        self.fragments = exchange.layout.fragments(exchange.held.start, len(exchange.held))
        self.segments = [self._segment(group) for group in self._adjacent()]
        self._cleared: set[int] = set()
        self._stand_ins = [
            SlicedGradient.of(parameter, index, self._cleared)
            for index, parameter in enumerate(parameters)
        ]
        self._visible: list[SlicedGradient | None] = [None] * len(parameters)  # in `.grad`
        self._are_visible = False  # any of them
        self.is_in_step = False  # of the optimizer
        # segments whose gradients still arrive, with placeholders, and what waits for all of them
        self.arriving: list[tuple[Segment, SlicedGradient]] = []
        self._arrived: Callable[[], Tensor] | None = None
        self._parts: Callable[[], Iterator[Tensor]] | None = None  # of the same, as they arrive
        self._unused: set[int] = set()  # placeholders that were cleared

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
        # [segments, fragments]
        groups = [self.fragments[:1]] if self.fragments else []
        for left, right in pairwise(self.fragments):
            aligned = (left.stop - left.start) % self.exchange.layout.alignment == 0
            if aligned and numbers[left.index] == numbers[right.index]:
                groups[-1].append(right)
            else:
                groups.append([right])
        return groups

    def split(self, key: Callable[[Fragment], object]) -> None:
        """Split segments, and the optimizer's state, between fragments with different keys."""
        self.complete()
        for segment in self.segments:
            groups = [list(group) for _, group in groupby(segment.fragments, key)]
            if len(groups) > 1:
                self._replace(segment, groups)

    def _replace(self, segment: Segment, groups: list[list[Fragment]]) -> None:
        new = [self._segment(fragments) for fragments in groups]
        at = self.segments.index(segment)
        self.segments = [*self.segments[:at], *new, *self.segments[at + 1 :]]
        for parameters, number in self._places_of(segment.parameter):
            parameters[number : number + 1] = [part.parameter for part in new]
        state = self._optimizer.state.pop(segment.parameter, {})
        gradient = segment.parameter.grad
        for part in new:
            start = part.start - segment.start
            elements = slice(start, start + part.parameter.numel())
            part.parameter.grad = None if gradient is None else gradient[elements]
            if state:
                parts = _state_of(elements, state)
                self._optimizer.state[part.parameter] = {n: _copied(v) for n, v in parts.items()}

    def _places_of(self, parameter: Tensor) -> list[tuple[list[Tensor], int]]:
        """Return the lists of the optimizer that have the parameter, and its place in each."""
        return [
            (group["params"], number)
            for group in self._optimizer.param_groups
            for number, candidate in enumerate(group["params"])
            if candidate is parameter
        ]

    @property
    def defers(self) -> bool:
        """Whether gradients that arrive from other hosts are awaited in the optimizer's step."""
        if self.is_in_step or self.exchange.across == "world":
            return False
        return have_none([segment.parameter for segment in self.segments])

    def complete(self) -> None:
        """Wait for gradients that still arrive.

        Those that user code has cleared meanwhile are not used.
        """
        wait, self._arrived, self._parts = self._arrived, None, None
        if wait is None:
            return
        values = wait()  # 1-D, len(held) * slice_size
        for number, (segment, placeholder) in enumerate(self.arriving):
            if segment.parameter.grad is placeholder:
                is_unused = number in self._unused
                segment.parameter.grad = None if is_unused else segment.view_in(values)
        self.arriving, self._unused = [], set()

    def arrives_in_parts(self) -> bool:
        """Whether `update_in_parts` does what `drop_cleared` and an update would do."""
        if self._parts is None or not self.exchange.has_parts:
            return False
        if len(self.segments) != 1 or len(self.arriving) != 1:
            return False  # a part of a sum may end inside any of them
        ((segment, placeholder),) = self.arriving
        if self._unused or self._is_cleared() or segment.parameter.grad is not placeholder:
            return False
        # the first update makes the state, or a value of it that was loaded as None
        state = self._optimizer.state.get(segment.parameter, {})
        return bool(state) and all(value is not None for value in state.values())

    def update_in_parts(self, update: Callable[[], None]) -> None:
        """Call `update` for each part of the only segment, as its gradient arrives.

        For each call, the optimizer has a part of the segment in its place, with that part's state.
        """
        ((segment, _),), parts = self.arriving, self._parts
        assert parts is not None  # noqa: S101  it `arrives_in_parts`
        parameter, state = segment.parameter, self._optimizer.state
        ((parameters, number),) = self._places_of(parameter)
        self._arrived, self._parts, parameter.grad = None, None, None
        self.arriving, self._unused = [], set()
        values, start = state[parameter], 0
        for gradient in parts():  # 1-D, adjacent, at multiples of 64 elements
            elements = slice(start, min(start + len(gradient), parameter.numel()))
            start += len(gradient)
            if elements.start >= elements.stop:  # padding
                continue
            part = Parameter(parameter.detach()[elements])
            part.grad = gradient[: len(part)]
            parameters[number] = part
            state[part] = _state_of(elements, values)
            try:
                update()
            finally:
                parameters[number], after = parameter, state.pop(part)
            # every part starts from the old "step", so the new one is stored once, at the end
            scalars = {n: value for n, value in after.items() if not _is_elementwise(n, value)}
        values.update(scalars)

    def _is_cleared(self) -> bool:
        """Whether user code has cleared or set the `.grad` of a parameter."""
        gradients = [parameter.grad for parameter in self.exchange.parameters]
        return bool(self._cleared) or not all(map(is_, gradients, self._visible))

    def drop_cleared(self) -> None:
        """Drop the gradients of parameters whose `.grad` user code has cleared.

        Raises `OptimizerError` if it has set one.
        """
        self.complete()
        if not self._is_cleared():
            return
        dropped = set()
        pairs = zip(self.exchange.parameters, self._visible, strict=True)
        for index, (parameter, visible) in enumerate(pairs):
            if parameter.grad is not visible or index in self._cleared:
                if parameter.grad is not self._stand_ins[index]:
                    refuse_unless_zero(parameter.grad)
                parameter.grad = self._visible[index] = None
                dropped.add(index)
        self._cleared.clear()
        # the optimizer skips a parameter without a gradient, but may not skip its neighbors
        self.split(lambda fragment: fragment.index in dropped)
        for segment in self.segments:
            if segment.fragments[0].index in dropped:
                segment.parameter.grad = None

    def check_addresses(self) -> None:
        """Raise `OptimizerError` if user code moved a parameter out of flat storage."""
        if [parameter.data_ptr() for parameter in self.exchange.parameters] != self._addresses:
            raise OptimizerError(
                f"a parameter of a sharded {type(self._optimizer).__name__} was moved or converted"
                " after run.shard, so the optimizer would no longer update it; call model.to(...)"
                " before run.shard, and change values in place"
            )

    def stash_gradients(self, *, are_clear: bool = False) -> None:
        """Move unused gradients of an earlier call out of the exchange's memory.

        `are_clear` says that no parameter has `.grad` now.
        """
        self.complete()
        if self._are_visible or self._cleared or not are_clear:
            self.drop_cleared()
        if self._are_visible:
            for parameter in self.exchange.parameters:
                parameter.grad = None
        for segment in self.segments:
            if segment.parameter.grad is not None:
                # `set_gradients` adds the next one to it
                segment.parameter.grad = segment.parameter.grad.clone()

    def set_gradients(
        self,
        own_slice: Callable[[], Tensor],
        present: Sequence[bool] | None = None,
        parts: Callable[[], Iterator[Tensor]] | None = None,
    ) -> None:
        """Add this worker's slice of the gradient to the segments of `present` parameters.

        None stands for all parameters. If the buffer `defers`, `complete` does that, or
        `update_in_parts` takes adjacent `parts` of the slice as they arrive.
        """
        if present is not None:
            is_present = present
            self.split(lambda fragment: is_present[fragment.index])
        segments = [
            segment
            for segment in self.segments
            if present is None or present[segment.fragments[0].index]
        ]
        # Across "host", gradients still arrive from other hosts, so only the optimizer's step waits
        # for them. Across "world", or if there are earlier ones to add to, they are needed now.
        if self.defers:
            self._arrived, self._parts = own_slice, parts
            for number, segment in enumerate(segments):
                placeholder = SlicedGradient.of(segment.parameter, number, self._unused)
                segment.parameter.grad = placeholder
                self.arriving.append((segment, placeholder))
        else:
            values = own_slice()
            for segment in segments:
                gradient, earlier = segment.view_in(values), segment.parameter.grad
                segment.parameter.grad = gradient if earlier is None else earlier.add_(gradient)
        self._are_visible = True
        if present is None:
            self._visible[:] = self._stand_ins
        else:
            pairs = zip(self._stand_ins, self._visible, present, strict=True)
            self._visible = [stand_in if is_new else before for stand_in, before, is_new in pairs]
        self.show()

    def show(self) -> None:
        """Let the `.grad` of each parameter stand in for its gradient, if there is one."""
        for parameter, stand_in in zip(self.exchange.parameters, self._visible, strict=True):
            parameter.grad = stand_in

    def gradients_of(self, ids: set[int]) -> list[Tensor]:
        """Return this worker's parts of the gradients of the parameters with these ids, 1-D."""
        return [
            segment.part(segment.parameter.grad, fragment)
            for segment in self.segments
            if segment.parameter.grad is not None
            for fragment in segment.fragments
            if id(self.parameter_of(fragment)) in ids
        ]

    def own_gradients(self) -> dict[int, list[Tensor]]:
        """Return each parameter's gradient by id, as 1-D parts: over all workers, all of it once.

        The list is empty for a worker without any part of it, and for a missing gradient.
        """
        parts_of: dict[int, list[Tensor]] = {
            id(parameter): [] for parameter in self.exchange.parameters
        }
        for segment in self.segments:
            if segment.parameter.grad is not None:
                for part in filter(None, map(self.own_part, segment.fragments)):
                    values = segment.part(segment.parameter.grad, part)
                    parts_of[id(self.parameter_of(part))].append(values)
        return parts_of

    def own_part(self, fragment: Fragment) -> Fragment | None:
        """Return the part of a fragment that this worker saves, None if there is none."""
        size = self.exchange.layout.slice_size
        # held slices and own slice are the same unless it is sharded across "host"
        low = (self.exchange.own_number - self.exchange.held.start) * size
        shift = fragment.start - fragment.offset
        start = max(fragment.start, low + shift)
        stop = min(fragment.stop, low + size + shift)
        return Fragment(fragment.index, start, stop, start - shift) if start < stop else None

    def clear(self) -> None:
        """Clear the used gradients."""
        for segment in self.segments:
            segment.parameter.grad = None
        for parameter in self.exchange.parameters:
            parameter.grad = None
        self._visible, self._are_visible = [None] * len(self._stand_ins), False


class Shard:
    """The flat buffers of a sharded optimizer.

    The optimizer stays the same object, so learning-rate schedulers and `step` work as before.
    Gradients are rounded to `round_to` as in `Exchange`; the optimizer gets the parameters' dtype.
    `places` numbers parameters by id in the order of their models.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        lanes: int,
        world: World,
        round_to: torch.dtype | None = None,
        across: Across = "world",
        places: Mapping[int, int] | None = None,
    ) -> None:
        self.optimizer = optimizer
        initial = optimizer.state_dict()  # Adagrad has state before its first step
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._group_indices = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        self.flat_buffers = [
            FlatBuffer(bucket, lanes, world, optimizer, round_to, across)
            for bucket in buckets(parameters, world, round_to, places)
        ]
        self.across = self.flat_buffers[0].exchange.across
        firsts = {
            self._index(buffer, segment.fragments[0]): segment.parameter
            for buffer in self.flat_buffers
            for segment in buffer.segments
        }
        # a segment of several parameters has the place of its first one
        for group, indices in zip(optimizer.param_groups, self._group_indices, strict=True):
            group["params"] = [firsts[index] for index in indices if index in firsts]
        if initial["state"]:
            self.load_state_dict(initial)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._gather)

    def _index(self, buffer: FlatBuffer, fragment: Fragment) -> int:
        """Return the index that a fragment's parameter had in the unsharded optimizer."""
        return self._index_of[id(buffer.parameter_of(fragment))]

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

        The optimizer leaves out parameters without a gradient. Hooks of others may count on a
        single update.
        """
        update = step_without_hooks(self.optimizer)
        is_ours = [
            getattr(hook, "__module__", "").startswith(PACKAGE)
            for hook in step_pre_hooks(self.optimizer)
        ]
        # each arrives after those behind it; the caller updates the last one
        order = [buffer for buffer in self.flat_buffers[::-1] if buffer.arriving]
        if update is None or not all(is_ours) or not order:
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
            if buffer.arrives_in_parts():
                buffer.update_in_parts(partial(self._update, update))
            elif buffer is not order[-1]:
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

    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded `state_dict`, with this worker's parts as `TensorSlice` leaves."""
        state: dict[int, dict[str, Any]] = {}
        for buffer in self.flat_buffers:
            for segment in buffer.segments:
                values = self.optimizer.state.get(segment.parameter, {})
                for fragment in filter(None, map(buffer.own_part, segment.fragments)):
                    if entry := _fragment_state(fragment, segment, values, buffer):
                        state[self._index(buffer, fragment)] = entry
        pairs = zip(self.optimizer.param_groups, self._group_indices, strict=True)
        groups = [{**group, "params": list(indices)} for group, indices in pairs]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

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
            {**saved, "params": [numbers[id(parameter)] for parameter in group["params"]]}
            for saved, group in zip(state["param_groups"], self.optimizer.param_groups, strict=True)
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


def _state_of(part: slice, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a part of a segment: views of what is elementwise, copies of the rest."""
    return {
        name: value[part] if _is_elementwise(name, value) else _copied(value)
        for name, value in state.items()
    }


def _joined(name: str, segment: Segment, of: Mapping[Fragment, Any], buffer: FlatBuffer) -> Any:
    """Return the value `name` of a segment's state from that of complete parameters."""
    value = of[segment.fragments[0]][name]
    if not _is_elementwise(name, value):
        return value
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
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
