"""Checks of the updates of a sharded optimizer, which only the owner of a slice computes.

In a step that is due, all other workers repeat the update of a part of a worker's slice, from their
own parameters and the owner's gradient and state, and hashes of the results are compared. No other
worker has the state, so each compares its own with what its last update has left. Options such as
the learning rate are compared first: with other ones, healthy hardware has other results.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.comm.base import World
from samestep.data.nested import tensors_in
from samestep.errors import DivergenceError, OptimizerError, RecheckError
from samestep.step.flat_buffer import Segment, is_elementwise, state_of
from samestep.step.hashing import (
    bytes_of,
    described,
    differing_texts,
    hashes_of,
    majority,
    texts_of,
)
from samestep.step.shard import Shard
from samestep.torch_internals import (
    is_called_by_compiled_code,
    step_pre_hooks,
    step_without_hooks,
    versions_of,
)

PART: Final = 1 << 18  # elements whose update is repeated in a check; some megabytes are sent
PARAMETER: Final = ""  # beside the names of an optimizer's state
# Of parameters and state, by the numbers of the flat buffer and of the parameter in it, and a name
Hashes = dict[str, int]


class Part(NamedTuple):
    """Elements of a segment of the flat buffer `number`, from `place` of flat storage."""

    number: int
    segment: Segment
    elements: slice
    place: int
    gradient: Tensor  # 1-D, of these elements


class Left(NamedTuple):
    """A tensor of this worker's optimizer state as its last update has left it."""

    key: str
    tensor: Tensor
    version: int
    hash: int


class Row(NamedTuple):
    """What a worker reports of a check: `changed` has the keys of state that nothing has written.

    `options` are the texts of those of all groups. `hashes` are empty if no update was repeated.
    """

    host: str
    device: str
    options: dict[str, str]
    hashes: Hashes
    changed: list[str]


