"""Checks of the hardware: every few steps, another worker computes a lane again.

A lane has the same bits on every worker, so a difference is a fault of one of them. In a step that
is due, one lane is computed twice: by its worker, and by another one (on another host, if there is
any), from the same plan, random state and buffers. Hashes of the lane's gradients, taken before
they are added up, travel with the losses. If they differ, all workers compute the lane once more
and vote, and no gradient of the step is used. Of several thousand machines, a few have processors
with such silent errors (Hochschild et al. 2021, "Cores that don't count").
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from samestep.comm.base import World
from samestep.data.batch import Incomplete
from samestep.data.nested import tensors_in
from samestep.errors import ConfigError, DataError, RecheckError
from samestep.plugins.disagreement import Disagreement, differing
from samestep.plugins.update_check import UpdateCheck
from samestep.step.gradients import Gradients
from samestep.step.hashing import begin_hashes, hashes_of
from samestep.step.lane_pass import LaneContext, LanePass, StepPlugin
from samestep.step.lane_results import LaneScalars
from samestep.step.shard import Shard

BATCH: Final = "the batch"
LOSS: Final = "the loss"
NEEDS_FUNCTION: Final = (
    "recheck_every={} needs run.backward(loss_fn, model, batch): the body of a loop over"
    " batch.lanes cannot be run again for a lane of another worker; pass its loss as a function, or"
    " leave recheck_every out"
)
NOT_DETERMINISTIC: Final = (
    "recheck_every={} needs deterministic=True on GPUs: other kernels give other bits each time"
)
OTHER_SAMPLES: Final = (
    "the samples of lane {} at step {} have other values each time they are loaded, or on other"
    " workers, so recheck_every cannot compare what is computed from them; a data set must return"
    " the same values everywhere: look for random numbers that run.on_lane_seed does not seed, for"
    " files that differ between hosts, and for a collate_fn or loss function that changes samples"
)
# of the bytes of a lane's batch, of the buffers it wrote and of its gradients, by their names, and
# a text of its loss
Hashes = Mapping[str, int | str | None]


class Recheck(StepPlugin):
    """The checks of one worker: every `recheck_every` steps, each lane in turn."""

    def __init__(
        self, context: LaneContext, modules: Sequence[Module], shards: Sequence[Shard]
    ) -> None:
        """`modules` are replicated, and may become more, as `shards` of optimizers may."""
        self._context, self.modules, self._shards = context, modules, shards
        self._updates: list[UpdateCheck] = []  # of the shards
        self._every = context.config.recheck_every or 0
        if context.devices[0].type == "cuda" and not context.config.deterministic:
            raise ConfigError(NOT_DETERMINISTIC.format(self._every))
        self.passed_step: int | None = None  # the last one whose check found nothing
        self._check: LaneCheck | None = None  # of the current step

    def begin(self, lane_pass: LanePass) -> None:
        """Prepare the check of this pass, if its step is due. Collective for streams.

        Raises `ConfigError` if its lanes cannot be computed again.
        """
        self._check = None
        if lane_pass.loss.fn is None:
            raise ConfigError(NEEDS_FUNCTION.format(self._every))
        for shard in self._shards[len(self._updates) :]:
            self._updates.append(UpdateCheck(shard, self._context.world, self.name_of))
        for update in self._updates:
            update.begin(lane_pass.seed[0], self._every)
        number, rest = divmod(lane_pass.seed[0] + 1, self._every)
        if rest:
            return
        # every lane in turn, and then the same lanes by other workers
        counts, lanes, world = lane_pass.batch.counts, self._context.lanes, self._context.world
        with_samples = [lane for lane in range(lanes) if counts is None or counts[lane]]
        turn, place = divmod(number - 1, len(with_samples))
        lane = with_samples[place]
        owner = self._context.assignment.worker_of(lane)
        self._check = LaneCheck(self, lane_pass, lane, owner, _checker(world, owner, turn))
        self._check.begin()

    def after_lane(self, lane_pass: LanePass, lane: int, gradients: Gradients) -> None:
        """Hash the gradients of the lane that is checked."""
        if self._check is not None:
            self._check.note(lane, gradients)

    def report(self) -> Callable[[], dict[str, Hashes]] | None:
        """Compute the lane again on the worker that checks it."""
        if self._check is None:
            return None
        self._check.repeat()
        return self._check.report

    def compare(self, reports: Sequence[Any]) -> None:
        """Compare the reports of all workers. Raises `RecheckError` on all of them."""
        if self._check is not None:
            self._check.compare(reports)
            self._check = None

    def note_passed(self, step: int) -> None:
        """Remember the last step whose check found nothing."""
        self.passed_step = step

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers of all modules, with names for messages."""
        for number, module in enumerate(self.modules):
            of = f"module {number} ({type(module).__name__})"
            for name, parameter in module.named_parameters():
                yield f"the parameter {name!r} of {of}", parameter
            for name, buffer in module.named_buffers():
                yield f"the buffer {name!r} of {of}", buffer

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a parameter or buffer, or its shape if no module has it."""
        names = (name for name, named in self.named_state() if named is tensor)
        return next(names, f"a parameter of shape {tuple(tensor.shape)}")


def _checker(world: World, owner: int, turn: int) -> int:
    """Return the worker that computes a lane of `owner` again: on another host if there is one."""
    near = next(ranks for ranks in world.machines or world.hosts if owner in ranks)
    ranks = [rank % world.size for rank in range(owner + 1, owner + world.size)]
    others = [rank for rank in ranks if rank not in near] or ranks or [owner]
    return others[turn % len(others)]


@dataclass
class LaneCheck:
    """The check of one lane of a pass: the worker `owner` computes it, and `checker` once more."""

    recheck: Recheck
    lane_pass: LanePass
    lane: int
    owner: int
    checker: int
    # the batch of a stream, which can be read only once
    _sent: Any = None
    _batch_hash: int = 0
    _first: Callable[[], Hashes] = dict  # of the owner
    _again: Callable[[], Hashes] = dict  # of the checker

    def begin(self) -> None:
        """Prepare the check, before the worker computes its lanes. Collective for streams."""
        lane_pass, world = self.lane_pass, self.lane_pass.context.world
        batches = dict(lane_pass.batch.lane_batches()) if self.lane in lane_pass.context.own else {}
        if lane_pass.batch.origin is None:
            what = f"sending the batch of lane {self.lane} to check it"
            # a copy for each worker, because loss functions may change batches
            self._sent = world.all_gather_object(batches.get(self.lane), what)[self.owner]
        if world.rank == self.owner:
            self._batch_hash = _hash_of_batch(batches.get(self.lane))
        lane_pass.watch_lane(self.lane)

    def note(self, lane: int, gradients: Gradients) -> None:
        """Hash the gradients of a lane, if it is the one that is checked."""
        if lane == self.lane:
            self._first = self._begin_hashes(gradients, self.lane_pass.scalars, self._batch_hash)

    def repeat(self) -> None:
        """Compute the lane again on the worker that checks it, after its own lanes."""
        if self.lane_pass.context.world.rank == self.checker:
            self._again = self._compute()

    def report(self) -> dict[str, Hashes]:
        """Return JSON for `compare`."""
        return {"first": self._first(), "again": self._again()}

    def compare(self, reports: Sequence[Mapping[str, Hashes]]) -> None:
        """Compare the reports of all workers. Raises `RecheckError` on all of them.

        Or `DataError` if they have loaded other samples, of which healthy hardware has other bits.
        """
        first, again = reports[self.owner]["first"], reports[self.checker]["again"]
        if first == again:
            self.recheck.note_passed(self.lane_pass.seed[0])
            return
        context = self.lane_pass.context
        with context.manual.lanes():
            third = self._compute()()
        row = [socket.gethostname(), str(context.devices[0]), third, self._hashes_of_state()]
        rows = context.world.all_gather_json(row, f"computing lane {self.lane} on all workers")
        computed = [first, again, *(third for _, _, third, _ in rows)]
        if len({hashes[BATCH] for hashes in computed}) > 1:
            raise DataError(OTHER_SAMPLES.format(self.lane, self.lane_pass.seed[0]))
        # parameters and buffers that differ explain what was computed from them
        names = differing([state for *_, state in rows])
        names = names or [self.name_of(key) for key in differing(computed)]
        earlier = [(self.owner, first), (self.checker, again)]
        raise self._error(
            Disagreement(
                [(host, device, third) for host, device, third, _ in rows],
                {rank: [hashes for by, hashes in earlier if by == rank] for rank, _ in earlier},
            ),
            names,
        )

    def _error(self, disagreement: Disagreement, names: Sequence[str]) -> RecheckError:
        """Return the error for this worker about the tensors that differ."""
        step, passed = self.lane_pass.seed[0], self.recheck.passed_step
        more = f" (the first of {len(names)} tensors that differ)" if names[1:] else ""
        last = f"the check of step {passed} passed"
        if passed is None:
            last = "no check had passed before"
        text = disagreement.describe(f"of lane {self.lane} at step {step} in {names[0]}{more}")
        return disagreement.error(
            RecheckError,
            self.lane_pass.context.world.rank,
            f"{text}. No gradient of this step was used, and {last}: resume from a snapshot that"
            " you trust, without that hardware",
            step=step,
            lane=self.lane,
            tensor=names[0],
        )

    def _compute(self) -> Callable[[], Hashes]:
        """Begin to compute the lane on this worker; return a call that returns its hashes."""
        lane_pass, context = self.lane_pass, self.lane_pass.context
        lane, origin = self.lane, lane_pass.batch.origin
        context.world.status.set_activity(f"loading lane {lane} to compute it again")
        data = copy.deepcopy(self._sent) if origin is None else origin.load(lane)
        batch_hash = _hash_of_batch(data.data if isinstance(data, Incomplete) else data)
        with context.buffers.repeating():
            return self._begin_hashes(*lane_pass.compute_again(lane, data), batch_hash)

    def _begin_hashes(
        self, gradients: Gradients, scalars: LaneScalars, batch_hash: int
    ) -> Callable[[], Hashes]:
        buffers = self.lane_pass.context.buffers.left_by(self.lane)
        present = {n: gradient for n, gradient in enumerate(gradients) if gradient is not None}
        names = [*buffers, *map(str, present)]  # a gradient has the number of its parameter
        hashes = begin_hashes([*buffers.values(), *present.values()])
        return lambda: {
            BATCH: batch_hash,
            LOSS: scalars.loss_of(self.lane),
            **dict(zip(names, hashes(), strict=True)),
        }

    def _hashes_of_state(self) -> Hashes:
        """Return hashes of all parameters and buffers, which are equal on all workers."""
        tensors = dict(self.recheck.named_state())
        return dict(zip(tensors, begin_hashes([*tensors.values()])(), strict=True))

    def name_of(self, key: str) -> str:
        """Return the name of what a hash stands for."""
        if not key.isdigit():
            return key
        return f"the gradient of {self.recheck.name_of(self.lane_pass.parameters[int(key)])}"


def _hash_of_batch(batch: Any) -> int:
    """Return a hash of the tensors in a batch: what differs there has another cause."""
    tensors = [tensor for _, tensor in tensors_in(batch)]
    dense = [t for t in tensors if t.layout == torch.strided and not t.is_nested]
    return hash(tuple(hashes_of(dense)))  # of integers: the same in every process
