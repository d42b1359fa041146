"""Where a run stands, and what happens between two of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NoReturn

import torch

from samestep.config import Config
from samestep.data.batch import Batch, LaneStream
from samestep.errors import DataError
from samestep.record import Record
from samestep.run.divergence import DivergenceCheck
from samestep.run.stop import StopRequest
from samestep.snapshot.manager import SnapshotManager
from samestep.snapshot.read import Snapshot
from samestep.step.lane_engine import LaneEngine

NOTHING: Final = (0, False, False)  # no signal came, and neither a snapshot nor a hot copy is due
BODY: Final = "in the body of a loop"
OUTSIDE: Final = "outside of loops"


@dataclass
class Position:
    """Where a loop stands: the next step is `step` of `epoch`; `done` steps were made under its name."""

    epoch: int = 0
    step: int = 0
    done: int = 0
    plan: dict[str, Any] = field(default_factory=dict)

    def advance(self, steps_per_epoch: int | None) -> int:
        """Count one step as done and return the epoch of the next; streams have no epochs (None)."""
        self.done += 1
        self.step += 1
        if self.step == steps_per_epoch:
            self.epoch, self.step = self.epoch + 1, 0
        return self.epoch


@dataclass
class OpenStep:
    """A step whose body runs, or was left by break (`left`) and may count as done once `updates` were made in it."""

    batch: Batch
    complete: Callable[[], int]
    updates: int = 0
    left: bool = False


class Progress:
    """Counts steps, and takes snapshots, passes timings to the record and stops the run at their boundaries.

    What needs all workers' consent (a clock, a signal) travels as a note with the losses of a step,
    so no exchange is made for it.
    """

    def __init__(
        self,
        config: Config,
        record: Record,
        keeper: SnapshotManager,
        stop: StopRequest,
        lanes: LaneEngine,
        divergence: DivergenceCheck,
        resumed: Snapshot | None,
    ) -> None:
        self.step = 0
        self.epoch = 0
        self.positions: dict[str, Position] = {}
        self.streams: dict[str, dict[int, LaneStream]] = {}
        self._optimizer_seconds = 0.0
        self._config, self._record, self._keeper, self._stop, self._lanes = (
            config,
            record,
            keeper,
            stop,
            lanes,
        )
        self._divergence = divergence
        self.status = lanes.world.status
        self._open: OpenStep | None = None
        self._seconds: dict[str, float] = {}
        self._agreed = NOTHING
        self._wanted = False
        self._score: float | None = None
        if resumed is not None:
            state = resumed.state["run"]
            self.step, self.epoch = state["step"], state["epoch"]
            self.status.step = self.step
            self.positions = {
                name: Position(**position) for name, position in state["positions"].items()
            }

    @property
    def between_steps(self) -> bool:
        """Tell whether no step's body runs."""
        return self._open is None

    def begin_loop(
        self,
        name: str,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        samples: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Record that a loop starts: how many steps it has (with those before a resume), where that is known, and of what."""
        at = self.positions[name]
        planned = {
            "steps": steps,
            "epochs": epochs,
            "steps_per_epoch": steps_per_epoch,
            "samples": samples,
            "batch_size": batch_size,
        }
        self._record.event(
            "loop", name=name, step=self.step, epoch=at.epoch, done=at.done, **planned
        )

    def begin_step(self, batch: Batch, complete: Callable[[], int]) -> None:
        """Say that the body of a loop starts on a batch; `complete` moves the loop's position on and returns the epoch there.

        Raises `DataError` in the body of another loop.
        """
        if self._open is not None and not self._open.left:
            raise DataError(
                "a batch was taken from one loop in the body of another; expected one loop at a time, since every batch is a step: "
                "put what a step needs into one data set or stream"
            )
        if self._is_last(self.step):
            self._stop_here()
        self.epoch = batch.epoch
        self._open = OpenStep(batch, complete)
        self.status.step = self.step
        self.status.set_activity(BODY)
        self._stop.deferring = self._keeper.is_enabled

    def leave_loop(self) -> None:
        """Say that the body was left by break, return or an exception; which of them, nobody knows yet."""
        if self._open is not None:
            self._open.left = True
            self.status.set_activity(OUTSIDE)

    def end_step(self) -> None:
        """Say that the body came to its end: the boundary between two steps."""
        if self._open is None:
            return
        self.epoch = self._open.complete()
        self._note_seconds(self._open.batch)
        self._open = None
        self.step += 1
        self._divergence.take(self.step)
        self._keeper.in_memory.report_step(self.step)
        (signal, due, hot), self._agreed = self._agreed, NOTHING
        if self._keeper.is_due(self.step) or due or self._wanted:
            self._keep()
        if signal or self._is_last(self.step):
            self._stop_here(signal)
        if self._keeper.in_memory.is_due(self.step, agreed=hot):
            self._keeper.save_in_memory(self.step, self._states)

    def end_loop(self) -> None:
        """Say that a loop has no more steps. A signal that came too late for the last one's note is agreed upon here."""
        self.status.set_activity(OUTSIDE)
        self._exchange_notes("ending a loop")
        (signal, due, _), self._agreed = self._agreed, NOTHING
        if due:
            self._keep()
        if signal:
            self._stop_here(signal)
        self._stop.deferring = False

    def settle(self) -> None:
        """Count a step that was left by break after an update as done."""
        if self._open is not None and self._open.left and self._open.updates:
            self._open.batch.load()
            self.end_step()
            self._stop.deferring = False

    def snapshot(self, score: float | None) -> None:
        """Take a snapshot now, or at the end of the step whose body runs."""
        self.settle()
        self._wanted, self._score = True, score
        if self._open is None or self._open.left:
            self._keep()

    def end_run(self) -> None:
        """Keep the last step; returns when its snapshot is whole."""
        self.settle()
        self._stop.deferring = True
        self._keep()
        self._finish("finished")
        if self._stop.received:
            self._stop.act(self._stop.received)

    def next_call(self) -> tuple[int, int]:
        """Return what numbers a backward call within the run: the step, and how many came before in it."""
        number = 0
        if self._open is not None:
            number = self._open.updates
            self._open.updates += 1
        return self.step, number

    def note(self) -> dict[str, Any]:
        """Return what this worker tells the others with a step's losses."""
        return {
            "stop": self._stop.received,
            "due": self._keeper.time_is_up(),
            "hot": self._keeper.in_memory.time_is_up(),
            "seconds": self._seconds,
            "digest": self._divergence.digest,
        }

    def agree(self, notes: list[dict[str, Any]]) -> None:
        """Take what all workers told; rank 0's clock decides, and the first signal does. Raises `DivergenceError` where states differ."""
        self._divergence.compare([note["digest"] for note in notes])
        self._agreed = (
            next((note["stop"] for note in notes if note["stop"]), 0),
            notes[0]["due"],
            notes[0]["hot"],
        )
        if self._seconds:
            self._record.timing(self.step - 1, [note["seconds"] for note in notes])
            self._seconds = {}
        self.status.set_activity(BODY if self._open is not None else OUTSIDE)

    def time_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the time of an optimizer's steps count as such."""
        started = 0.0

        def start(*_: Any) -> None:
            nonlocal started
            started = time.perf_counter()

        def stop(*_: Any) -> None:
            self._optimizer_seconds += time.perf_counter() - started

        optimizer.register_step_pre_hook(start)
        optimizer.register_step_post_hook(stop)

    def _note_seconds(self, batch: Batch) -> None:
        lanes = self._lanes
        self._seconds = {
            "data": batch.data_seconds,
            "compute": lanes.compute_seconds,
            "exchange": lanes.exchange_seconds,
            "optimizer": self._optimizer_seconds,
            "snapshot": self._keeper.stall_seconds,
        }
        lanes.compute_seconds = lanes.exchange_seconds = self._optimizer_seconds = (
            self._keeper.stall_seconds
        ) = 0.0

    def _is_last(self, step: int) -> bool:
        return self._config.stop_after is not None and step >= self._config.stop_after

    def _stop_here(self, signal: int = 0) -> NoReturn:
        self._keep()
        self._finish("stopped", signal=signal)
        if signal:
            self._stop.act(signal)
        raise SystemExit(0)

    def _keep(self) -> None:
        with self.status.doing("taking a snapshot"):
            self._keeper.save(self.step, *self._states(), self._score)
        self._wanted, self._score = False, None

    def _states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what of the run's own state all workers hold alike, and what this one holds of the rest."""
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
        self._keeper.finish()
        self._record.event(event, step=self.step, **fields)

    def _exchange_notes(self, what: str) -> None:
        """Exchange the notes that no later step will carry."""
        self.agree(self._lanes.world.all_gather_json(self.note(), what))
