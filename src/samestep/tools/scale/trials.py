"""Trial runs of a script, with the workload, timing and peak memory that each run shows."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from samestep.errors import LaunchError, RecordError
from samestep.host import counted
from samestep.record import read_events
from samestep.snapshot.manifest import Manifest
from samestep.snapshot.read import inspect
from samestep.tools import first_failure, read_run, started
from samestep.tools.scale.timing import StepTiming, max_lanes_per_worker, read_timing

POLL_SECONDS: Final = 0.02
VISIBLE_GROWTH: Final = 0.02  # of a worker's memory: less may be noise of the allocator
_OPTIMIZER_TENSOR: Final = re.compile(r"(?P<optimizer>.+)/state/(?P<index>\d+)/[^/]+")
_PEAK_MEMORY: Final = re.compile(r"(?m)^VmHWM:\s*(\d+) kB")  # resident, since the fork


@dataclass(frozen=True)
class Workload:
    """The properties of a script that are the same in all runs.

    Trained parameters have `nbytes`. The global `batch_size` is None for streams. `threads` are per
    worker.
    """

    lanes: int
    nbytes: int
    batch_size: int | None
    device: str
    threads: int


@dataclass(frozen=True)
class Trial:
    """One run: its timing, and the highest memory of any worker in bytes."""

    workers: int
    timing: StepTiming
    peak_bytes: int
    workload: Workload


class TrialRunner:
    """Runs a script in new directories. The first run sets the lanes of all if `lanes` is None."""

    def __init__(self, command: Sequence[str], steps: int, lanes: int | None) -> None:
        self.lanes = lanes
        self._command, self._steps = list(command), steps

    def run(self, workers: int, lanes: int | None = None) -> Trial:
        """Run the script, with `lanes` or those of all runs.

        Raises `LaunchError` if the script fails, and `RecordError` if its record is incomplete.
        """
        with TemporaryDirectory(prefix="samestep-scale-") as name:
            directory = Path(name)
            peak_bytes = self._run(workers, directory, lanes or self.lanes)
            events, snapshot = read_run(directory)
            workload = read_workload(events, inspect(snapshot))
            if self.lanes is None:
                self.lanes = workload.lanes
            if workload.lanes != (lanes or self.lanes):
                counts = f"{self.lanes} and {workload.lanes}; set it in the script or with --lanes"
                raise LaunchError(f"all runs must have the same number of lanes, got {counts}")
            return Trial(workers, read_timing(events), peak_bytes, workload)

    def _run(self, workers: int, directory: Path, lanes: int | None) -> int:
        flags = ["--resume=never", f"--stop-after={self._steps}"]
        flags += [] if lanes is None else [f"--lanes={lanes}"]
        size = counted(workers, "worker")
        with_lanes = "" if lanes is None else f" with {lanes} lanes"
        sys.stderr.write(f"running {size}{with_lanes} …\n")
        with started(self._command, workers, directory, flags) as process:
            peak_bytes = _wait_and_measure(process, directory)
        if status := process.returncode:
            text = f"the script failed with {size}, status {status}:\n{first_failure(directory)}"
            raise LaunchError(text)
        return peak_bytes


def _wait_and_measure(process: subprocess.Popen[bytes], directory: Path) -> int:
    """Wait until a run ends; return the highest memory of any worker, in bytes.

    The kernel records the peak, so only an increase just before a worker exits can be missed.
    """
    workers: list[int] = []
    highest = 0
    while process.poll() is None:
        workers = workers or _worker_pids(directory)
        highest = max([highest, *map(_peak_bytes, workers)])
        time.sleep(POLL_SECONDS)
    return highest


def _worker_pids(directory: Path) -> list[int]:
    with suppress(RecordError):  # the run has not started yet
        starts = [event for event in read_events(directory) if event["event"] == "started"]
        return [worker["pid"] for start in starts for worker in start["workers"]]
    return []


def _peak_bytes(pid: int) -> int:
    try:
        match = _PEAK_MEMORY.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:  # the worker has exited
        return 0
    return 1024 * int(match[1]) if match else 0


def read_workload(events: Sequence[Mapping[str, Any]], manifest: Manifest) -> Workload:
    """Return the workload of a run from its events and the manifest of its last snapshot."""
    start = next(event for event in events if event["event"] in {"started", "resumed"})
    loops = [event for event in events if event["event"] == "loop" and event.get("batch_size")]
    return Workload(
        start["lanes"],
        parameter_bytes(manifest),
        loops[-1]["batch_size"] if loops else None,
        str(start["devices"][0]).partition(":")[0],
        start["config"]["threads"],
    )


def parameter_bytes(manifest: Manifest) -> int:
    """Return the bytes of the trained parameters: those with optimizer state.

    If there are none, all floating-point tensors of the first tracked object that has tensors.
    """
    specs = manifest.specs
    optimizers: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, spec in specs.items():
        if (match := _OPTIMIZER_TENSOR.fullmatch(name)) and spec.shape:
            optimizers[match["optimizer"]][int(match["index"])].append(name)
    if not optimizers:
        tracked = [f"{name}/" for name, _ in manifest.state["dict"]]
        groups = [[spec for name, spec in specs.items() if name.startswith(s)] for s in tracked]
        first = next(filter(None, groups), [])
        return sum(spec.nbytes for spec in first if spec.dtype.is_floating_point)
    # one tensor for each parameter of each optimizer
    return sum(
        specs[min(names)].nbytes for state in optimizers.values() for names in state.values()
    )


@dataclass(frozen=True)
class MemoryModel:
    """The peak memory of a worker in bytes: `fixed`, plus `per_sample` of the lane batch."""

    fixed: float
    per_sample: float

    def largest_lane_batch(self, available: float) -> int:
        """Return the samples per lane that fit `available` bytes per worker, 0 if none do."""
        return max(0, math.floor((available - self.fixed) / self.per_sample))


def fit_memory(trial: Trial, with_more_lanes: Trial) -> MemoryModel | None:
    """Return the line through two runs with the same batch size, None if noise hides it.

    A negative intercept also counts as noise.

    Partial sums of gradients, one for each level of a worker's tree, are subtracted.
    """
    batch_size = trial.workload.batch_size
    if batch_size is None:
        return None
    lane_counts = (trial.workload.lanes, with_more_lanes.workload.lanes)
    samples, fewer = (-(-batch_size // lanes) for lanes in lane_counts)
    growth = _bytes_without_sums(trial) - _bytes_without_sums(with_more_lanes)
    if samples == fewer or growth < VISIBLE_GROWTH * trial.peak_bytes:
        return None
    per_sample = growth / (samples - fewer)
    fixed = trial.peak_bytes - samples * per_sample
    return MemoryModel(fixed, per_sample) if fixed > 0 else None


def _bytes_without_sums(trial: Trial) -> int:
    lanes = max_lanes_per_worker(trial.workload.lanes, trial.workers)
    return trial.peak_bytes - trial.workload.nbytes * (lanes - 1).bit_length()
