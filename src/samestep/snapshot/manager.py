"""The snapshots of a run: the objects that they hold, and when they are saved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

import torch

from samestep.comm.base import World
from samestep.config import Config
from samestep.errors import SnapshotError
from samestep.record import Record
from samestep.snapshot.commit import keep_newest
from samestep.snapshot.hooks import Mirror, open_mirror
from samestep.snapshot.in_memory import InMemorySnapshots, Saving
from samestep.snapshot.owner import Owner, RemoteOwner
from samestep.snapshot.part import Contribution
from samestep.snapshot.read import Snapshot
from samestep.snapshot.resume import last_own_step
from samestep.snapshot.state import States
from samestep.snapshot.structure import (
    OF_MODULES,
    OF_OPTIMIZERS,
    Structure,
    changes_of,
    numbers_of,
    structure_of,
)
from samestep.snapshot.write import COMMIT_SECONDS, SnapshotWriter
from samestep.step.guards import Contents
from samestep.step.optimizer_state import DividedState, load_optimizer

RESERVED = ("run", "streams")
TIDY_SECONDS = 5.0  # at the end of a run, for the removal of old snapshots
SHOWN = 3  # names in a line
GROWTH: dict[type, str] = {  # what to do about objects that had another size at that step
    torch.nn.Module: ". If the model grew during the run, such as a head for new classes, make a"
    " new module for each size, and track it under a name of its own when it begins to train; or"
    " build it by a size that an earlier run.track restores. If it was pruned, call"
    " torch.nn.utils.prune.identity(layer, 'weight') before run.replicate",
    torch.optim.Optimizer: ". If a parameter group was added during the run, give the optimizer all"
    " groups before run.track, and keep parameters that train later frozen with"
    " requires_grad_(False): snapshots save it",
}


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved, such as torch's modules, optimizers and schedulers."""

    def state_dict(self) -> Any:
        """Return the state: nested dicts, lists and tuples of tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state that `state_dict` returned."""


