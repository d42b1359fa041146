"""An optimizer of sharded parameters: each worker updates its own rows, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from samestep.comm.base import World
from samestep.sharded.parts import Part
from samestep.step.gradients import SlicedGradient, row_squares
from samestep.step.guards import Contents, refuse_unless_zero
from samestep.step.layout import ALIGNMENT
from samestep.step.optimizer_state import copied, is_elementwise, load_optimizer, numbers_of
from samestep.step.shard import DividedOptimizer


class Segments:
    """The gradients of an optimizer's sharded parameters, as those of a `FlatBuffer`."""

    def __init__(self, parts: Sequence[Part], world: World) -> None:
        self.parts, self._world = parts, world
        self.parameters = [part.sharded for part in parts]
        self._cleared: set[int] = set()
        for number, part in enumerate(parts):
            part.stand_for(SlicedGradient.of(part.sharded, number, self._cleared))

    def drop_cleared(self) -> None:
        """Drop the gradients of parameters whose `.grad` user code has cleared."""
        for number, part in enumerate(self.parts):
            gradient = part.sharded.grad
            if part.is_used and (gradient is not part.stand_in or number in self._cleared):
                if gradient is not part.stand_in:
                    refuse_unless_zero(gradient)
                part.clear()
        self._cleared.clear()

    def gradients_of(self, ids: set[int]) -> list[Tensor]:
        """Return this worker's parts of the gradients of the parameters with these ids, 1-D."""
        return [
            part.segment.grad
            for part in self.parts
            if part.segment.grad is not None and id(part.sharded) in ids
        ]

    def own_gradients(self) -> dict[int, list[Tensor]]:
        """Return each parameter's gradient by id, as 1-D parts; each worker has its own rows."""
        return {
            id(part.sharded): [] if part.segment.grad is None else [part.segment.grad[part.inner]]
            for part in self.parts
        }

    def squares(self) -> dict[int, Tensor]:
        """Return float64 sums of squares of each row of 64 elements, by the parameter's id.

        Each row is that of the worker that owns its first element. Collective.
        """
        # [workers, parts] numbers of rows
        counts = [
            [stop - start for start, stop in (_norm_rows(part.rows[rank]) for part in self.parts)]
            for rank in range(self._world.size)
        ]
        device = self.parts[0].segment.device
        longest = max(map(sum, counts))
        rows = torch.zeros(longest, dtype=torch.float64, device=device)
        place = 0
        for part, count in zip(self.parts, counts[self._world.rank], strict=True):
            gradient, (start, stop) = part.segment.grad, _norm_rows((part.start, part.stop))
            if gradient is not None and count:
                values = gradient[start * ALIGNMENT - part.low : stop * ALIGNMENT - part.low]
                rows[place : place + count] = row_squares(values)
            place += count
        gathered = rows.new_empty(self._world.size, longest)
        self._world.all_gather(gathered.view(-1), rows, "adding up the gradient norm")
        # [workers, parts], 1-D each, of which those of a part are in the order of its rows
        of_workers = [
            rows[: sum(count)].split(count) for rows, count in zip(gathered, counts, strict=True)
        ]
        of_parts = zip(self.parts, zip(*of_workers, strict=True), strict=True)
        return {id(part.sharded): torch.cat(rows) for part, rows in of_parts}


def _norm_rows(elements: tuple[int, int]) -> tuple[int, int]:
    """Return the rows of 64 elements whose first one is among these elements."""
    start, stop = elements
    return -(-start // ALIGNMENT), -(-stop // ALIGNMENT)


class ShardedOptimizer(DividedOptimizer):
    """What `Shard` is for replicated parameters: the optimizer gets segments of own rows."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        parts: Mapping[int, Part],
        world: World,
        await_readers: Callable[[], None],
    ) -> None:
        """`await_readers` frees what models have gathered, on all workers, before an update."""
        self.optimizer, self._world, self._await_readers = optimizer, world, await_readers
        self.contents = contents = Contents(optimizer)
        self._parts = [parts[id(parameter)] for parameter in contents.parameters]
        self.flat_buffers = [Segments(self._parts, world)]
        groups = [[*group["params"]] for group in optimizer.param_groups]
        numbers = {id(part.sharded): number for number, part in enumerate(self._parts)}
        self._group_indices = [[numbers[id(p)] for p in group] for group in groups]
        segments = [
            [self._parts[n].segment for n in indices if self._parts[n].size]
            for indices in self._group_indices
        ]
        contents.divide(segments, self)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._publish)
        contents.nest_hooks()
        contents.close()

    def complete(self) -> None:
        """Do nothing: all gradients have arrived."""

    def settle(self) -> None:
        """Drop gradients that user code has cleared."""
        self.flat_buffers[0].drop_cleared()

    def _begin(self, *_: object) -> None:
        self.settle()
        self._await_readers()

    def _publish(self, *_: object) -> None:
        for part in self._parts:
            part.publish()
            part.clear()

    def counters_of_cut(self) -> dict[str, Any]:
        """Return the numbers in the state of each parameter of which this worker has a part."""
        state = {
            number: numbers_of(self.contents.state.get(part.segment, {}))
            for number, part in enumerate(self._parts)
            if part.size
        }
        return {"state": state}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole `state_dict`, with this worker's rows as `TensorSlice` leaves."""
        state = {}
        for number, part in enumerate(self._parts):
            values = self.contents.state.get(part.segment, {})
            entry = {
                name: part.slice_of(value) if is_elementwise(name, value) else copied(value)
                for name, value in values.items()
                if is_elementwise(name, value) or part.start == 0
            }
            if entry and part.size:
                state[number] = entry
        return self._saved(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this worker's rows of a whole `state_dict`."""
        values, groups, place = {}, [], 0
        for saved, indices in zip(state["param_groups"], self._group_indices, strict=True):
            first = place
            for number in indices:
                part = self._parts[number]
                if not part.size:
                    continue
                of_one = state["state"].get(number, {})
                values[place] = {
                    name: value.reshape(-1)[part.low : part.high]
                    if is_elementwise(name, value)
                    else value
                    for name, value in of_one.items()
                }
                place += 1
            groups.append({**saved, "params": [*range(first, place)]})
        loaded = {number: of_one for number, of_one in values.items() if of_one}
        with self.contents.opened():
            load_optimizer(self.optimizer, {"state": loaded, "param_groups": groups})
