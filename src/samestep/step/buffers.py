"""Module buffers: every lane starts a step from the same values, and all workers agree after it.

A rule (`buffer_rules.py`) says which value a buffer has if the lanes that had samples left
different ones, as for BatchNorm's running statistics: the mean of values or the sum of changes,
along the tree over lanes, the smallest, the largest, or that of the first lane. Without a rule,
different values are an error. A buffer that no lane wrote stays unchanged.

The host must know which buffers were written, but should not wait until a GPU has completed the
backward pass. So a GPU reports what forward wrote. What backward alone writes there is an error: in
the first step, or if it begins later, at the next snapshot or the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from samestep.comm.base import World
from samestep.errors import ModelError
from samestep.step.buffer_rules import (
    Home,
    Rule,
    check_rules,
    chosen_rule,
    has_scale,
    rule_of,
    set_scale,
)
from samestep.step.buffer_sums import BufferSums
from samestep.step.buffer_writes import GpuWrites, HostWrites
from samestep.step.layout import Assignment
from samestep.step.replicas import Replicas
from samestep.torch_internals import buffers_in, foreach_copy_

Copy = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # begins to copy from GPUs to the host


class Buffers:
    """The buffers of all replicated modules, saved and restored around each lane."""

    def __init__(self, world: World, assignment: Assignment, replicas: Replicas) -> None:
        self._lanes, self._replicas = assignment.lanes, replicas
        self.homes: list[Home] = []  # by number of the buffer
        self._scales: dict[int, Module] = {}  # fake quantization, by number of its scale
        self._starts: list[tuple[torch.device, list[Tensor]]] = [
            (replica.device, []) for replica in replicas.all
        ]  # copies of the values at the start of a step, [devices, buffers]
        self._start = self._starts[0][1]  # on the first device
        self._sums = BufferSums(world, assignment, self.homes, self._start)
        self._kinds: list[Any] = []  # their shapes and dtypes
        self._written: dict[int, dict[int, Tensor]] = {}  # values by lane and number of the buffer
        self._writes = [
            (HostWrites if device.type == "cpu" else GpuWrites)(starts)
            for device, starts in self._starts
        ]
        # what forward of each lane wrote on a GPU: some buffers, and 0 for those not written
        self._flags: list[tuple[int, list[int], Tensor]] = []  # on the host
        self._is_in_step = False
        self._before: list[list[Tensor]] = []  # start values, if this step has begun a second time
        self._steps = 0  # since a module was added
        # whether lanes wrote different values without a rule, by number; a GPU is asked later
        self._differing: dict[int, Tensor] = {}

    def add(self, module: Module, rules: Mapping[str, Rule] | None = None) -> None:
        """Manage the buffers of a module; shared ones are added once.

        `rules` are by name in the module, or pattern; those of a module that is added again replace
        the earlier ones. Raises `ModelError` or `ConfigError` if they are wrong.
        """
        rules = rules or {}
        check_rules(module, rules)
        self._steps = 0
        self._follow_changes()
        numbers = {id(buffer): number for number, buffer in enumerate(self._current())}
        for prefix, owner in module.named_modules():
            for name, buffer in owner.named_buffers(recurse=False):
                path = f"{prefix}.{name}" if prefix else name
                home = Home(buffers_in(owner), name, path, rule_of(owner, name, path, rules))
                number = numbers.setdefault(id(buffer), len(self.homes))
                if number == len(self.homes):
                    self.homes.append(home)
                    self._kinds += _kinds([buffer])
                    for device, start in self._starts:
                        start.append(buffer.detach().to(device, copy=True))
                elif chosen_rule(path, rules):
                    self.homes[number] = home
                if name == "scale" and has_scale(owner):
                    self._scales[number] = owner

    def _follow_changes(self) -> None:
        """Take over buffers that user code removed, or gave another shape, between two steps."""
        values = [home.registry.get(home.name) for home in self.homes]
        if _kinds(values) == self._kinds:
            return
        kept = {number: value for number, value in enumerate(values) if value is not None}
        for device, start in self._starts:
            start[:] = [value.detach().to(device, copy=True) for value in kept.values()]
        self.homes[:] = [self.homes[number] for number in kept]
        self._scales = {
            new: self._scales[number] for new, number in enumerate(kept) if number in self._scales
        }
        self._kinds = _kinds(self._current())
        for writes in self._writes:
            writes.forget_groups()

    def places(self) -> dict[tuple[int, Any], Any]:
        """Return the buffers by the id of the registry that holds them, and their name there."""
        return {(id(home.registry), home.name): home.registry.get(home.name) for home in self.homes}

    def begin_step(self) -> None:
        """Save each device's current values, from which all of its lanes start."""
        self._written, self._flags = {}, []
        # the loss of a whole batch may have changed buffers since the step has begun
        self._before = [
            [*map(torch.clone, starts)] for _, starts in self._starts * self._is_in_step
        ]
        self._steps += not self._is_in_step
        self._is_in_step = True
        for replica, (_, starts) in zip(self._replicas.all, self._starts, strict=True):
            if starts:
                with self._replicas.on(replica):
                    foreach_copy_(starts, self._unresized(starts))

    def restore(self) -> None:
        """Return to the values at the start of a step that failed."""
        if self._is_in_step:
            self._is_in_step = False
            before = self._before or [starts for _, starts in self._starts]
            for replica, starts in zip(self._replicas.all, before, strict=True):
                if starts:
                    with self._replicas.on(replica):
                        for home, start in zip(self.homes, starts, strict=True):
                            if not home.holds_shape_of(start):
                                home.registry[home.name] = start.clone()
                        foreach_copy_(self._detached(), starts)

    def end_forward(self, lane: int, device: int, copy: Copy) -> None:
        """Note what a lane's forward pass wrote on a GPU; `copy` begins to copy to the host."""
        self.note_changes(lane, device, self.changed_by_forward(device), copy)

    def changed_by_forward(self, device: int) -> list[Tensor]:
        """Return how much forward wrote on device number `device`: int64 [buffers] per group."""
        starts, writes = self._starts[device][1], self._writes[device]
        return writes.changed_by_forward(self._unresized(starts)) if writes.groups else []

    def note_changes(self, lane: int, device: int, changes: Sequence[Tensor], copy: Copy) -> None:
        """Note a lane's result of `changed_by_forward`, which a graph may have computed."""
        writes = self._writes[device]
        writes.end_forward(changes)
        for group, flags in zip(writes.groups, copy(changes), strict=True):
            self._flags.append((lane, group.numbers, flags))

    def rewind(self, device: int, lane: int) -> None:
        """Return to the values at the start of the step on a device, as if no lane had begun."""
        self._flags = [entry for entry in self._flags if entry[0] != lane]
        if starts := self._starts[device][1]:
            foreach_copy_(self._unresized(starts), starts)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return names, and the current values on the device that computes now."""
        return [(home.path, home.registry[home.name].detach()) for home in self.homes]

    def end_lane(self, lane: int, device: int = 0) -> None:
        """Save the values that a lane wrote on device number `device`; restore the start values."""
        starts = self._starts[device][1]
        current = self._unresized(starts) if starts else []
        self._written[lane] = self._writes[device].end_lane(current) if starts else {}

    def left_by(self, lane: int) -> dict[str, Tensor]:
        """Return the values that a lane left, by name; on GPUs, also of buffers not written."""
        return {
            f"buffer {self.homes[number].path!r}": value
            for number, value in self._written.get(lane, {}).items()
        }

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Compute a lane of any worker once more in the block; what it writes is forgotten."""
        written, flags = dict(self._written), list(self._flags)
        after = [*map(torch.clone, self._detached())] if self._lanes == 1 else []
        if after:  # a single lane leaves its values
            foreach_copy_(self._detached(), self._start)
        try:
            yield
        finally:
            self._written, self._flags = written, flags
            if after:
                foreach_copy_(self._detached(), after)

    def written(self) -> list[int]:
        """Return the numbers of the buffers that a lane of this worker wrote.

        The copies that `copy` of `end_forward` began must be complete.
        """
        for lane, numbers, flags in self._flags:
            for number, value in zip(numbers, flags.tolist(), strict=True):
                if not value:
                    del self._written[lane][number]
        device = self._starts[0][0]
        for written in self._written.values():
            written.update(_fetched(written, device))
        return sorted({number for values in self._written.values() for number in values})

    def check(self) -> None:
        """Raise `ModelError` for what is only known now, because nothing waits for a GPU.

        Lanes wrote different values to a buffer without a rule, or backward alone wrote one.
        """
        self._check_differing()
        if late := [number for writes in self._writes for number in writes.late()]:
            raise ModelError(
                f"the buffer {self.homes[late[0]].path!r} was written during backward, but"
                " not during forward; its new values are lost, because workers agree on"
                " buffers before a GPU has completed backward. Change it in forward, or in"
                " the body of the loop, after optimizer.step()"
            )

    def _check_differing(self) -> None:
        differing, self._differing = self._differing, {}
        for number, differs in differing.items():
            if differs:
                raise _differ(self.homes[number], self._start[number])

    def end_step(self, written: Sequence[int], lanes_with_items: Sequence[int]) -> None:
        """Agree on the buffers that any lane wrote; collective if there are any.

        Raises `ModelError` on all workers if one of them must not be written.
        """
        if written and lanes_with_items:  # the same on all workers
            for number in written:
                if self.homes[number].rule == "refuse":
                    raise ModelError(
                        f"a lane wrote the buffer {self.homes[number].path!r}, for which"
                        ' run.replicate got the rule "refuse"; change it in the body of the loop,'
                        " after optimizer.step()"
                    )
            results, differing = self._sums.of(written, self._written, lanes_with_items)
            current = self._current()
            for number, value in results.items():
                current[number].data.copy_(value)
            for number, differs in differing.items():
                self._differing[number] = differs | self._differing.get(number, differs)
            for number in written:
                if number in self._scales:
                    set_scale(self._scales[number])
        if self._starts[0][0].type == "cpu" or self._steps <= 2:
            self.check()
        self._is_in_step = False

    def _current(self) -> list[Tensor]:
        return [home.registry[home.name] for home in self.homes]

    def _unresized(self, starts: Sequence[Tensor]) -> list[Tensor]:
        """Return the current values. Raises `ModelError` if one has another shape than `starts`."""
        values = [home.registry.get(home.name) for home in self.homes]
        if _kinds(values) == self._kinds:
            return self._detached()
        for home, start in zip(self.homes, starts, strict=True):
            if not home.holds_shape_of(start):
                value = home.registry.get(home.name)
                shape = "nothing" if value is None else f"{value.dtype} {list(value.shape)}"
                raise ModelError(
                    f"the buffer {home.path!r} was {start.dtype} {list(start.shape)} and became"
                    f" {shape} after run.replicate; lanes need buffers of a fixed shape: create it"
                    " in its final shape, run the model once on a sample before run.replicate, or"
                    " change it between steps and call run.replicate again"
                )
        return self._detached()

    def _detached(self) -> list[Tensor]:
        return [buffer.detach() for buffer in self._current()]