class TrackedValue:
    """A dict, list or tensor of a script, which is restored in place."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value

    def load_state_dict(self, state: Any) -> None:
        """Raise `ValueError` for a value of another type or a tensor of another shape."""
        value, state = self._value, deepcopy(state)  # not in the memory that workers share
        same_type = type(state) is type(value)
        if not same_type or (isinstance(value, torch.Tensor) and value.shape != state.shape):
            raise ValueError(f"it must be {_kind(state)}, as in the snapshot, got {_kind(value)}")
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(state)
        elif isinstance(value, dict):
            value.clear()
            value.update(state)
        else:
            value[:] = state


def as_stateful(name: str, item: Any) -> Stateful:
    """Return an object with `state_dict` and `load_state_dict`; raise `SnapshotError` for others.

    Numbers and texts are refused: a script cannot be given another one in their place.
    """
    if isinstance(item, Stateful):
        return item
    if type(item) in {dict, list, torch.Tensor}:
        return TrackedValue(item)
    advice = ""
    if isinstance(item, (bool, int, float, str, tuple)) or item is None:
        advice = f"; keep it in a dict, such as state = {{{name!r}: {item!r:.40}}}, and track that"
    raise SnapshotError(
        f"{name!r} must be a dict, a list, a tensor or have state_dict and load_state_dict, got"
        f" {type(item).__name__}{advice}"
    )


def _kind(value: Any) -> str:
    shape = f" {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"a {type(value).__name__}{shape}"


class Tracked:
    """The tracked objects by name; restores each from the snapshot that the run resumes from."""

    def __init__(self, snapshot: Snapshot | None, *, read_only: bool = False) -> None:
        self._snapshot, self._read_only = snapshot, read_only
        self.objects: dict[str, Stateful] = {}
        self._calls = 0  # of run.track
        self._place: tuple[str, int] | None = None  # of the last call: a loop, and its steps
        self._late: dict[str, tuple[str, int]] = {}  # places of objects, after the first step
        # of modules and optimizers, by name: the number of the call, and the structure then
        self._structures: dict[str, tuple[int, Structure]] = {}
        self._numbers: dict[str, tuple[int, Any]] = {}  # of dicts and lists, in the same way

    def __bool__(self) -> bool:
        return bool(self.objects)

    def is_saved(self, name: str) -> bool:
        """Return whether the snapshot has an object of this name that is not restored yet."""
        return self._snapshot is not None and name in self._snapshot.state

    def add(self, name: str, item: Any, complete: Stateful | None) -> list[str]:
        """Track and restore `item`, through `complete` if it is a sharded optimizer.

        Returns lines about what starts anew or has another `requires_grad`. Raises `SnapshotError`
        if the name is taken, or if the object or the snapshot does not fit.
        """
        if name in RESERVED or name in self.objects:
            raise SnapshotError(f"track got the name {name!r}, which is taken; choose another")
        # a `Shard` saves and loads this worker's slices only
        stateful = as_stateful(name, item) if complete is None else complete
        snapshot, lines = self._snapshot, list[str]()
        if snapshot is not None and not self.is_saved(name):
            lines.append(self._begin_anew(name, snapshot))
            snapshot = None
        self.objects[name] = stateful
        if snapshot is not None:
            self._restore(name, item, stateful, snapshot)
            lines += [] if self._read_only else _thaw(name, item, snapshot)
        self._structures[name] = self._calls, structure_of(stateful)
        if type(item) in {dict, list}:
            self._numbers[name] = self._calls, numbers_of(item)
        if self._place is not None:
            self._late[name] = self._place
        return lines

    def begin_call(self, place: tuple[str, int] | None) -> None:
        """Begin to track what one call names; `place` is the loop in which it is, and its steps."""
        self._calls, self._place = self._calls + 1, place

    def unloadable(self, states: States, positions: Mapping[str, Any]) -> str:
        """Return why no start of the script can load these states, "" if one can.

        `positions` are those of the loops. A start may build an object by the numbers that an
        earlier call tracks, if they have changed as well.
        """
        for name, (call, before) in self._structures.items():
            item = self.objects[name]
            change = changes_of(before, item, states.get(name))
            if change and not self._have_changed(call):
                is_optimizer = isinstance(item, torch.optim.Optimizer)
                advice = OF_OPTIMIZERS if is_optimizer else OF_MODULES
                return f"since run.track, {name!r} {change}. {advice}"
        for name, (loop, done) in self._late.items():
            if positions[loop]["done"] > done:
                return (
                    f"{name!r} was tracked in the middle of loop {loop!r}, after {done} of its"
                    " steps. A start that continues behind that place would not track it there:"
                    " track it before the loop, at least if loop.step is greater than that"
                )
        return ""

    def _have_changed(self, call: int) -> bool:
        """Return whether numbers have changed that were tracked before this call."""
        return any(
            number < call and numbers_of(self.objects[name].state_dict()) != numbers
            for name, (number, numbers) in self._numbers.items()
        )

    def _begin_anew(self, name: str, snapshot: Snapshot) -> str:
        """Return a line about an object that the snapshot never knew, such as of a later stage."""
        if (untracked := self.untracked()) or self._read_only:
            names = untracked or ", ".join(sorted(self.objects))
            raise SnapshotError(
                f"the snapshot of step {snapshot.step} holds {names}, but no {name!r}: track the "
                "same names as the run that wrote it (an object that is new, after all others), or "
                "start a new run with resume='never' and another dir"
            )
        return f"{name} is not in the snapshot of step {snapshot.step}, so it starts anew"

    def _restore(self, name: str, item: Any, tracked: Stateful, snapshot: Snapshot) -> None:
        try:
            state = snapshot.state.pop(name)  # its memory is freed as soon as possible
            if isinstance(tracked, torch.optim.Optimizer):
                # Torch's optimizers keep the tensors that they load, unlike modules, which copy
                # them.
                load_optimizer(tracked, state)
            else:
                tracked.load_state_dict(state)
            if snapshot.shared and isinstance(tracked, (torch.optim.Optimizer, Contents)):
                _free_shared(tracked.state, state)
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            advice = "".join(GROWTH[kind] for kind in GROWTH if isinstance(item, kind))
            raise SnapshotError(
                f"the snapshot of step {snapshot.step} does not fit {name!r} "
                f"({type(item).__name__}): {error}{advice}"
            ) from error

    def frozen(self) -> dict[str, list[str]]:
        """Return the names of parameters that do not require gradients, by module."""
        return {
            name: [inner for inner, p in item.named_parameters() if not p.requires_grad]
            for name, item in self.objects.items()
            if isinstance(item, torch.nn.Module)
        }

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states that are equal on all workers, and those that are sharded."""
        shared: dict[str, Any] = {}
        own_states: dict[str, Any] = {}
        for name, item in self.objects.items():
            (own_states if isinstance(item, DividedState) else shared)[name] = item.state_dict()
        return shared, own_states

    def untracked(self) -> str:
        """Return the names of objects in the snapshot that are not tracked yet, as a list."""
        state = {} if self._snapshot is None else self._snapshot.state
        return ", ".join(sorted(state.keys() - set(RESERVED)))


