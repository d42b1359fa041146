"""Trial runs of a script, with the workload and timing that each run shows."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.errors import LaunchError
from samestep.host import counted
from samestep.tools import first_failure, read_run, started
from samestep.tools.scale.timing import StepTiming, read_timing


@dataclass(frozen=True)
class Workload:
    """The properties of a script that are the same in all runs.

    The global `batch_size` is None for streams. `threads` are per worker.
    """

    lanes: int
    batch_size: int | None
    device: str
    threads: int


class TrialRunner:
    """Runs a script in new directories; `workload` is that of the newest run.

    The first run sets the lanes of all if `lanes` is None.
    """

    workload: Workload

    def __init__(self, command: Sequence[str], steps: int, lanes: int | None) -> None:
        self._command, self._steps, self._lanes = list(command), steps, lanes

    def run(self, workers: int) -> StepTiming:
        """Run the script.

        Raises `LaunchError` if the script fails, and `RecordError` if its record is incomplete.
        """
        flags = ["--resume=never", f"--stop-after={self._steps}"]
        flags += [] if self._lanes is None else [f"--lanes={self._lanes}"]
        size = counted(workers, "worker")
        sys.stderr.write(f"running {size} …\n")
        with TemporaryDirectory(prefix="samestep-scale-") as name:
            directory = Path(name)
            with started(self._command, workers, directory, flags) as process:
                status = process.wait()
            if status:
                failure = first_failure(directory)
                raise LaunchError(f"the script failed with {size}, status {status}:\n{failure}")
            events = read_run(directory)
        self.workload = read_workload(events)
        lanes, self._lanes = self.workload.lanes, self._lanes or self.workload.lanes
        if lanes != self._lanes:
            counts = f"{self._lanes} and {lanes}; set it in the script or with --lanes"
            raise LaunchError(f"all runs must have the same number of lanes, got {counts}")
        return read_timing(events)


def read_workload(events: Sequence[Mapping[str, Any]]) -> Workload:
    """Return the workload of a run from its events."""
    start = next(event for event in events if event["event"] in {"started", "resumed"})
    loops = [event for event in events if event["event"] == "loop" and event.get("batch_size")]
    return Workload(
        start["lanes"],
        loops[-1]["batch_size"] if loops else None,
        str(start["devices"][0]).partition(":")[0],
        start["config"]["threads"],
    )