def _kinds(tensors: Iterable[Tensor | None]) -> list[Any]:
    return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]


def _differ(home: Home, start: Tensor) -> ModelError:
    return ModelError(
        f"lanes wrote different values to the buffer {home.path!r}"
        f" ({start.dtype} {list(start.shape)}), which has no rule for its value after the step."
        f' Choose one: run.replicate(model, buffers={{{home.path!r}: "sum"}}) adds up the lanes\''
        ' changes, as of a counter; "mean" is for running statistics, "min" and "max" for ranges,'
        ' "first" takes the value of the first lane. A value that needs the samples of all lanes,'
        " such as a queue of embeddings, belongs in the body of the loop, after optimizer.step(),"
        " or in the loss function of embed="
    )


def _fetched(values: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    """Return tensors of another device, by number, on `device`; each dtype takes one copy."""
    fetched: dict[int, Tensor] = {}
    others = {number: value for number, value in values.items() if value.device != device}
    for dtype in {value.dtype for value in others.values()}:
        same_dtype = {number: value for number, value in others.items() if value.dtype == dtype}
        joined = torch.cat([value.reshape(-1) for value in same_dtype.values()]).to(device)  # 1-D
        parts = joined.split([value.numel() for value in same_dtype.values()])
        shaped = (
            part.view(value.shape) for part, value in zip(parts, same_dtype.values(), strict=True)
        )
        fetched.update(zip(same_dtype, shaped, strict=True))
    return fetched