def _thaw(name: str, item: Any, snapshot: Snapshot) -> list[str]:
    """Give parameters the `requires_grad` of the snapshot; return a line if it differed."""
    frozen = snapshot.state["run"].get("frozen", {}).get(name)
    if frozen is None or not isinstance(item, torch.nn.Module):
        return []  # a snapshot of an earlier version
    changed = []
    for inner, parameter in item.named_parameters():
        if parameter.requires_grad is (inner in frozen):
            parameter.requires_grad_(inner not in frozen)
            changed.append(f"{inner} {'trains' if parameter.requires_grad else 'is frozen'}")
    if not changed:
        return []
    more = f" and {len(changed) - SHOWN} more" * (len(changed) > SHOWN)
    return [f"requires_grad in {name} is that of the snapshot: {', '.join(changed[:SHOWN])}{more}"]


def _free_shared(kept_state: Mapping[Any, Any], state: Mapping[str, Any]) -> None:
    """Copy the tensors of a loaded state that the optimizer kept, so that their memory is freed."""
    loaded = [value for values in state["state"].values() for value in values.values()]
    # All tensors of an object lie in one mapping, which a single one of them keeps alive.
    kept = {value.data_ptr() for value in loaded if isinstance(value, torch.Tensor)}
    for values in kept_state.values():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.data_ptr() in kept:
                values[name] = value.clone()


