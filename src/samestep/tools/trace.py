"""Run a script for a few steps, and hash the state and metrics after each step."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, NoReturn

import torch

from samestep.data.generators import OBSERVED
from samestep.data.loader import LOADERS
from samestep.errors import RecordError, VerifyError
from samestep.plugins.observer import END, KILL
from samestep.record.source import STARTS
from samestep.snapshot.digest import sorted_plain
from samestep.snapshot.manager import RESERVED
from samestep.snapshot.read import list_snapshots, load
from samestep.snapshot.state import flatten
from samestep.tools import differing, first_failure, read_run, started
from samestep.tools.causes import (
    LOGGED,
    METRIC,
    OBSERVED_KINDS,
    Between,
    Observation,
    Values,
    starting_over,
)

OBSERVED_FOLDER: Final = "observed"


class RunSize(NamedTuple):
    """The number of workers of a run and the devices of each; printed as 4, or 1x2."""

    workers: int
    devices: int = 1

    def __str__(self) -> str:
        return str(self.workers) if self.devices == 1 else f"{self.workers}x{self.devices}"


@dataclass(frozen=True)
class StepTrace:
    """The hashes of a completed step by name: metrics, tensors, other state, logged scalars.

    `loops` has the steps of each loop, in total and in its current epoch.
    """

    step: int
    hashes: Mapping[str, str]
    loops: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def digest(self) -> str:
        """Return one short hash of everything."""
        return _hash(json.dumps(sorted(self.hashes.items())).encode())[:12]

    def differing(self, other: StepTrace) -> list[str]:
        """Return the names with different hashes, in order."""
        return differing(self.hashes, other.hashes)


@dataclass(frozen=True)
class RunTrace:
    """The traces of a run, and how it differs from the others (`Difference.between`).

    `lost` has the variables that started over when the run was resumed, by the step of the kill;
    `lost_at_end` those that differ when the script ends. `has_ended` says that it was not stopped.
    """

    title: str
    steps: Sequence[StepTrace]
    between: Between = "workers"
    lost: Mapping[int, Sequence[str]] = field(default_factory=dict)
    lost_at_end: Sequence[str] = ()
    has_ended: bool = True


class ScriptTracer:
    """Runs a script in new directories, and traces each step.

    If `lanes` is None, the first run sets the lanes of all runs. Observations are those of all runs
    that were not killed.
    """

    def __init__(self, command: Sequence[str], steps: int, lanes: int | None) -> None:
        self.lanes = lanes
        self.observations: list[Observation] = []
        self.buffers: set[str] = set()
        self.loaders: int | None = None  # the largest number of loader processes of a loop
        self.uses_graphs = False  # CUDA graphs of lanes
        self.environment: Mapping[str, str] = {}  # of the last run
        self._variables: dict[str, dict[int, Values]] = {}  # by size and step
        self._command, self._steps = list(command), steps

    def run(self, size: RunSize, loaders: int | None = None, *, graphs: bool = True) -> RunTrace:
        """Run the script to the end. Raises `VerifyError`, and `RecordError` if it is no run.

        With `loaders`, all loops have this number of loader processes. Without `graphs`, all lanes
        are eager.
        """
        with TemporaryDirectory(prefix="samestep-verify-") as name:
            directory, title = Path(name), f"n={size}"
            environment = {} if loaders is None else {LOADERS: str(loaders)}
            if not graphs:
                environment["SAMESTEP_GRAPHS"] = "off"
            start = self._finish(size, directory, "never", environment)
            self.environment = start["environment"]
            on_gpus = all(device.startswith("cuda") for device in start["devices"])
            self.uses_graphs |= on_gpus and start["config"]["graphs"] != "off"
            lanes = start["lanes"]
            if self.lanes not in {None, lanes}:
                counts = f"{self.lanes} and {lanes}; set it in the script or with --lanes"
                raise VerifyError(f"all runs must have the same number of lanes, got {counts}")
            self.lanes = lanes
            self._note(read_entries(directory), size, title)
            between: Between = "workers"
            if loaders is not None:
                title, between = f"{title}, loader_workers={loaders}", "loaders"
            if not graphs:
                title, between = f"{title}, graphs=off", "graphs"
            has_ended = read_run(directory)[-1]["event"] != "stopped"
            return RunTrace(title, read_traces(directory), between, has_ended=has_ended)

    def _note(self, entries: Sequence[Mapping[str, Any]], size: RunSize, title: str) -> None:
        """Keep what the workers of a run observed."""
        self.observations += observations_of(entries, title)
        for entry in entries:
            if entry["kind"] == "loaders":
                self.loaders = max(self.loaders or 0, entry["count"])
            if entry["kind"] == "buffers":
                self.buffers.update(entry["names"])
        states = (entry for entry in entries if entry["kind"] == "state")
        self._variables[str(size)] = {entry["step"]: entry["values"] for entry in states}

    def run_with_kills(
        self, sizes: Sequence[RunSize], steps: Sequence[int], draw: random.Random
    ) -> RunTrace:
        """Kill a random worker after each step, and resume at the next of the sizes in turn."""
        turns = cycle(sizes)
        with TemporaryDirectory(prefix="samestep-verify-") as name:
            directory, size, resume = Path(name), next(turns), "never"
            title, size_after = f"n={size}", {}
            for number, step in enumerate(steps):
                # by turns before and after what the script does between two steps
                place = f"{step} {draw.randrange(size.workers)}{' body' * (number % 2 == 0)}"
                if not self._run_until_killed(size, directory, resume, step, place):
                    break  # it has fewer steps now, which the report will say
                size, resume = next(turns), "auto"
                size_after[step] = str(size)
                title += f", killed after step {step}, n={size}"
            else:
                self._finish(size, directory, resume)
                size_after[END] = str(size)
            lost = {
                entry["step"]: starting_over(
                    self._variables, size_after[entry["step"]], entry["step"], entry["values"]
                )
                for entry in read_entries(directory)
                if entry["kind"] == "state" and entry["is_first"] and entry["step"] in size_after
            }
            at_end = lost.pop(END, [])
            return RunTrace(title, read_traces(directory), "resume", lost, at_end)

    def _run_until_killed(
        self, size: RunSize, directory: Path, resume: str, step: int, place: str
    ) -> bool:
        """Return whether a worker was killed after a step; False if the run ended before."""
        with self._start(size, directory, resume, {KILL: place}) as process:
            status = process.wait()
        kills = [entry["step"] for entry in read_entries(directory) if entry["kind"] == "killed"]
        if step not in kills and status != 0:
            self._raise_failure(size, directory, status)
        return step in kills

    def _finish(
        self,
        size: RunSize,
        directory: Path,
        resume: str,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Run the script to the end; return the event that its newest attempt started with."""
        with self._start(size, directory, resume, environment or {}) as process:
            status = process.wait()
        if status != 0:
            self._raise_failure(size, directory, status)
        return [event for event in read_run(directory) if event["event"] in STARTS][-1]

    def _raise_failure(self, size: RunSize, directory: Path, status: int) -> NoReturn:
        kills = [entry["step"] for entry in read_entries(directory) if entry["kind"] == "killed"]
        after = f", resumed after a kill at step {max(kills)}," if kills else ""
        failed = f"the script failed at n={size}{after} with status {status}"
        raise VerifyError(f"{failed}:\n{first_failure(directory)}")

    def _start(
        self, size: RunSize, directory: Path, resume: str, environment: Mapping[str, str]
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        flags = [f"--resume={resume}", f"--stop-after={self._steps}"]
        flags += ["--snapshot-every=1", f"--keep-last={self._steps + 1}"]  # and step 0
        flags += [] if self.lanes is None else [f"--lanes={self.lanes}"]
        flags += [] if size.devices == 1 else [f"--devices={size.devices}"]
        print(f"running at n={size} …", file=sys.stderr, flush=True)
        observed = directory / OBSERVED_FOLDER
        observed.mkdir(exist_ok=True)
        variables = {**environment, OBSERVED: str(observed)}
        return started(self._command, size.workers, directory, flags, variables)


def kill_steps(traces: Sequence[StepTrace]) -> list[int]:
    """Return after which steps to kill: the first in an epoch of each loop, the last of each epoch.

    A worker is killed between two steps, so it is not killed after the last one.
    """
    steps: list[int] = []
    seen: set[str] = set()
    for before, after in pairwise(traces):
        for name, (done, in_epoch) in after.loops.items():
            if done == before.loops.get(name, (0, 0))[0]:
                continue
            if in_epoch == 0 or name not in seen:
                steps.append(after.step)
            if in_epoch:
                seen.add(name)
    return [step for step in steps if step < traces[-1].step]


def read_traces(directory: Path) -> list[StepTrace]:
    """Return the traces of the steps that a run directory has snapshots of, in order."""
    metrics: dict[int, dict[str, str]] = {}
    logged: dict[int, dict[str, str]] = {}  # by the script, other than means
    for event in read_run(directory):
        if event["event"] == "scalars":
            step = event["step"] + (not event.get("between"))
            for name, value in event["values"].items():
                kind, by_step = (METRIC, metrics) if name in event["low"] else (LOGGED, logged)
                by_step.setdefault(step, {})[kind + name] = _hash(repr(value).encode())
    traces = []
    if not (snapshots := list_snapshots(directory)):
        needed = "track its model and optimizer (run.track) and train for at least one step"
        raise RecordError(f"the script wrote no snapshot; it must {needed}")
    for path in snapshots:
        snapshot = load(path)
        hashes = dict(metrics.get(snapshot.step, {}))
        hashes |= hashes_of(snapshot.state)
        hashes |= logged.get(snapshot.step, {})
        loops = {
            name: (at["done"], at["step"])
            for name, at in snapshot.state["run"]["positions"].items()
        }
        traces.append(StepTrace(snapshot.step, hashes, loops))
    return traces


def hashes_of(states: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of a snapshot's tensors, by path, and of the plain state of each object."""
    hashes: dict[str, str] = {}
    for name, state in states.items():
        plain, tensors = flatten({name: state})
        hashes.update((path, _hash_tensor(tensor)) for path, tensor in tensors.items())
        hashes[f"plain state of {name}"] = _hash(json.dumps(sorted_plain(plain)).encode())
    return hashes


def differing_state(paths: Sequence[Path]) -> list[str]:
    """Return the names in two snapshots with other bits. Raises `SnapshotError`."""
    first, second = (hashes_of(tracked_state(path)) for path in paths)
    return differing(first, second)


def tracked_state(path: Path) -> dict[str, Any]:
    """Return the state in a snapshot, but for that of the run itself, whose options may differ."""
    return {name: own for name, own in load(path).state.items() if name not in RESERVED}


def read_entries(directory: Path) -> list[dict[str, Any]]:
    """Return what the workers of a run observed, without repetitions."""
    paths = sorted((directory / OBSERVED_FOLDER).iterdir())
    # a killed process may have left a part of its last line
    lines = [line for path in paths for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line) for line in dict.fromkeys(lines)]


def observations_of(entries: Sequence[Mapping[str, Any]], title: str) -> list[Observation]:
    """Return the possible causes of differences among the entries of the run of this title."""
    observations = [
        Observation(entry.get("step", -1) + 1, entry["kind"], entry["name"])
        for entry in entries
        if entry["kind"] in OBSERVED_KINDS and entry["kind"] != "tensors"
    ]
    by_call: dict[str, dict[int, dict[str, str]]] = {}
    for entry in entries:
        if entry["kind"] == "tensors":
            call = json.dumps([entry["step"], *entry["call"]])
            by_call.setdefault(call, {})[entry["rank"]] = entry["checksums"]
    for call, by_rank in by_call.items():
        step = json.loads(call)[0]
        first_rank = min(by_rank)
        first = by_rank[first_rank]
        for rank, sums in by_rank.items():
            if name := next((name for name in first if sums.get(name) != first[name]), None):
                where = f"between workers {first_rank} and {rank} of {title} after step {step}"
                text = f"{name} differs {where}"
                return [*observations, Observation(step, "tensors", text)]
    return observations


def _hash_tensor(tensor: Any) -> str:
    tensor = tensor.detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _hash(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
