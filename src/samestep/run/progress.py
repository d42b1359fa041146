"""The progress of a run: its step, its loops' positions, and the work between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

import torch

from samestep.config import Config
from samestep.data.batch import Batch, LaneStream
from samestep.errors import DataError
from samestep.record import Record
from samestep.run.divergence import DivergenceCheck
from samestep.run.process import StopRequest
from samestep.snapshot.manager import SnapshotManager
from samestep.snapshot.read import Snapshot
from samestep.step.lane_engine import LaneEngine

BODY: Final = "in the body of a loop"
OUTSIDE: Final = "outside of loops"
PLANNED: Final = ("steps", "epochs", "steps_per_epoch", "samples", "batch_size")  # None if unknown


class Decision(NamedTuple):
    """What all workers have agreed to do at the end of the current step."""

    signal: int = 0  # to stop for; 0 for none
    snapshot_due: bool = False
    copy_due: bool = False


@dataclass
class Position:
    """The position of a loop: its next step is `step` of `epoch`, after `done` steps in total."""

    epoch: int = 0
    step: int = 0
    done: int = 0
    plan: dict[str, Any] = field(default_factory=dict)

    def advance(self, steps_per_epoch: int | None) -> int:
        """Count one step (streams have no epochs: None) and return the epoch of the next one."""
        self.done += 1
        self.step += 1
        if self.step == steps_per_epoch:
            self.epoch, self.step = self.epoch + 1, 0
        return self.epoch


@dataclass
class CurrentStep:
    """The step whose body runs, or that was left early; then it counts only if it made updates."""

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
        divergence: DivergenceCheck,
        resumed: Snapshot | None,
    ) -> None:
        self.step = self.epoch = 0
        self.positions: dict[str, Position] = {}
        self.streams: dict[str, dict[int, LaneStream]] = {}
        self.resumed_streams: dict[str, dict[int, Any]] = {}
        self.status = lanes.world.status
        self._config, self._record, self._snapshots = config, record, snapshots
        self._stop, self._lanes, self._divergence = stop, lanes, divergence
        self._current: CurrentStep | None = None
        self._optimizer_seconds = 0.0
        self._seconds: dict[str, float] = {}
        self._decision, self._requested = Decision(), False
        self._score: float | None = None
        if resumed is not None:
            state = resumed.state["run"]
            self.step = self.status.step = state["step"]
            self.epoch = state["epoch"]
            self.positions = {name: Position(**at) for name, at in state["positions"].items()}
            self.resumed_streams = resumed.state.get("streams", {})

    @property
    def between_steps(self) -> bool:
        """Whether no step's body runs."""
        return self._current is None

    def begin_loop(self, name: str, **planned: int | None) -> None:
        """Record the start of a loop; `planned` are its steps (over all resumes) and its data."""
        at = self.positions[name]
        planned = {**dict.fromkeys(PLANNED), **planned}
        self._record.event(
            "loop", name=name, step=self.step, epoch=at.epoch, done=at.done, **planned
        )

    def begin_step(self, batch: Batch, complete: Callable[[], int]) -> None:
        """Start the step of a batch; `complete` advances the loop and returns its next epoch.

        Raises `DataError` in the body of another loop.
        """
        if self._current is not None and not self._current.left:
            raise DataError(
                "loops cannot be nested, because every batch is a step: "
                "a batch was taken from one loop in the body of another; "
                "put everything a step needs into one data set or stream"
            )
        if self._is_last():
            self._stop_run()
        self.epoch = batch.epoch
        self._current = CurrentStep(batch, complete)
        self.status.step = self.step
        self.status.set_activity(BODY)
        self._stop.deferring = self._snapshots.is_enabled

    def leave_step(self) -> None:
        """Mark the step as left early, by break, return or an exception."""
        if self._current is not None:
            self._current.left = True
            self.status.set_activity(OUTSIDE)

    def end_step(self) -> None:
        """Count the current step, then carry out what all workers agreed on during it."""
        if self._current is None:
            return
        self.epoch = self._current.complete()
        self._measure(self._current.batch)
        self._current = None
        self.step += 1
        self._divergence.compute(self.step)
        self._snapshots.in_memory.report_step(self.step)
        decision, self._decision = self._decision, Decision()
        if self._snapshots.is_due(self.step) or decision.snapshot_due or self._requested:
            self._take_snapshot()
        if decision.signal or self._is_last():
            self._stop_run(decision.signal)
        if self._snapshots.in_memory.is_due(self.step, agreed=decision.copy_due):
            self._snapshots.save_in_memory(self.step, self._states)

    def end_loop(self) -> None:
        """End a loop, and agree on a signal that arrived after the note of its last step."""
        self.status.set_activity(OUTSIDE)
        self._exchange_notes("ending a loop")
        decision, self._decision = self._decision, Decision()
        if decision.snapshot_due:
            self._take_snapshot()
        if decision.signal:
            self._stop_run(decision.signal)
        self._stop.deferring = False

    def complete_left_step(self) -> None:
        """Count a step that was left by break after an update."""
        if self._current is not None and self._current.left and self._current.updates:
            self._current.batch.load()
            self.end_step()
            self._stop.deferring = False

    def snapshot(self, score: float | None) -> None:
        """Take a snapshot now, or at the end of the current step."""
        self.complete_left_step()
        self._requested, self._score = True, score
        if self._current is None or self._current.left:
            self._take_snapshot()

    def end_run(self) -> None:
        """Take the last snapshot and return when it is complete."""
        self.complete_left_step()
        self._stop.deferring = True
        self._take_snapshot()
        self._finish("finished")
        if self._stop.signal:
            self._stop.exit(self._stop.signal)

    def next_call(self) -> tuple[int, int]:
        """Return the step and the number of this backward call within it."""
        if self._current is None:
            return self.step, 0
        self._current.updates += 1
        return self.step, self._current.updates - 1

    def note(self) -> dict[str, Any]:
        """Return the note that this worker sends with the losses of a step."""
        return {
            "signal": self._stop.signal,
            "snapshot_due": self._snapshots.time_is_up(),
            "copy_due": self._snapshots.in_memory.time_is_up(),
            "seconds": self._seconds,
            "digest": self._divergence.digest,
        }

    def receive(self, notes: list[dict[str, Any]]) -> None:
        """Decide by rank 0's clock and the first signal in all workers' notes.

        Raises `DivergenceError` if the workers' states differ.
        """
        self._divergence.compare([note["digest"] for note in notes])
        signal = next((note["signal"] for note in notes if note["signal"]), 0)
        self._decision = Decision(signal, notes[0]["snapshot_due"], notes[0]["copy_due"])
        if self._seconds:
            self._record.timing(self.step - 1, [note["seconds"] for note in notes])
            self._seconds = {}
        self.status.set_activity(OUTSIDE if self._current is None else BODY)

    def time_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the time of an optimizer's steps."""
        started = 0.0

        def start(*_: Any) -> None:
            nonlocal started
            started = time.perf_counter()

        def stop(*_: Any) -> None:
            self._optimizer_seconds += time.perf_counter() - started

        optimizer.register_step_pre_hook(start)
        optimizer.register_step_post_hook(stop)

    def _measure(self, batch: Batch) -> None:
        lanes = self._lanes
        self._seconds = {
            "data": batch.data_seconds,
            "compute": lanes.compute_seconds,
            "exchange": lanes.exchange_seconds,
            "optimizer": self._optimizer_seconds,
            "snapshot": self._snapshots.stall_seconds,
        }
        lanes.compute_seconds = lanes.exchange_seconds = 0.0
        self._optimizer_seconds = self._snapshots.stall_seconds = 0.0

    def _is_last(self) -> bool:
        return self._config.stop_after is not None and self.step >= self._config.stop_after

    def _stop_run(self, signal: int = 0) -> NoReturn:
        self._take_snapshot()
        self._finish("stopped", signal=signal)
        if signal:
            self._stop.exit(signal)
        raise SystemExit(0)

    def _take_snapshot(self) -> None:
        with self.status.doing("taking a snapshot"):
            self._snapshots.save(self.step, *self._states(), self._score)
        self._requested, self._score = False, None

    def _states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the run's state that is equal on all workers, and this worker's own state."""
        run = {
            "step": self.step,
            "epoch": self.epoch,
            "lanes": self._lanes.lanes,
            "positions": {name: asdict(position) for name, position in self.positions.items()},
        }
        streams = {
            name: {lane: stream.state_dict() for lane, stream in lanes.items()}
            for name, lanes in self.streams.items()
        }
        return {"run": run}, {"streams": streams} if streams else {}

    def _finish(self, event: str, **fields: Any) -> None:
        self._exchange_notes("ending the run")
        self.status.finish()
        self._record.flush()
        self._snapshots.finish()
        self._record.event(event, step=self.step, **fields)

    def _exchange_notes(self, what: str) -> None:
        """Exchange the notes that no later step will carry."""
        self.receive(self._lanes.world.all_gather_json(self.note(), what))
