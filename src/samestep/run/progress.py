"""The progress of a run: its step, its loops' positions, and the work between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, Final, NamedTuple, NoReturn
from weakref import ref

import torch

from samestep.config import Config
from samestep.data.batch import Batch
from samestep.data.exclude import Exclusion
from samestep.data.generators import is_observed
from samestep.data.mixture_plan import MixturePlan
from samestep.data.plan import Plan, array_digest
from samestep.data.random_state import key, set_generators
from samestep.errors import ConfigError, DataError, SnapshotError
from samestep.metrics import Means
from samestep.plugin import EndedStep, RunPlugin, RunPlugins
from samestep.record.files import DirectoryLock
from samestep.record.record import Record
from samestep.run.alerts import LossAlerts, SkippedSteps
from samestep.run.loop_states import LoopStates
from samestep.run.process import StopRequest, announce
from samestep.run.step_times import StepTimes
from samestep.snapshot.manager import SnapshotManager
from samestep.snapshot.read import Snapshot
from samestep.step.lane_engine import LaneEngine

LEFT_OUT: Final = -1  # the epoch of the record's event about samples that a loop leaves out
BODY: Final = "in the body of a loop"
OUTSIDE: Final = "outside of loops"
TRAINS_ON: Final = (
    "the run had ended at step {} and trains on; if it should have stopped early, call run.finish()"
    " before the break"
)
STALE_BATCH: Final = (
    "this batch is not that of the current step, whose loop has gone on: as when batches are taken"
    " ahead by a prefetcher, a thread or list(), each of them has to be used before the loop gives"
    " the next one. Iterate run.batches(...) itself, whose loader_workers= load batches ahead, and"
    " copies to GPUs begin one lane ahead"
)
# None if unknown
PLANNED: Final = ("steps", "epochs", "steps_per_epoch", "samples", "batch_size", "ends_with_epoch")


class Decision(NamedTuple):
    """What all workers have agreed to do at the end of the current step."""

    signal: int = 0  # to stop for; 0 for none
    snapshot_due: bool = False
    copy_due: bool = False
    writing: bool = True  # any worker may still write a snapshot to disk


@dataclass
class CurrentStep:
    """The current step of a loop. A step that was left early counts only if it made updates."""

    loop: str
    batch: Batch
    complete: Callable[[], int]
    updates: int = 0
    left: bool = False


class Progress:
    """Counts steps; at the end of each, takes snapshots, records timings and stops the run.

    Inputs of shared decisions (a clock, a signal) are sent in a note with the losses of a step, so
    they need no separate exchange.
    """

    def __init__(
        self,
        config: Config,
        record: Record,
        snapshots: SnapshotManager,
        stop: StopRequest,
        lanes: LaneEngine,
        times: StepTimes,
        plugins: Sequence[RunPlugin],
        *,
        alerts: LossAlerts,
        resumed: Snapshot | None,
        exclusion: Exclusion,
        lock: DirectoryLock | None,
        on_end: Callable[[], object],
    ) -> None:
        """`lock` is that of the directory; `on_end` is called before the end is recorded."""
        self._lock, self._on_end = lock, on_end
        self._config, self._record, self._snapshots = config, record, snapshots
        in_memory = snapshots.in_memory
        self._in_memory = in_memory if in_memory.has_launcher else None
        self._stop, self._lanes, self.times = stop, lanes, times
        self._plugins = RunPlugins([times, *plugins])
        self.alerts = alerts
        self.status, self.is_main = lanes.world.status, lanes.world.rank == 0
        state: Mapping[str, Any] = {} if resumed is None else resumed.state["run"]
        self.loops = LoopStates(resumed, exclusion)
        self.step = self._first_step = state.get("step", 0)
        self.epoch: int = state.get("epoch", 0)
        self._loop = ""  # the name of the last loop that had a step or ended
        self.skipped = SkippedSteps(config, record, state.get("skipped_steps", ()), self.is_main)
        self.finished: bool = state.get("finished", False)  # by `run.finish`, perhaps earlier
        self._has_ended: bool = state.get("ended", False)  # in an earlier start, with the script
        alerts.load_state_dict(state.get("losses", {}))
        self.status.set_step(self.step)
        self.reads: set[str] = set()  # the attributes that user code has read outside of steps
        self._current: CurrentStep | None = None
        self._thread = get_ident()  # that began the last step
        self._last_batch: Callable[[], Batch | None] = lambda: None  # a weak reference
        self._scores: dict[int, float] = {}  # of the last snapshot that had one, by step
        # decided by all workers; requested by user code, on all workers
        self._decision, self._requested = Decision(), False
        self._score: float | None = None
        self._shares: dict[str, Any] = {}  # of the newest step of a mixture that varies

    @property
    def between_steps(self) -> bool:
        """Whether no step's body runs."""
        return self._current is None

    @property
    def can_resume(self) -> bool:
        """Whether another start, or replacement workers, would continue from a snapshot."""
        return self._snapshots.is_enabled or self._snapshots.in_memory.is_enabled

    def read(self, name: str) -> int:
        """Return `step` or `epoch` to user code, which may use it to end its own loop."""
        if self._current is None or self._current.left:
            self.reads.add(name)
        return self.step if name == "step" else self.epoch

    def begin_loop(self, name: str, plan: Plan | None = None, **planned: int | None) -> None:
        """Record the start of a loop; `planned` are its steps (over all resumes) and its data.

        The record gets what makes the plan again; a stream has none.
        """
        at, self._shares = self.loops.positions[name], {}
        planned = {**dict.fromkeys(PLANNED), **planned}
        place = {"step": self.step, "epoch": at.epoch, "epoch_step": at.step, "done": at.done}
        recorded = None if plan is None else {**plan.to_record(), "given": at.mixture}
        self._record.event("loop", name=name, **place, **planned, plan=recorded)
        if plan is not None and len(plan.excluded):
            digest = array_digest(plan.excluded)
            self._record.order(self.step, name, LEFT_OUT, plan.excluded, digest)
        self._plugins.begin_loop(name, planned)

    def record_order(self, loop: str, epoch: int, plan: Plan) -> None:
        """Record the array that the order of an epoch is computed from, if there is one."""
        if (basis := plan.basis(epoch)) is not None:
            self._record.order(self.step, loop, epoch, *basis)

    def record_shares(self, loop: str, number: int, plan: MixturePlan) -> None:
        """Record what functions of the user chose for a step of a mixture, if that changed."""
        if plan.varies and (chosen := plan.chosen(number)) != self._shares:
            self._shares = chosen
            self._record.event("shares", step=self.step, loop=loop, number=number, **chosen)

    def begin_pass(self, loop: str) -> None:
        """Begin to iterate a loop: what the script did in earlier epochs of its own is done.

        A snapshot that was asked for since the last step is taken here, so that it holds all of
        that.
        """
        if loop not in self.loops.resumed_open:
            self.loops.close_epochs(before=self.loops.positions[loop].epoch)
        if self._requested:
            self._take_snapshot()

    def begin_step(self, loop: str, batch: Batch, complete: Callable[[], int]) -> None:
        """Start a step of a loop; `complete` advances the loop and returns its next epoch.

        What the body draws depends on the seed and the step, so it is the same on all workers and
        after a resume. Raises `DataError` in the body of another loop, and `ConfigError` in a run
        that only reads.
        """
        if self._current is not None and not self._current.left:
            raise DataError(
                "loops cannot be nested, because every batch is a step: "
                "a batch was taken from one loop in the body of another; "
                "put everything a step needs into one data set or stream"
            )
        if self._config.read_only:
            raise ConfigError(
                "a step was begun, but with read_only=True nothing is saved; use it to evaluate, "
                "and start a training without it"
            )
        if self._is_last():
            # A resumed run may already be at `stop_after`.
            self._plugins.expire()
            self._stop_run()
        if self._has_ended:
            self._has_ended = False
            if self.is_main:
                announce(TRAINS_ON.format(self.step))
        self._plugins.begin_step(self.step)
        self.epoch = batch.epoch
        self._current = CurrentStep(loop, batch, complete)
        self._loop, self._thread = loop, get_ident()
        self.status.set_step(self.step)
        self.status.set_activity(BODY)
        # Without snapshots, waiting for the end of the step would save nothing.
        if self._stop.deferring is not self._snapshots.is_enabled:
            self._stop.defer(active=self._snapshots.is_enabled)
        set_generators(key(self._config.seed, "body", self.step))

    @property
    def place(self) -> tuple[str, int] | None:
        """The last loop and its number of steps, once this start has made a step."""
        if self.step == self._first_step:
            return None
        return self._loop, self.loops.positions[self._loop].done

    def leave_step(self) -> None:
        """Mark the step as left early, by break, return or an exception."""
        if self._current is not None:
            self._current.left = True
            self.status.set_activity(OUTSIDE)

    def end_step(self) -> None:
        """Count the current step, then carry out what all workers agreed on during it."""
        if self._current is None:
            return
        self._lanes.manual.check_complete()  # the loop over its lanes
        # The order matters: the position advances first, so that a snapshot continues with the next
        # step. A state is compared before it is saved, and saved before the run stops.
        self._plugins.expire()
        self.epoch = self._current.complete()
        self._plugins.end_step(self._ended(self._current, self.step + 1))
        self._last_batch = ref(self._current.batch)
        self._current = None
        self.step += 1
        self._plugins.compare_if_due(self.step)
        if self._in_memory is not None:
            # to the launcher, whose memory outlives this worker
            self._in_memory.report_step(self.step)
        decision, self._decision = self._decision, Decision()
        # Equal on all workers: the count of steps, the notes of this step's backward calls, and
        # calls of user code. So all of them act here, without another message.
        if self._snapshots.is_due(self.step) or decision.snapshot_due or self._requested:
            self._take_snapshot()
        if decision.signal or self._is_last():  # does not return
            self._stop_run(decision.signal)
        # Not if this step's snapshot was staged in memory already, see `InMemorySnapshots.save`.
        if self._in_memory is not None and self._in_memory.is_due(
            self.step, agreed=decision.copy_due
        ):
            self._snapshots.save_in_memory(self.step, self._states, writing=decision.writing)

    def _ended(self, current: CurrentStep, step: int) -> EndedStep:
        """Return a step whose position has advanced; it is the run's `step`-th one."""
        done = self.loops.positions[current.loop].done
        return EndedStep(step, current.loop, done, current.batch)

    def end_loop(self, name: str) -> None:
        """End a loop, and agree on a signal that arrived after the note of its last step.

        What is drawn until the next loop depends on the seed and on this loop's number of steps. A
        resumed run that finds the loop complete draws the same.
        """
        self.status.set_activity(OUTSIDE)
        self._plugins.expire()
        position, self._loop = self.loops.positions[name], name
        if name in self.loops.resumed_open:
            self.loops.resumed_open.discard(name)
            self.epoch = position.epoch
        # Also for a step without a backward call, which has exchanged no note.
        self._exchange_notes("ending a loop")
        decision, self._decision = self._decision, Decision()
        if decision.snapshot_due:
            self._take_snapshot()
        if decision.signal:
            self._stop_run(decision.signal)
        self._stop.defer(active=False)  # no step runs: a signal acts at once
        set_generators(key(self._config.seed, f"after {name}", position.done))

    def complete_left_step(self) -> None:
        """Count a step that was left by break after an update."""
        if self._current is not None and self._current.left and self._current.updates:
            self._current.batch.load()  # as in a step that ends normally
            self.end_step()
            self._stop.defer(active=False)

    def snapshot(self, score: float | None, *, now: bool) -> None:
        """Take a snapshot now, or without `now` when all that belongs to it is done.

        That is at the end of the current step, of which parts of the state may be updated and
        others not. After the steps of an epoch it is when the next loop begins, or at the end of
        the run: a schedule or `Patience` may follow.
        """
        self.complete_left_step()
        self._plugins.expire()
        self._requested = True
        self._score = self._score if score is None else score
        if self._current is None or self._current.left:
            if now or not self.loops.are_open:
                self._take_snapshot()
        elif now:
            self._take_early_snapshot(self._current)

    def _take_early_snapshot(self, current: CurrentStep) -> None:
        """Save the state that the current step ends with, if its body changes nothing more."""
        current.batch.load()  # as at the end
        step, epoch = self.step, self.epoch
        positions = {name: replace(position) for name, position in self.loops.positions.items()}
        self.step, self.epoch = step + 1, current.complete()
        try:
            self._take_snapshot()
            with self.status.doing("writing a snapshot"):
                self._snapshots.wait()
        finally:
            self.step, self.epoch = step, epoch
            for name, position in positions.items():
                vars(self.loops.positions[name]).update(vars(position))  # which the loops also hold

    def finish(self) -> None:
        """End all loops, now or after the current step, and take a snapshot that says so."""
        self.finished = True
        self.snapshot(None, now=False)

    def best_snapshot(self, load: Callable[[], Snapshot]) -> Snapshot:
        """Save the current state, so that what is loaded is not saved as a later one, and load."""
        self.complete_left_step()
        if self._current is not None and not self._current.left:
            raise SnapshotError("run.best_snapshot was called in a step; call it after the loop")
        self._plugins.expire()
        self._close_epochs()
        self._take_snapshot()
        self._snapshots.wait()
        with self.status.doing("loading the best snapshot"):
            return load()

    def end_run(self) -> None:
        """Take the last snapshot and return when it is complete."""
        self._plugins.expire()
        self.complete_left_step()
        self._plugins.end_run()
        self._has_ended = True
        self._close_epochs()
        # `samestep verify` also compares what follows the last step, such as loading the best model
        self._requested |= is_observed()
        self._stop.defer(active=True)  # a signal now waits for the last snapshot
        self._take_snapshot()
        self._finish("finished")
        self._snapshots.in_memory.report_finish()
        if self._stop.signal:  # its status still tells of the signal
            self._stop.exit(self._stop.signal)

    def next_call(self, batch: Batch) -> tuple[int, int]:
        """Return the step and the number of this backward call within it.

        Raises `DataError` if the batch is not that of the current step, nor, between steps, that of
        the last one. Nor if another thread takes batches, which may go on with the loop meanwhile.
        """
        last = self._last_batch() if self._current is None else self._current.batch
        if last is not batch or self._thread != get_ident():
            raise DataError(STALE_BATCH)
        if self._current is None:
            return self.step, 0
        self._current.updates += 1
        # such as generator and discriminator: other random numbers
        return self.step, self._current.updates - 1

    def take_back_call(self) -> None:
        """Forget the last call, whose lanes were left before their end."""
        if self._current is not None:
            self._current.updates -= 1

    def note(self) -> dict[str, Any]:
        """Return the note that this worker sends with the losses of a step."""
        if self._lock is not None and self._lock.is_lost:
            self._lock.check()
        return {
            "signal": self._stop.signal,
            "snapshot_due": self._snapshots.time_is_up(),
            "copy_due": self._in_memory is not None and self._in_memory.time_is_up(),
            "writing": self._snapshots.is_writing,
            "plugins": self._plugins.note(),
        }

    def receive(self, notes: list[dict[str, Any]]) -> None:
        """Decide by rank 0's clock and the first signal in all workers' notes."""
        # A signal may have reached one worker only, or others later: all stop for the first one.
        signal = next((note["signal"] for note in notes if note["signal"]), 0)
        writing = any(note["writing"] for note in notes)
        copy_due = all(note["copy_due"] for note in notes)  # the others wait for the slowest
        self._decision = Decision(signal, notes[0]["snapshot_due"], copy_due, writing)
        self._plugins.receive(self.step, [note["plugins"] for note in notes])
        self.status.set_activity(OUTSIDE if self._current is None else BODY)

    def show(self, means: Means) -> None:
        """Show the means of a backward call of this step to plugins."""
        self._plugins.add(means)

    def used(self) -> dict[str, float]:
        """Return the rows and epochs that each source of a mixture has given, by their names.

        They include those of the current step.
        """
        plan, loop = self.loops.mixtures.get(self._loop), self._loop
        if plan is None:
            return {}
        is_in_step = self._current is not None and not self._current.left
        used = plan.used(self.loops.positions[loop].done + is_in_step)
        return {
            f"{name}/{kind}": value
            for name, values in used.items()
            for kind, value in zip(("rows", "epochs"), values, strict=True)
        }

    def add_norm(self, norm: torch.Tensor, max_norm: float) -> None:
        """Note the norm of this step's gradients before they were clipped, for the record.

        Not that of a skipped batch, which is 0 but says nothing about the model.
        """
        is_skipped = self.step in self.skipped.steps[-1:]
        if self.is_main and self._config.dir is not None and not is_skipped:
            self.times.add_norm(norm, max_norm)

    def _is_last(self) -> bool:
        return self._config.stop_after is not None and self.step >= self._config.stop_after

    def _stop_run(self, signal: int = 0) -> NoReturn:
        self._take_snapshot()
        self._finish("stopped", signal=signal)
        if signal:
            self._stop.exit(signal)
        raise SystemExit(0)  # `stop_after` is a success

    def _take_snapshot(self) -> None:
        with self.status.doing("taking a snapshot"):
            # a snapshot that replaces one of the same step keeps its score
            score = self._scores.get(self.step) if self._score is None else self._score
            self._scores = {} if score is None else {self.step: score}
            self._snapshots.save(self.step, *self._states(), score, again=self._requested)
        self._requested, self._score = False, None

    def _close_epochs(self) -> None:
        """Note that what the script does after its epochs is done, which a snapshot must hold."""
        self._requested |= self.loops.are_open
        self.loops.close_epochs()

    @property
    def _epoch_to_resume(self) -> int:
        """The epoch whose pass a resumed script begins with, perhaps only for what follows it."""
        at = self.loops.positions.get(self._loop)
        return self.epoch - (at is not None and at.is_open)

    def _states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the run's state that is equal on all workers, and this worker's own state."""
        run = {
            "step": self.step,
            "skipped_steps": list(self.skipped.steps),
            "skip_batches": self._config.skip_batches,
            "epoch": self._epoch_to_resume,
            "lanes": self._lanes.lanes,
            **self.loops.state_dict(),
            "frozen": self._snapshots.tracked.frozen(),  # parameters, by module
            "finished": self.finished,
            "ended": self._has_ended,
            "losses": self.alerts.state_dict(),  # that are usual
        }
        current = self._current  # if it is saved before its body has ended
        ending = None if current is None or current.left else self._ended(current, self.step)
        own = {"run": of_plugins} if (of_plugins := self._plugins.state(ending)) else {}
        return {"run": run}, {**self.loops.own_state_dict(), **own}

    def _finish(self, event: str, **fields: Any) -> None:
        self._plugins.compare_if_due(self.step, last=True)
        # also a barrier: no worker exits while others compute
        self._exchange_notes("ending the run")
        self.status.finish()  # an exit is no longer a failure
        self._record.flush()
        # Waits for the commit. If it fails, the run fails, and the record has no end.
        self._snapshots.finish()
        self._on_end()  # the end is the last event
        self._record.event(event, step=self.step, **fields)
        if self.is_main and not is_observed():
            announce(self._describe_end(event))

    def _describe_end(self, event: str) -> str:
        is_saved, folder = self._snapshots.is_enabled, self._config.dir
        if event == "stopped":
            saved = ", snapshot saved; run the same command to resume"
            return f"stopped at step {self.step}{saved if is_saved else '; nothing was saved'}"
        if self.step == self._first_step > 0:
            if folder is None:  # a read-only run
                return "finished; nothing was saved"
            return f"nothing left to do: the run in {folder} already finished at step {self.step}"
        return f"finished after {self.step} step{'s' * (self.step != 1)}"

    def _exchange_notes(self, what: str) -> None:
        """Exchange the notes that no later step will carry; no step may follow, so wait for GPUs.

        A hang is reported only while the watchdog runs.
        """
        self._lanes.world.wait_for_gpu()
        self.receive(self._lanes.world.all_gather_json(self.note(), what))
