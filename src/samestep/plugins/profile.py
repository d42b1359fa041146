"""A trace of a few steps by torch.profiler, for Perfetto and Chrome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from torch.profiler import ProfilerActivity, profile, record_function

from samestep.plugin import EndedStep, RunPlugin
from samestep.record import Record

FOLDER: Final = "profiles"  # in the directory of the run


class Profile(RunPlugin):
    """Traces `steps` of this worker, with all that happens between them, and writes one file.

    A start that makes only some of these steps traces those. The name of the file, and the event
    `profiled` in the record, say which.
    """

    def __init__(
        self,
        steps: range,
        directory: Path,
        rank: int,
        record: Record,
        say: Callable[[str], object],
        *,
        on_cuda: bool,
    ) -> None:
        """Only rank 0 has a `record` that is written, and `say` prints nothing on others."""
        self._steps, self._directory, self._rank = steps, directory, rank
        self._record, self._say = record, say
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        self._profiler: profile | None = None
        self._mark: record_function | None = None  # of the current step, in the trace
        self._first: int | None = None  # step of the trace
        self._step = 0

    def begin_step(self, step: int) -> None:
        """Start with the first of the steps that this start makes."""
        self._step = step
        if self._first is None and step in self._steps:
            self._first = step
            self._profiler = profile(activities=self._activities, acc_events=True)
            self._profiler.start()
        self._end_mark()  # of a step that was left early
        if self._profiler is not None:
            self._mark = record_function(f"step {step}")
            self._mark.__enter__()

    def end_step(self, ended: EndedStep) -> None:
        """Write the trace after the last of the steps."""
        self._end_mark()
        self._step = ended.step
        if ended.step >= self._steps.stop:
            self._write()

    def end(self) -> None:
        """Write what was traced of a run that ends within the steps; say if there was nothing."""
        self._end_mark()
        self._write()
        if self._first is None:
            asked = f"{self._steps.start}:{self._steps.stop}"
            self._say(f"nothing was traced: this start made none of the steps profile={asked}")

    def close(self) -> None:
        """Stop a trace that an error has ended, without writing it."""
        self._end_mark()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _write(self) -> None:
        profiler = self._profiler
        if profiler is None:
            return
        self.close()
        name = f"{FOLDER}/step-{self._first}-{self._step}-rank-{self._rank}.json.gz"
        path = self._directory / name
        try:
            path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:  # the run does not need it
            self._say(f"the trace {path} cannot be written: {error}")
            return
        self._record.event("profiled", step=self._step, first=self._first, file=name)
        self._say(f"traced steps {self._first} to {self._step - 1}: open {path} in Perfetto")
