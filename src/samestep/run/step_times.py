"""What a step took, and the learning rates and norms of its update, for the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from samestep.plugin import EndedStep, RunPlugin
from samestep.record.record import OWN, Record
from samestep.snapshot.manager import SnapshotManager
from samestep.step.lane_engine import LaneEngine
from samestep.step.scaling import on_host


class StepTimes(RunPlugin):
    """Measures each step; the notes of the next one carry the seconds to all workers."""

    def __init__(
        self,
        record: Record,
        snapshots: SnapshotManager,
        lanes: LaneEngine,
        evaluating: Callable[..., object] = lambda *_: None,
    ) -> None:
        """Call `evaluating` before each evaluation, and after it with its seconds."""
        self._record, self._snapshots, self._lanes = record, snapshots, lanes
        self._evaluating = evaluating
        self._status = lanes.world.status
        self._measured: tuple[float, float] | None = None  # time and waits at the last measurement
        self._optimizer_seconds = 0.0
        self._loop_seconds: dict[str, float] = {}  # of the step's "evaluation" and "logging"
        self._rates: dict[str, float] = {}  # newest learning rates, by optimizer
        self._updates: dict[str, Any] = {}  # of the current step
        # of the step before, until it is recorded
        self._seconds: dict[str, float] = {}
        self._ended_updates: dict[str, Any] = {}
        self._gpu_seconds: Callable[[], dict[str, float]] = dict  # replace those of the host

    def watch(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Measure the time of an optimizer's steps, and note changes of its learning rate."""
        clock, started, begun = self._lanes.gpu_clock, 0.0, None

        def start(*_: Any) -> None:
            nonlocal started, begun
            started, begun = time.perf_counter(), clock.mark()
            rate = _learning_rate(optimizer)
            if rate is not None and rate != self._rates.get(name):
                self._rates[name] = rate
                self._updates.setdefault("rates", {})[name] = rate

        def stop(*_: Any) -> None:
            self._optimizer_seconds += time.perf_counter() - started
            clock.add("optimizer", begun, clock.mark())

        optimizer.register_step_pre_hook(start)
        optimizer.register_step_post_hook(stop)

    def add_norm(self, norm: torch.Tensor, max_norm: float) -> None:
        """Note the norm of this step's gradients before they were clipped."""
        self._updates.setdefault("norms", []).append((on_host(norm), max_norm))

    @contextmanager
    def measuring(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to a part of the step, "evaluation" or "logging"."""
        started = time.perf_counter()
        if part == "evaluation":
            self._evaluating()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._loop_seconds[part] = self._loop_seconds.get(part, 0.0) + seconds
            if part == "evaluation":
                self._evaluating(seconds)

    def begin_step(self, step: int) -> None:
        """Start the clock with the first step."""
        self._measured = self._measured or (time.monotonic(), self._status.waited)

    def end_step(self, ended: EndedStep) -> None:
        """Measure the step."""
        now = (time.monotonic(), self._status.waited)
        began, waited = self._measured or now
        self._measured = now
        self._seconds = {
            "data": ended.batch.data_seconds,
            **self._lanes.take_seconds(),
            "optimizer": self._optimizer_seconds,
            "snapshot": self._snapshots.take_stall_seconds(),
            **self._loop_seconds,
            OWN: now[0] - began - (now[1] - waited),  # without the waits for other workers
        }
        self._gpu_seconds = self._lanes.gpu_clock.take()
        self._optimizer_seconds, self._loop_seconds = 0.0, {}
        self._ended_updates, self._updates = self._updates, {}

    def note(self) -> dict[str, float]:
        """Return this worker's seconds in each phase of the step before; none twice."""
        return {**self._seconds, **self._gpu_seconds()}

    def receive(self, step: int, notes: Sequence[Any]) -> None:
        """Record the seconds of all workers in the step before `step`, once."""
        if not self._seconds:
            return
        updates, self._ended_updates = self._ended_updates, {}
        if "norms" in updates:
            updates["norms"] = [[float(norm), limit] for norm, limit in updates["norms"]]
        self._record.timing(step - 1, notes, updates)
        self._seconds, self._gpu_seconds = {}, dict


def _learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the largest learning rate of an optimizer's groups, None if a GPU has one of them."""
    largest = None
    for group in optimizer.param_groups:
        rate: Any = group.get("lr")
        if type(rate) is not float:  # in every step: a test of the type Tensor takes longer
            if rate is None or (isinstance(rate, torch.Tensor) and not rate.is_cpu):
                return None
            rate = float(rate)
        if largest is None or rate > largest:
            largest = rate
    return largest
