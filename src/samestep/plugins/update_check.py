"""Checks of the updates of a sharded optimizer, which only the owner of a slice computes.

In a step that is due, all other workers repeat the update of a part of a worker's slice, from their
own parameters and the owner's options, gradient and state, and hashes of the results are compared.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.comm.base import World
from samestep.errors import OptimizerError, RecheckError
from samestep.plugins.disagreement import Disagreement, differing
from samestep.step.flat_buffer import Segment
from samestep.step.hashing import hashes_of
from samestep.step.layout import view_like
from samestep.step.optimizer_state import copied, is_elementwise, state_of
from samestep.step.shard import Shard
from samestep.torch_internals import (
    is_called_by_compiled_code,
    step_pre_hooks,
    step_without_hooks,
    versions_of,
)

PART: Final = 1 << 18  # elements whose update is repeated in a check; some megabytes are sent
MOST: Final = 1 << 20  # of a parameter that one worker updates, as Muon does: 1024 x 1024
PARAMETER: Final = ""  # beside the names of an optimizer's state
# Of parameters and state, by the numbers of the flat buffer and of the parameter in it, and a name
Hashes = dict[str, int]
# elements of a segment of the flat buffer with this number, from a place of flat storage
Part = tuple[int, int, Segment, slice]


class UpdateCheck:
    """The checks of a sharded optimizer. `name_of` returns a parameter's name for messages."""

    def __init__(self, shard: Shard, world: World, name_of: Callable[[Tensor], str]) -> None:
        self._shard, self._world, self._name_of = shard, world, name_of
        self._handle: RemovableHandle | None = None  # of the hook before an update that is due
        self._step, self._number = -1, 0  # of the last update that was due
        self._versions: list[int] = []  # of flat storage when the step began
        self._part: Part | None = None  # that this worker updates and others repeat
        self._hashes: Hashes = {}  # of the part after the update, empty if it was not repeated

    def begin(self, step: int, every: int) -> None:
        """Prepare to check the update of this step, if it is due.

        Across "host", other hosts update the same slices, so comparing parameters finds faults.
        """
        number, rest = divmod(step + 1, every)
        is_new = step != self._step
        # a pass after the checked update is for another optimizer, such as that of a generator
        if rest or self._shard.across == "host" or not (is_new or self._handle):
            return
        if is_new:  # the first pass before the update
            self._step, self._number, self._versions = step, number - 1, self._flat_versions()
        if self._handle is None:  # the last hook, after those of user code that change gradients
            self._handle = self._shard.optimizer.register_step_pre_hook(self._before_update)
        self._shard.after_update(self._after_update)

    def _flat_versions(self) -> list[int]:
        flats = [buffer.own for buffer in self._shard.flat_buffers]
        return versions_of([*flats, *self._shard.contents.parameters])  # complete ones

    def _before_update(
        self, _: object, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Repeat an update of another worker before it is made. Collective."""
        if is_called_by_compiled_code():
            raise OptimizerError(
                "recheck_every repeats the update of a sharded optimizer, whose compiled code may"
                " round differently: do not compile optimizer.step(), or leave out recheck_every"
            )
        turn, owner = divmod(self._number, self._world.size)
        self._part, self._hashes = None, {}
        # a closure, or a hook that was added since the step began, may still change the gradient
        *_, last = step_pre_hooks(self._shard.optimizer)
        is_final = len(args) == 1 and not kwargs and last == self._before_update
        # nor can others repeat the update of a slice that user code has written
        is_repeatable = is_final and self._flat_versions() == self._versions
        parts = [*self._parts()] if self._world.rank == owner and is_repeatable else []
        sent = None
        if parts:
            self._part = parts[turn % len(parts)]
            sent = self._inputs(*self._part)
        what = f"repeating the update of worker {owner}"
        received = self._world.all_gather_object(sent, what)[owner]
        if received is not None and self._part is None:
            self._hashes = self._repeat(*received)

    def _after_update(self) -> None:
        """Compare the update if it was repeated. All workers have the new parameters now."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self._part is not None:  # as this worker has sent its parameters
            number, place, segment, elements = self._part
            state = state_of(elements, self._shard.contents.state.get(segment.parameter, {}))
            values = {PARAMETER: segment.parameter[elements], **state}
            self._hashes, self._part = self._hash(number, place, values), None
        row = socket.gethostname(), str(self._shard.flat_buffers[0].own.device), self._hashes
        self._compare(self._world.all_gather_json(row, "comparing an update"))

    def _parts(self) -> Iterator[Part]:
        """Yield the parts of this worker's slice that will be updated."""
        for number, buffer in enumerate(self._shard.flat_buffers):
            held = buffer.exchange.layout.bounds[buffer.exchange.held.start]
            for segment in buffer.segments:
                if segment.parameter.grad is not None:
                    size = part = segment.parameter.numel()
                    if not buffer.is_whole:
                        part = PART
                    elif size > MOST:
                        continue
                    # cut at multiples of 64 elements, so that no kernel's tail moves
                    for start in range(0, size, part):
                        place = held + segment.start + start
                        yield number, place, segment, slice(start, start + part)

    def _inputs(self, number: int, place: int, segment: Segment, elements: slice) -> Any:
        """Return the arguments of `_repeat` for other workers, without memory of the slice."""
        optimizer, parameter = self._shard.optimizer, segment.parameter
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        options = {name: value for name, value in group.items() if name != "params"}
        state = state_of(elements, optimizer.state.get(parameter, {}))
        state = {name: copied(value) for name, value in state.items()}
        gradient = parameter.grad[elements].clone()  # type: ignore[index]  # `_parts` have one
        return number, place, options, gradient, state

    def _repeat(
        self, number: int, place: int, options: Any, gradient: Tensor, state: dict[str, Any]
    ) -> Hashes:
        """Update this worker's copy of the parameters, and return hashes of the results."""
        buffer = self._shard.flat_buffers[number]
        flat = buffer.flats[buffer.exchange.local_rank]
        parameter = Parameter(view_like(flat, place, gradient).clone())
        parameter.grad = gradient
        after = updated(self._shard.optimizer, options, parameter, state)
        return self._hash(number, place, {PARAMETER: parameter, **after})

    def _hash(self, number: int, place: int, values: Mapping[str, Any]) -> Hashes:
        """Return a hash of each parameter's elements of `values`, which start at `place`."""
        layout = self._shard.flat_buffers[number].exchange.layout
        entries: dict[str, Tensor] = {}
        # `offsets` has one more entry, the end of the last parameter
        for index, (offset, size) in enumerate(zip(layout.offsets, layout.sizes, strict=False)):
            elements = slice(max(offset - place, 0), max(offset + size - place, 0))
            if values[PARAMETER][elements].numel():
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        part = value[elements] if is_elementwise(name, value) else value
                        entries[f"{number} {index} {name}"] = part
        return dict(zip(entries, hashes_of([*entries.values()]), strict=True))

    def _compare(self, rows: Sequence[tuple[str, str, Hashes]]) -> None:
        """Compare what all workers report, by rank. Raises `RecheckError` on all of them."""
        keys = differing([hashes for _, _, hashes in rows])
        if not keys:
            return
        number, index, name = keys[0].split(" ", 2)
        of = self._name_of(self._shard.flat_buffers[int(number)].exchange.parameters[int(index)])
        tensor = f"{name!r} of {of}" if name else of
        more = f" (the first of {len(keys)} tensors that differ)" if keys[1:] else ""
        disagreement = Disagreement(rows)
        text = disagreement.describe(f"in the update of {tensor}{more} at step {self._step}")
        raise disagreement.error(
            RecheckError,
            self._world.rank,
            f"{text}. This update is in no snapshot: resume from one that you trust, without that"
            " hardware",
            step=self._step,
            tensor=tensor,
        )


def updated(
    optimizer: Optimizer, options: Mapping[str, Any], parameter: Parameter, state: dict[str, Any]
) -> dict[str, Any]:
    """Update a parameter that the optimizer does not have, with a group's options; return state."""
    states = defaultdict(dict, {parameter: state} if state else {})
    # a copy, also of what a GradScaler has set for this step
    repeated = object.__new__(type(optimizer))
    groups = [{**options, "params": [parameter]}]
    vars(repeated).update({**vars(optimizer), "state": states, "param_groups": groups})
    update = step_without_hooks(optimizer) or type(optimizer).step
    update(repeated)
    return states[parameter]