class UpdateCheck:
    """The checks of a sharded optimizer. `name_of` returns a parameter's name for messages."""

    def __init__(self, shard: Shard, world: World, name_of: Callable[[Tensor], str]) -> None:
        self._shard, self._world, self._name_of = shard, world, name_of
        self._handle: RemovableHandle | None = None  # of the hook before an update that is due
        self._step, self._number = -1, 0  # of the last update that was due
        self._versions: list[int] = []  # of flat storage when the step began
        self._left: list[Left] = []
        self._changed: list[str] = []  # keys of state that nothing has written since
        self._part: Part | None = None  # that this worker updates and others repeat
        self._options: dict[str, str] = {}  # of this worker's optimizer, before the update
        self._hashes: Hashes = {}  # of the part after the update

    def begin(self, step: int, every: int) -> None:
        """Prepare to check the update of this step, or to remember what it leaves for the next.

        Across "host", other hosts update the same slices, so comparing parameters finds faults.
        """
        number, rest = divmod(step + 1, every)
        is_next_due, is_new = (step + 2) % every == 0, step != self._step
        # a pass after the checked update is for another optimizer, such as that of a generator
        is_due = not rest and (is_new or self._handle is not None)
        if self._shard.across == "host" or not (is_due or is_next_due):
            return
        if is_due and is_new:  # the first pass before the update
            self._step, self._number, self._versions = step, number - 1, self._flat_versions()
        if is_due and self._handle is None:
            # the last hook, after those of user code that change gradients
            self._handle = self._shard.optimizer.register_step_pre_hook(self._before_update)
        self._shard.after_update(partial(self._after_update, is_next_due=is_next_due))

    def _flat_versions(self) -> list[int]:
        return versions_of([buffer.own for buffer in self._shard.flat_buffers])

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
        self._changed, self._part, self._hashes = self._changes(), None, {}
        options = self._shard.shared_state()
        tensors = {path: str(tensor.tolist()) for path, tensor in tensors_in(options, "/")}
        self._options = texts_of(options) | tensors
        # a closure, or a hook that was added since the step began, may still change the gradient
        *_, last = step_pre_hooks(self._shard.optimizer)
        is_final = len(args) == 1 and not kwargs and last == self._before_update
        can_repeat = is_final and self._shard.sends_first
        sent = self._pack(turn) if self._world.rank == owner and can_repeat else b""
        what = f"repeating the update of worker {owner}"
        received = self._world.all_gather_bytes(sent, what)[owner]
        if received and self._world.rank != owner:
            self._hashes = self._repeat(received)

    def _after_update(self, *, is_next_due: bool) -> None:
        """Compare the update if it was repeated. All workers have the new parameters now."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            if self._part is not None:
                self._hashes, self._part = self._hash_part(self._part), None
            device = str(self._shard.flat_buffers[0].own.device)
            row = Row(socket.gethostname(), device, self._options, self._hashes, self._changed)
            rows = self._world.all_gather_json(row, "comparing an update")
            self._compare([Row(*values) for values in rows])
        self._left = [*self._state()] if is_next_due else []

    def _state(self) -> Iterator[Left]:
        """Yield the tensors of this worker's optimizer state as they are now."""
        keys, tensors = [], []
        for number, buffer in enumerate(self._shard.flat_buffers):
            for segment in buffer.segments:
                values = self._shard.optimizer.state.get(segment.parameter, {})
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        keys.append(f"{number} {segment.fragments[0].index} {name}")
                        tensors.append(value)
        rows = zip(keys, tensors, versions_of(tensors), hashes_of(tensors), strict=True)
        return (Left(*row) for row in rows)

    def _changes(self) -> list[str]:
        """Return keys of state with other bytes than the last update left, and the same version.

        User code that writes a tensor or replaces it is no fault.
        """
        before, self._left = self._left, []
        after = [*self._state()] if before else []
        # hashes of GPUs depend on the tensors before theirs
        if [id(left.tensor) for left in before] != [id(now.tensor) for now in after]:
            return []
        return [
            now.key
            for left, now in zip(before, after, strict=True)
            if left.version == now.version and left.hash != now.hash
        ]

    def _parts(self) -> Iterator[Part]:
        """Yield the parts of this worker's slice that will be updated."""
        for number, buffer in enumerate(self._shard.flat_buffers):
            held = buffer.exchange.held.start * buffer.exchange.layout.slice_size
            for segment in buffer.segments:
                gradient = segment.parameter.grad
                if gradient is not None:
                    # cut at multiples of 64 elements, so that no kernel's tail moves
                    for start in range(0, len(gradient), PART):
                        part, place = slice(start, start + PART), held + segment.start + start
                        yield Part(number, segment, part, place, gradient[part])

    def _pack(self, turn: int) -> bytes:
        """Return the gradient and state of a part of this worker's slice, empty if there is none.

        Nor can others repeat the update of a slice that user code has written through
        `optimizer.param_groups`, which has only this worker's slice.
        """
        parts = [*self._parts()]
        if not parts or self._flat_versions() != self._versions:
            return b""
        self._part = part = parts[turn % len(parts)]
        optimizer, parameter = self._shard.optimizer, part.segment.parameter
        values = state_of(part.elements, optimizer.state.get(parameter, {}))
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in values.items() if name not in tensors}
        tensors[PARAMETER] = part.gradient
        group = next(
            group_number
            for group_number, group in enumerate(optimizer.param_groups)
            if any(member is parameter for member in group["params"])
        )
        # most optimizers count steps on the host, whose tensors are hashed in another way
        kinds = {name: [str(t.dtype), t.shape, t.nbytes, t.is_cpu] for name, t in tensors.items()}
        header = json.dumps([part.number, part.place, group, numbers, kinds]).encode()
        data = [bytes_of(tensor).cpu().numpy().tobytes() for tensor in tensors.values()]
        return b"".join([header, b"\n", *data])

    def _repeat(self, packed: bytes) -> Hashes:
        """Update this worker's copy of the parameters, and return hashes of the results."""
        header, _, data = packed.partition(b"\n")
        number, place, group, values, kinds = json.loads(header)
        buffer = self._shard.flat_buffers[number]
        flat = buffer.flats[buffer.exchange.local_rank]
        for name, (dtype_name, shape, nbytes, is_of_host) in kinds.items():
            dtype = getattr(torch, dtype_name.removeprefix("torch."))
            tensor = torch.frombuffer(bytearray(data[:nbytes]), dtype=dtype).view(shape)
            values[name], data = tensor if is_of_host else tensor.to(flat.device), data[nbytes:]
        gradient = values.pop(PARAMETER)
        parameter = Parameter(flat[place : place + len(gradient)].clone())
        parameter.grad = gradient
        after = updated(self._shard.optimizer, group, parameter, values)
        return self._hash(number, place, {PARAMETER: parameter, **after})

    def _hash_part(self, part: Part) -> Hashes:
        """Return hashes of what this worker has updated, as it has sent its parameters."""
        parameter = part.segment.parameter
        state = state_of(part.elements, self._shard.optimizer.state.get(parameter, {}))
        values = {PARAMETER: parameter[part.elements], **state}
        return self._hash(part.number, part.place, values)

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

    def _compare(self, rows: Sequence[Row]) -> None:
        """Compare what all workers report, by rank.

        Raises `DivergenceError` if they had other options, and `RecheckError` on all of them.
        """
        if differing := differing_texts([row.options for row in rows]):
            raise self._divergence(differing[0], rows)
        changed = [rank for rank, row in enumerate(rows) if row.changed]
        # code that writes the state of all workers in a way that leaves its version is no fault
        if changed and 2 * len(changed) <= len(rows):
            keys = rows[changed[0]].changed
            raise self._error(rows, changed, keys, is_certain=2 * len(changed) < len(rows))
        computed = [row.hashes for row in rows]
        keys = [key for key in computed[0] if len({hashes.get(key) for hashes in computed}) > 1]
        if keys:
            expected = majority(computed)
            ranks = [rank for rank, hashes in enumerate(computed) if hashes != expected]
            raise self._error(rows, ranks, keys, is_certain=expected is not None)

    def _divergence(self, path: str, rows: Sequence[Row]) -> DivergenceError:
        hosts = [row.host for row in rows]
        what = described(path, [row.options for row in rows], hosts)
        return DivergenceError(
            f"workers differ in {path!r} of the {type(self._shard.optimizer).__name__} that updates"
            f" {self._name('0 0 ')} at step {self._step}: {what}. This update is in no snapshot:"
            " resume from one of an earlier step",
            ranks=tuple(range(len(rows))),
            hosts=tuple(hosts),
            step=self._step,
            tensor=path,
        )

    def _error(
        self,
        rows: Sequence[Row],
        ranks: Sequence[int],
        keys: Sequence[str],
        *,
        is_certain: bool,
    ) -> RecheckError:
        """Return the error for this worker. It is secondary if this one is certainly right."""
        tensor = self._name(keys[0])
        more = f" (the first of {len(keys)} tensors)" if keys[1:] else ""
        what = f"{tensor}{more} at step {self._step}"
        who = " and ".join(
            f"worker {rank} ({rows[rank].host}, {rows[rank].device})" for rank in ranks
        )
        if rows[ranks[0]].changed:
            text = (
                f"{who} has other bits in {what} than its last update left there, and no code wrote"
                " them. Its hardware is probably faulty"
            )
        elif is_certain:
            text = (
                f"{who} computed wrong bits in the update of {what}: most workers, which repeated"
                " it, agree on others. Its hardware is probably faulty"
            )
        else:
            why = (
                "one of them is wrong, which a third worker could have found"
                if len(rows) == 2
                else "there is no majority among all workers, which repeated it"
            )
            text = (
                f"{who} computed different bits in the update of {what}: {why}. A processor or its"
                " memory is faulty, or the update is not deterministic"
            )
        return RecheckError(
            f"{text}. This update is in no snapshot: resume from one that you trust, without that"
            " hardware",
            ranks=tuple(ranks),
            hosts=tuple(rows[rank].host for rank in ranks),
            devices=tuple(rows[rank].device for rank in ranks),
            step=self._step,
            lane=None,
            tensor=tensor,
            is_certain=is_certain,
            is_secondary=is_certain and self._world.rank not in ranks,
        )

    def _name(self, key: str) -> str:
        number, index, name = key.split(" ", 2)
        of = self._name_of(self._shard.flat_buffers[int(number)].exchange.parameters[int(index)])
        return f"{name!r} of {of}" if name else of


def updated(
    optimizer: Optimizer, group: int, parameter: Parameter, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Update a parameter that the optimizer does not have, as one of a group; return its state."""
    states = defaultdict(dict, {parameter: dict(state)} if state else {})
    groups = [{**optimizer.param_groups[group], "params": [parameter]}]
    # a copy, also of what a GradScaler has set for this step
    repeated = object.__new__(type(optimizer))
    vars(repeated).update({**vars(optimizer), "state": states, "param_groups": groups})
    update = step_without_hooks(optimizer) or type(optimizer).step
    update(repeated)
    return states[parameter]