class SnapshotManager:
    """Saves snapshots at intervals of steps or minutes, on request, and at the end.

    Without a directory, it saves none on disk. They name the run `owner`. `environment()` returns
    what its results depend on, with what the program has imported until then. `check_models()` and
    `compare(step, shared)` run before each snapshot, the latter with the states of tracked objects
    that are not sharded: it waits for all workers, and raises an exception if these states differ.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        record: Record,
        attempt: str,
        environment: Callable[[], Mapping[str, str]],
        resumed: Snapshot | None,
        in_memory: InMemorySnapshots,
        *,
        tracked: Tracked,
        owner: Owner | None = None,
        remote_owner: RemoteOwner | None = None,
        writes: bool = True,
        check_models: Callable[[], object] = lambda: None,
        compare: Callable[[int, States], object] | None = None,
    ) -> None:
        self.tracked, self.in_memory = tracked, in_memory
        self._check_models = check_models
        self._compare = compare or (lambda *_: world.barrier("starting a snapshot"))
        self._stall_seconds = 0.0
        self._config, self._world, self._record, self._attempt = config, world, record, attempt
        self._environment, self._owner, self._remote_owner = environment, owner, remote_owner
        self._every_steps, self._every_seconds = config.snapshot_steps, config.snapshot_seconds
        self._news = threading.Event()  # a thread has an event to report, or a failure
        # the last one on disk
        self._saved_step = None if resumed is None or resumed.in_memory else resumed.step
        self._saved_time = time.monotonic()
        self._prepared = config.snapshot_every is None
        self._warned = self._prepared  # that nothing is tracked
        self._warned_of_structure = world.rank != 0  # that a start cannot load snapshots
        self._events: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()  # of the mirror
        self._mirror: Mirror | None = None
        if world.rank == 0:
            start = last_own_step(config, resumed, owner)
            self._mirror = open_mirror(
                config, attempt=attempt, start=start, owner=remote_owner, report=self._queue
            )
        self._writer: SnapshotWriter | None = None
        # All workers write, each its part. Only rank 0 commits, removes and mirrors.
        if config.dir is not None and writes:
            self._writer = SnapshotWriter(
                config.dir,
                rank=world.rank,
                workers=world.size,
                attempt=attempt,
                keep_last=config.keep_last,
                keep_best=config.keep_best,
                verified=[] if resumed is None or resumed.in_memory else [resumed.path],
                report=record.event,
                before_commit=record.sync,
                on_commit=(lambda _: None) if self._mirror is None else self._mirror.on_commit,
                on_news=self._news.set,
                timeout_seconds=max(COMMIT_SECONDS, config.timeout),
            )

    @property
    def is_enabled(self) -> bool:
        """Whether snapshots are saved on disk."""
        return self._writer is not None and bool(self.tracked)

    def take_stall_seconds(self) -> float:
        """Return the seconds that training has waited for snapshots since the last call."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    def time_is_up(self) -> bool:
        """Return whether the minutes between snapshots have passed on this worker's clock."""
        if self._writer is None or self._every_seconds is None:
            return False
        return time.monotonic() - self._saved_time >= self._every_seconds

    def is_due(self, step: int) -> bool:
        """Return whether the steps between snapshots have passed.

        The first call also allocates memory for the first snapshot, since optimizers have their
        state after a step. Raises `SnapshotError` if the last snapshot failed.
        """
        if self._writer is None:
            return False
        if not (self.tracked or self._prepared or self._warned):
            self._warned = True
            if self._world.rank == 0:
                logging.getLogger("samestep").warning(
                    "no snapshots are saved in %s, because nothing is tracked: call "
                    "run.track(model=model, optimizer=optimizer) before the loop, or set "
                    "snapshot_every=None if only the record is needed",
                    self._config.dir,
                )
        # The run ends at the next step after a failed save, rather than train without snapshots.
        if self._news.is_set():
            self._news.clear()  # first: more may come
            self._writer.raise_if_failed()
            self._report_events()
        if self._remote_owner is not None:
            self._remote_owner.check()
        if not self._prepared and self.is_enabled:
            self._prepared = True
            if not self.in_memory.can_stage:  # otherwise the slots serve as the buffer
                self._writer.prepare(*self.tracked.states())
        return self._every_steps is not None and step % self._every_steps == 0

    def save(
        self,
        step: int,
        shared: States,
        own_states: States,
        score: float | None,
        *,
        again: bool = False,
    ) -> None:
        """Copy the states of tracked objects and of the run; write files in the background.

        `shared` and `own_states` are the run's states, as for `SnapshotWriter.save`. A step is
        saved once, or `again`, such as with a score.
        """
        if self._writer is None or not self.tracked:
            return
        if step == self._saved_step and not again:  # as at the end of a run
            return
        # The new snapshot would replace the old one, and lose the state of an object that was not
        # restored.
        if untracked := self.tracked.untracked():
            raise SnapshotError(
                f"the run resumed from a snapshot that also holds {untracked}; track it as well "
                "so that it is not lost"
            )
        self._check_models()
        # after this, workers communicate through files, which cannot show that a worker has exited
        started = time.perf_counter()
        tracked_shared, tracked_own = self.tracked.states()
        waiting = time.perf_counter()
        # Collective. A state that differs between workers must not be saved as if it were equal.
        self._compare(step, tracked_shared)
        started += time.perf_counter() - waiting  # this wait is not part of the stall
        self._warn_of_structure(step, tracked_shared, shared)
        shared, own_states = {**tracked_shared, **shared}, {**tracked_own, **own_states}
        info = self._info(shared)
        saving = Saving(step, self._attempt, info, time.monotonic())

        def stage(contribution: Contribution, values: Sequence[torch.Tensor]) -> memoryview | None:
            data = None  # then the writer copies to its own buffer
            with self._giving_up(step):
                data = self.in_memory.stage(saving, contribution, values)
            return data  # noqa: RET504  None if the block failed

        self._writer.save(step, shared, own_states, info, score, stage)
        self._saved_step, self._saved_time = step, time.monotonic()
        self._stall_seconds += time.perf_counter() - started

    @property
    def is_writing(self) -> bool:
        """Whether this worker still writes a snapshot to disk."""
        pending = None if self._writer is None else self._writer.pending
        return pending is not None and not pending.done()

    def save_in_memory(
        self, step: int, states: Callable[[], tuple[States, States]], *, writing: bool = True
    ) -> None:
        """Save the same in memory; `states` returns the run's states.

        `writing` is whether any worker may still write a snapshot to disk. A failure is reported
        and ends in-memory snapshots.
        """
        if not self.tracked or self.tracked.untracked():
            return
        started = time.monotonic()
        self._check_models()
        tracked_shared, tracked_own = self.tracked.states()
        self._compare(step, tracked_shared)
        with self._giving_up(step):
            shared, own_states = states()
            self._warn_of_structure(step, tracked_shared, shared)
            shared, own_states = {**tracked_shared, **shared}, {**tracked_own, **own_states}
            saving = Saving(step, self._attempt, self._info(shared), started)
            self.in_memory.save(saving, shared, own_states, writing=writing)
        self._stall_seconds += time.monotonic() - started

    def _warn_of_structure(self, step: int, tracked: States, run: States) -> None:
        """Say once that no start can load the snapshots from here on."""
        if self._warned_of_structure:
            return
        if issue := self.tracked.unloadable(tracked, run["run"]["positions"]):
            self._warned_of_structure = True
            logging.getLogger("samestep").warning(
                "a new start may fail to load the snapshot of step %d: %s", step, issue
            )

    @contextmanager
    def _giving_up(self, step: int) -> Iterator[None]:
        """Report a failure in the block, which ends in-memory snapshots."""
        try:
            yield
        except (OSError, SnapshotError) as error:
            # Training goes on. Without this worker's part, no later copy is complete, and
            # replacement workers resume from disk.
            self.in_memory.give_up()
            self._record.event("in_memory_snapshot_failed", step=step, reason=str(error))
            logging.getLogger("samestep").warning("no more in-memory snapshots: %s", error)

    def _info(self, shared: States) -> dict[str, Any]:
        run = shared["run"]
        return {
            "lanes": run["lanes"],
            "seed": self._config.seed,
            "workers": self._world.size,
            "epoch": run["epoch"],
            "environment": dict(self._environment()),
            **({"run": self._owner.label} if self._owner is not None else {}),
        }

    def keep_newest(self, reason: str) -> None:
        """Keep the newest snapshot, and one that is being written, although newer ones follow."""
        if self._config.dir is not None and self._writer is not None:
            keep_newest(self._config.dir, reason)

    def _queue(self, kind: str, **fields: Any) -> None:
        self._events.put((kind, fields))  # in the mirror's thread
        self._news.set()

    def _report_events(self) -> None:
        while not self._events.empty():
            kind, fields = self._events.get()
            self._record.event(kind, **fields)

    def wait(self) -> None:
        """Wait until the last snapshot is committed. Raises `SnapshotError` if that failed."""
        if self._writer is not None:
            self._writer.wait()

    def finish(self) -> None:
        """Wait until the last snapshot is committed, and the mirror is complete.

        Raises `SnapshotError` if that failed.
        """
        if self._writer is None:
            return
        # First the commit, which must succeed; then copies elsewhere; then the removal of old
        # snapshots, which may be cut short.
        self._writer.wait()
        try:
            if self._mirror is not None:
                self._mirror.finish()
            self._writer.wait(TIDY_SECONDS)
        finally:
            self._report_events()

    def close(self) -> None:
        """Stop writing."""
        if self._writer is not None:
            self._writer.close()
        if self._mirror is not None:
            self._mirror.close()  # after the writer, which calls it
