"""Run a script for a few steps, and hash the state and metrics after each step."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch

from samestep.data.generators import OBSERVED
from samestep.errors import RecordError, VerifyError
from samestep.snapshot.read import list_snapshots, load
from samestep.snapshot.state import flatten
from samestep.tools import first_failure, read_run, started

OBSERVED_FOLDER: Final = "observed"
KILL_ATTEMPTS: Final = 5
POLL_SECONDS: Final = 0.002


class Observation(NamedTuple):
    """A likely cause of differences from `step` on, seen while the script ran."""

    step: int
    text: str


class RunSize(NamedTuple):
    """The number of workers of a run and the devices of each; printed as 4, or 1x2."""

    workers: int
    devices: int = 1

    def __str__(self) -> str:
        return str(self.workers) if self.devices == 1 else f"{self.workers}x{self.devices}"


FOUND: Final = {
    "generator": "a lane draws from the generator {}, which samestep does not seed; seed it with "
    "run.on_lane_seed",
    "unseeded": "data is drawn with the generator {}, which samestep cannot seed, or which did "
    "not exist before the first draw; use one of Python, NumPy or torch, created with a seed",
    "attribute": "a lane changes the attribute {}, which stays on its worker; if results depend on "
    "it, make it a buffer (register_buffer) or compute it from the batch",
}
TENSORS: Final = (
    "{} differs {} after step {}; it was changed by code that runs on only some workers, such as a "
    "forward pass in training mode or other gradients on rank 0"
)


@dataclass(frozen=True)
class StepTrace:
    """The hashes of a completed step by name: metrics, tensors, and all other tracked state."""

    step: int
    hashes: Mapping[str, str]

    def digest(self) -> str:
        """Return one short hash of everything."""
        return _hash(json.dumps(sorted(self.hashes.items())).encode())[:12]

    def first_difference(self, other: StepTrace) -> str | None:
        """Return the first name with different hashes: metrics first, then tensors in order."""
        ours, theirs = self.hashes, other.hashes
        names = dict.fromkeys([*ours, *theirs])
        return next((name for name in names if ours.get(name) != theirs.get(name)), None)


class ScriptTracer:
    """Runs a script in new directories, and traces each step.

    If `lanes` is None, the first run sets the lanes of all runs.
    """

    def __init__(self, command: Sequence[str], steps: int, lanes: int | None) -> None:
        self.lanes = lanes
        self.observations: list[Observation] = []  # of all runs
        self._command, self._steps = list(command), steps

    def run(self, size: RunSize) -> list[StepTrace]:
        """Run the script to the end. Raises `VerifyError`, and `RecordError` if it is no run."""
        with TemporaryDirectory(prefix="samestep-verify-") as name:
            directory = Path(name)
            lanes = self._finish(size, directory, "never")["lanes"]
            if self.lanes not in {None, lanes}:
                counts = f"{self.lanes} and {lanes}; set it in the script or with --lanes"
                raise VerifyError(f"all runs must have the same number of lanes, got {counts}")
            self.lanes = lanes
            self.observations += read_observations(directory, f"n={size}")
            return read_traces(directory)

    def run_with_kill(
        self, size: RunSize, size_after: RunSize, draw: random.Random
    ) -> tuple[str, list[StepTrace]]:
        """Kill a random worker after a random step, resume at `size_after`; return title, trace."""
        for _ in range(KILL_ATTEMPTS):
            step, rank = draw.randint(1, self._steps - 1), draw.randrange(size.workers)
            with TemporaryDirectory(prefix="samestep-verify-") as name:
                directory = Path(name)
                if not self._run_until_killed(size, directory, step, rank):
                    continue
                resumed_at = self._finish(size_after, directory, "auto")["step"]
                title = f"n={size}, worker {rank} killed, n={size_after} from step {resumed_at}"
                return title, read_traces(directory)
        times = f"{KILL_ATTEMPTS} times"
        raise VerifyError(f"the run ended {times} before a worker was killed; increase --steps")

    def _run_until_killed(self, size: RunSize, directory: Path, step: int, rank: int) -> bool:
        """Kill a worker once the snapshot of `step` exists; return whether the run then failed."""
        with self._start(size, directory, "never") as process:
            while process.poll() is None and not any(
                path.name == f"step-{step:08d}" for path in list_snapshots(directory)
            ):
                time.sleep(POLL_SECONDS)
            if process.poll() is None:
                workers = _start_event(directory)["workers"]
                pids = {worker["rank"]: worker["pid"] for worker in workers}
                try:
                    os.kill(pids[rank], signal.SIGKILL)
                except ProcessLookupError:
                    return False
        return process.returncode != 0

    def _finish(self, size: RunSize, directory: Path, resume: str) -> dict[str, Any]:
        """Run the script to the end; return the event that the run started with."""
        with self._start(size, directory, resume) as process:
            status = process.wait()
        if status != 0:
            failed = f"the script failed at n={size} with status {status}"
            raise VerifyError(f"{failed}:\n{first_failure(directory)}")
        return _start_event(directory)

    def _start(
        self, size: RunSize, directory: Path, resume: str
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        flags = [f"--resume={resume}", f"--stop-after={self._steps}"]
        flags += ["--snapshot-every=1", f"--keep-last={self._steps + 1}"]  # and step 0
        flags += [] if self.lanes is None else [f"--lanes={self.lanes}"]
        flags += [] if size.devices == 1 else [f"--devices={size.devices}"]
        print(f"running at n={size} …", file=sys.stderr, flush=True)
        observed = directory / OBSERVED_FOLDER
        observed.mkdir(exist_ok=True)
        environment = {OBSERVED: str(observed)}
        return started(self._command, size.workers, directory, flags, environment)


def read_traces(directory: Path) -> list[StepTrace]:
    """Return the traces of the steps that a run directory has snapshots of, in order."""
    metrics: dict[int, dict[str, str]] = {}
    for event in read_run(directory):
        if event["event"] == "scalars":
            of_step = metrics.setdefault(event["step"] + 1, {})
            for name, value in event["values"].items():
                of_step[f"metric {name}"] = _hash(repr(value).encode())
    traces = []
    if not (snapshots := list_snapshots(directory)):
        needed = "track its model and optimizer (run.track) and train for at least one step"
        raise RecordError(f"the script wrote no snapshot; it must {needed}")
    for path in snapshots:
        snapshot = load(path)
        hashes = dict(metrics.get(snapshot.step, {}))
        for name, state in snapshot.state.items():
            plain, tensors = flatten({name: state})
            hashes.update((path, _hash_tensor(tensor)) for path, tensor in tensors.items())
            hashes[f"plain state of {name}"] = _hash(json.dumps(_sorted(plain)).encode())
        traces.append(StepTrace(snapshot.step, hashes))
    return traces


def read_observations(directory: Path, title: str) -> list[Observation]:
    """Return what the workers of a run observed, the likeliest causes first."""
    lines = [
        line
        for path in sorted((directory / OBSERVED_FOLDER).iterdir())
        for line in path.read_text().splitlines()
    ]
    entries = [json.loads(line) for line in dict.fromkeys(lines)]
    by_kind = {
        kind: [
            Observation(entry.get("step", -1) + 1, text.format(entry["name"]))
            for entry in entries
            if entry["kind"] == kind
        ]
        for kind, text in FOUND.items()
    }
    by_call: dict[str, dict[int, dict[str, str]]] = {}
    for entry in entries:
        if entry["kind"] == "tensors":
            call = json.dumps([entry["step"], *entry["call"]])
            by_call.setdefault(call, {})[entry["rank"]] = entry["checksums"]
    for call, by_rank in by_call.items():
        step, _ = json.loads(call)
        first = by_rank[min(by_rank)]
        for rank, sums in by_rank.items():
            if name := next((name for name in first if sums.get(name) != first[name]), None):
                where = f"between workers {min(by_rank)} and {rank} of {title}"
                by_kind["tensors"] = [Observation(step, TENSORS.format(name, where, step))]
        if "tensors" in by_kind:
            break
    order = ("generator", "unseeded", "tensors", "attribute")
    return [observation for kind in order for observation in by_kind.get(kind, ())]


def _start_event(directory: Path) -> dict[str, Any]:
    """Return the event that the newest attempt of a run started with."""
    return [event for event in read_run(directory) if event["event"] in {"started", "resumed"}][-1]


def _sorted(plain: Any) -> Any:
    """Return plain state with sorted dicts: the order of keys depends on the worker that saves."""
    if isinstance(plain, dict):
        return {
            tag: sorted(map(_sorted, value), key=json.dumps) if tag == "dict" else _sorted(value)
            for tag, value in plain.items()
        }
    return [_sorted(value) for value in plain] if isinstance(plain, list) else plain


def _hash_tensor(tensor: Any) -> str:
    tensor = tensor.detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _hash(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
