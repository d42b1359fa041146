"""Losses that are not finite or unusually high: alerts about them, and steps that they skip."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from samestep.config import Config
from samestep.data.batch import Batch
from samestep.errors import NonFiniteLossError
from samestep.masking import mask_words
from samestep.record import Record
from samestep.run.process import announce
from samestep.step.finite import Nonfinite
from samestep.step.lane_pass import LaneResult
from samestep.step.lane_results import worst_of

WARM_UP: Final = 20  # steps before which no loss is unusual
WINDOW: Final = 100  # steps of the moving averages
UNUSUAL: Final = 20.0  # mean deviations above the mean
LEAST_DEVIATION: Final = 0.01  # of the mean, for losses that hardly change
QUIET_STEPS: Final = 1000  # between two alerts of unusual losses
SHOWN_SAMPLES: Final = 4
MOST_SAMPLES: Final = 64
MOST_SKIPPED: Final = 100  # steps in a row


class Usual:
    """The moving average of a loss, of which an unusual one counts only up to its limit.

    `limit` is the highest loss that is not unusual.
    """

    def __init__(self, steps: int = 0, mean: float = 0.0, deviation: float = 0.0) -> None:
        self.steps, self.mean, self.deviation = steps, mean, deviation
        self._alert = ""  # of the last step
        self._update_limit()

    def _update_limit(self) -> None:
        self.limit = math.inf
        if self.steps >= WARM_UP:
            least = LEAST_DEVIATION * abs(self.mean)
            self.limit = self.mean + UNUSUAL * max(self.deviation, least)

    def is_new(self, alert: str) -> bool:
        """Note the alert of a step, "" for none; return whether the step before had another."""
        before, self._alert = self._alert, alert
        return alert not in {"", before}

    def add(self, loss: float) -> None:
        """Count a finite loss."""
        self.steps += 1
        rate = 1 / self.steps if self.steps < WINDOW else 1 / WINDOW
        difference = min(loss, self.limit) - self.mean
        if self.steps > 1:
            self.deviation += rate * (abs(difference) - self.deviation)
        self.mean += rate * difference
        self._update_limit()


class LossAlerts:
    """Compares the highest loss of all lanes with those of earlier steps.

    All workers see the same losses. Rank 0 records and prints an alert, and calls
    `keep_snapshot(text)`, so that `samestep replay` can begin there.
    """

    def __init__(
        self,
        record: Record,
        config: Config,
        keep_snapshot: Callable[[str], object],
        *,
        is_main: bool,
    ) -> None:
        self._record, self._config, self._keep_snapshot = record, config, keep_snapshot
        self._is_main = is_main
        self._usual: dict[int, Usual] = {}  # by call in a step, such as those of a GAN
        self._last = -QUIET_STEPS

    def state_dict(self) -> dict[int, list[float]]:
        """Return the averages, by call in a step; the same on all workers."""
        return {
            number: [usual.steps, usual.mean, usual.deviation]
            for number, usual in self._usual.items()
        }

    def load_state_dict(self, state: Mapping[int, Sequence[float]]) -> None:
        """Continue with averages that `state_dict` returned."""
        for number, (steps, mean, deviation) in state.items():
            self._usual[number] = Usual(int(steps), mean, deviation)

    def look(
        self,
        batch: Batch,
        call: tuple[int, int],
        results: Sequence[LaneResult],
        *,
        are_sums: bool,
        is_shared: bool = False,
    ) -> str:
        """Look at the losses of a call; return a text that names lane and samples after an alert.

        `call` is the step and the number of the call in it. Sums are divided by the lane's items. A
        loss that `is_shared` by all lanes is that of the whole batch, so it blames no lane.
        """
        step, number = call
        config = self._config
        if not results or (config.skip_batches and config.skips(step)):
            return ""
        losses: list[float] = [lane.metrics["loss"] for lane in results]
        if are_sums:
            losses = [loss / (lane.count or 1) for loss, lane in zip(losses, results, strict=True)]
        if (usual := self._usual.get(number)) is None:
            usual = self._usual[number] = Usual()
        if math.isfinite(sum(losses)) and (loss := max(losses)) <= usual.limit:  # nearly always
            usual.is_new("")
            usual.add(loss)
            return ""
        number_of_worst = worst_of(losses)
        loss, worst = losses[number_of_worst], results[number_of_worst]
        mean, blamed = usual.mean, None if is_shared else worst
        if not math.isfinite(loss):
            is_new = usual.is_new("nonfinite")
            return self._alert(batch, call, blamed, loss, results, None) if is_new else ""
        is_new = usual.is_new("unusual" if loss > usual.limit else "")
        is_new = is_new and step >= self._last + QUIET_STEPS
        usual.add(loss)
        if not is_new or self._config.precision == "float16":  # a scaler changes losses
            return ""
        self._last = step
        return self._alert(batch, call, blamed, loss, results, mean)

    def note_gradient(
        self,
        batch: Batch,
        call: tuple[int, int],
        results: Sequence[LaneResult],
        nonfinite: Nonfinite,
    ) -> str:
        """Do what `look` does about a gradient that is not finite, perhaps of the last step."""
        if not self._usual.setdefault(call[1], Usual()).is_new("gradient"):
            return ""
        blamed = None
        if nonfinite.step == call[0]:  # the batch is not that of an earlier step
            blamed = next((lane for lane in results if lane.lane == nonfinite.lane), None)
        call = nonfinite.step, call[1]
        loss = None if blamed is None else blamed.metrics["loss"]
        return self._alert(batch, call, blamed, loss, results, None, nonfinite.reason)

    def _alert(
        self,
        batch: Batch,
        call: tuple[int, int],
        blamed: LaneResult | None,
        loss: float | None,
        results: Sequence[LaneResult],
        usual: float | None,
        reason: str = "",
    ) -> str:
        """Record an alert, and return the samples of the lane and how to look at them."""
        (step, number), origin = call, batch.origin
        lane, worker = (None, None) if blamed is None else (blamed.lane, blamed.rank)
        samples = [] if origin is None or lane is None else origin.describe(lane)
        advice = ""
        if samples:
            more = f" and {len(samples) - SHOWN_SAMPLES} more" * (len(samples) > SHOWN_SAMPLES)
            advice = f"its samples are {', '.join(samples[:SHOWN_SAMPLES])}{more}"
        command = ""
        if self._config.dir is not None:
            command = replay_command(self._config.dir, step)
            advice += f"{'; ' * bool(advice)}to look at it: {command}"
        if not self._is_main:
            return advice
        place = "of the whole batch" if lane is None else f"in lane {lane}"
        reason = reason or f"the loss is {loss:.6g} at step {step} {place}"
        if usual is not None:
            reason += f", usually about {usual:.6g}"
        self._record.event(
            "loss_alert",
            step=step,
            call=number,
            reason=reason,
            lane=lane,
            worker=worker,
            loss=loss,
            **({} if origin is None else {"loop": origin.loop}),
            samples=samples[:MOST_SAMPLES],
            losses=[[lane.lane, lane.metrics["loss"]] for lane in results],
            replay=command,
        )
        self._keep_snapshot(reason)
        if usual is not None:
            announce(f"{reason}; {advice}" if advice else reason, logging.WARNING)
        return advice


class SkippedSteps:
    """The steps with a batch of which no gradient was used; `steps` are the same on all workers.

    The state of the run has them, so a resumed run knows of them as well.
    """

    def __init__(self, config: Config, record: Record, steps: Iterable[int], is_main: bool) -> None:
        self.steps = list(steps)
        self._config, self._record, self._is_main = config, record, is_main

    def add(self, step: int, reason: str) -> None:
        """Note that a batch of a step was skipped: its position counts, but gives no gradient.

        Raises `NonFiniteLossError` if too many steps in a row were skipped.
        """
        if step in self.steps[-1:]:
            return
        self.steps.append(step)
        self._record.event("batch_skipped", step=step, reason=reason)
        in_a_row, left_out = range(step - MOST_SKIPPED + 1, step + 1), self._config.skips
        follows = left_out(step) and left_out(step - 1) and step - 1 in self.steps[-2:]
        if self._is_main and not follows:  # one line for a range of skip_batches
            announce(f"skipped a batch: {reason}", logging.WARNING)
        if self.steps[-MOST_SKIPPED:] == [*in_a_row] and not any(map(left_out, in_a_row)):
            raise NonFiniteLossError(
                f"{MOST_SKIPPED} steps in a row were skipped, the last one because {reason}; if the"
                " parameters are not finite either, resume from an earlier snapshot with a lower"
                " learning rate"
            )


def replay_command(directory: Path, step: int) -> str:
    """Return the command that repeats a step of this process's script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    script = ["-m", spec.name] if spec is not None else [os.path.relpath(sys.argv[0] or "SCRIPT")]
    if spec is not None:
        script[1] = script[1].removesuffix(".__main__")
    words = ["samestep", "replay", str(directory), "--step", str(step), *script]
    return shlex.join([*words, *mask_words(sys.argv[1:])])
