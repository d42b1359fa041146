"""A script that is run at several numbers of workers, and what its record and snapshot tell of each run."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import LaunchError, RecordError
from samestep.record import read_events
from samestep.snapshot.read import inspect, list_snapshots
from samestep.snapshot.state import no_tensor, restore
from samestep.step.layout import Layout
from samestep.tools.job import start_run
from samestep.tools.scale.peak import watch
from samestep.tools.scale.timing import read_timing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from samestep.snapshot.manifest import Manifest
    from samestep.tools.scale.timing import Timing

SHOWN_LINES: Final = 30
# of a tensor in an optimizer's state_dict
_STATE: Final = re.compile(r"(?P<optimizer>.+)/state/(?P<index>\d+)/[^/]+")
_LINE_OF_WORKER: Final = re.compile(
    r"^(samestep: error: )?(?=worker \d+ failed first: )", re.MULTILINE
)


@dataclass(frozen=True)
class Job:
    """What all runs of a job have alike: `nbytes` of parameters, the global `batch_size` (None of streams), the device, threads a worker.

    `sharded` is None where one worker alone could not tell.
    """

    lanes: int
    nbytes: int
    batch_size: int | None
    device: str
    threads: int
    sharded: bool | None


@dataclass(frozen=True)
class Trial:
    """One run: its timing, and the highest memory of a worker in bytes."""

    workers: int
    timing: Timing
    peak_bytes: int
    job: Job


class Trials:
    """Runs a script for some steps, each time in a directory of its own. The first run settles the lanes of all."""

    def __init__(self, command: Sequence[str], steps: int, lanes: int | None) -> None:
        self.lanes = lanes
        self._command, self._steps = list(command), steps

    def run(self, workers: int, lanes: int | None = None) -> Trial:
        """Run the script at so many workers, with the lanes of all runs or others.

        Raises `LaunchError` where the script fails, and `RecordError` where its record does not
        tell enough.
        """
        with tempfile.TemporaryDirectory(prefix="samestep-scale-") as name:
            directory = Path(name)
            peak_bytes = self._start(workers, directory, lanes or self.lanes)
            events = started_events(directory)
            job = job_of(events, last_manifest(directory))
            if self.lanes is None:
                self.lanes = job.lanes
            if job.lanes != (lanes or self.lanes):
                raise LaunchError(
                    f"the runs had {self.lanes} and {job.lanes} lanes; expected the same: fix them in the script or by --lanes"
                )
            return Trial(workers, read_timing(events), peak_bytes, job)

    def _start(self, workers: int, directory: Path, lanes: int | None) -> int:
        """Run the script to its end; return the highest memory of a worker, in bytes."""
        flags = [
            "--resume",
            "never",
            "--stop-after",
            str(self._steps),
            *(() if lanes is None else ("--lanes", str(lanes))),
        ]
        sys.stderr.write(
            f"running {workers} worker{'s' * (workers > 1)}{'' if lanes is None else f' with {lanes} lanes'} …\n"
        )
        output = directory / "output.txt"
        process = start_run(self._command, workers, directory, output, flags)
        try:
            peak_bytes = watch(process, directory)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode != 0:
            told = output.read_text(errors="replace")
            raise LaunchError(
                f"the script failed with {workers} worker{'s' * (workers > 1)}, status {process.returncode}:\n{_first_failure(told)}"
            )
        return peak_bytes


def job_of(events: Iterable[Mapping[str, Any]], manifest: Manifest) -> Job:
    """Return what a run's record and its last snapshot tell of the job. Raises `RecordError`."""
    events = list(events)
    start = next(event for event in events if event["event"] in {"started", "resumed"})
    loops = [
        event["batch_size"]
        for event in events
        if event["event"] == "loop" and event.get("batch_size")
    ]
    nbytes, sharded = parameters_of(manifest)
    workers = len(start["workers"])
    device = str(start["devices"][0]).partition(":")[0]
    batch_size = loops[-1] if loops else _batch_size(manifest)
    return Job(
        start["lanes"],
        nbytes,
        batch_size,
        device,
        start["config"]["threads"],
        sharded if workers > 1 else None,
    )


def parameters_of(manifest: Manifest) -> tuple[int, bool]:
    """Return the bytes of the parameters that are trained, and whether their optimizer's state was cut as `run.shard` cuts it.

    Parameters are those that an optimizer keeps something of; without any, all floating-point
    tensors of what was tracked first.
    """
    optimizers: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, form in manifest.specs.items():
        if (match := _STATE.fullmatch(name)) and form.shape:
            optimizers[match["optimizer"]][int(match["index"])].append(name)
    if not optimizers:
        first = next(
            (
                name
                for name, _ in manifest.state["dict"]
                if any(form.startswith(f"{name}/") for form in manifest.specs)
            ),
            None,
        )
        forms = [
            form
            for name, form in manifest.specs.items()
            if name.startswith(f"{first}/") and form.dtype.is_floating_point
        ]
        return sum(form.nbytes for form in forms), False
    firsts = [
        [min(names) for _, names in sorted(by_index.items())] for by_index in optimizers.values()
    ]
    nbytes = sum(manifest.specs[name].nbytes for names in firsts for name in names)
    return nbytes, any(_is_sharded(manifest, names) for names in firsts)


def _is_sharded(manifest: Manifest, names: Sequence[str]) -> bool:
    layout = Layout(tuple(manifest.specs[name].elements for name in names), manifest.workers)
    cut = {
        (index, piece.start, piece.stop)
        for index, name in enumerate(names)
        for piece in manifest.pieces[name]
    }
    return cut == {
        (piece.index, piece.start, piece.stop)
        for rank in range(manifest.workers)
        for piece in layout.pieces(rank)
    }


def _batch_size(manifest: Manifest) -> int | None:
    """Return the global batch size of the loop that the snapshot was taken in; None of streams."""
    run: dict[str, Any] = next(
        (restore(part, no_tensor) for name, part in manifest.state["dict"] if name == "run"),
        {"positions": {}},
    )
    sizes = [
        position["plan"]["batch_size"]
        for position in run["positions"].values()
        if "batch_size" in position["plan"]
    ]
    return sizes[-1] if sizes else None


def started_events(directory: Path) -> list[dict[str, Any]]:
    """Return the events of a run. Raises `RecordError` where none was started."""
    try:
        events = list(read_events(directory))
    except RecordError:
        events = []
    if not any(event["event"] == "started" for event in events):
        raise RecordError("the script started no run: it never called samestep.init")
    return events


def last_manifest(directory: Path) -> Manifest:
    """Return the manifest of the newest snapshot. Raises `RecordError` where there is none."""
    snapshots = list_snapshots(directory)
    if not snapshots:
        raise RecordError(
            "the script left no snapshot: it must track its model and optimizer (run.track) and train at least a step"
        )
    return inspect(snapshots[-1])


def _first_failure(output: str) -> str:
    """Return what the launcher told last of the worker that failed first; without that, the last lines."""
    starts = [match.end() for match in _LINE_OF_WORKER.finditer(output)]
    return "\n".join(output[starts[-1] if starts else 0 :].strip().splitlines()[-SHOWN_LINES:])
