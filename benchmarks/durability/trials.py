"""Runs with a fault or after a power loss, each in a new process that has imported torch."""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.durability import slow
from benchmarks.durability.disk import LOSSES, Call, read_calls, replay
from benchmarks.durability.job import KEPT, STEPS, train
from samestep.errors import SamestepError, SnapshotError
from samestep.record import read_events, read_history
from samestep.record.events import FILE_NAME
from samestep.record.source import open_source
from samestep.snapshot import list_snapshots
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import fault, step_of
from samestep.tools.snapshots import LocalSnapshots

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
SHORT_WRITE = 0
LIMIT_SECONDS = 400
TRIES = 3  # how many chunks the record is sent in depends on the time
NOT_REACHED = "did not make the call"
MIXTURES = 3  # of what is lost at each sync
# what differs between two runs: process IDs, the names of attempts, and offsets in the record
VARYING = re.compile(r"(?<=\.)\d+(?=\.tmp$)|(?<=-)[0-9a-f]{8}(?=\.\d)|\d{20}-\d{20}")
USUAL = re.compile(r"samestep: (\d worker|resumed|finished)")


Trial = Any  # a fault, a power loss or slow calls


class DurabilityError(Exception):
    """A run lost something, or did not say that it did."""


@dataclass(frozen=True)
class Ended:
    """How a run ended: its hash or the error, and what it printed."""

    hash: str
    error: str
    printed: str
    status: int = 0  # of the process, as `os.waitpid` returns it


@dataclass(frozen=True)
class Fault:
    """Call number `when`, from 1 on, whose name and path match fails with `error`."""

    is_worker: int
    call: str
    pattern: str
    when: int
    error: int

    def __str__(self) -> str:
        error = errno.errorcode.get(self.error, "half of the data")
        return f"{error} in {self.call} {self.when} of {self.pattern}"


@dataclass(frozen=True)
class PowerLoss:
    """What may be left of the first `calls` calls."""

    calls: int
    loss: str
    seed: int

    def __str__(self) -> str:
        return f"power lost after call {self.calls}, unsynced lost: {self.loss}, seed {self.seed}"


@dataclass(frozen=True)
class Undisturbed:
    """The run without faults: its calls, hash and scalars by step."""

    calls: Sequence[Call]
    hash: str
    scalars: dict[int, Any]
    slow_hash: str  # of the run whose calls will be slow

    def reported(self, calls: int) -> int:
        """Return the step of the newest snapshot that the record has after some calls, or -1."""
        written = b"".join(
            call.data for call in self.calls[:calls] if call.path == "run/events.jsonl"
        )
        events = map(json.loads, written.splitlines())
        return max((event["step"] for event in events if event["event"] == "snapshot"), default=-1)


def campaign(folder: Path, options: argparse.Namespace) -> int:
    """Run the trials of the options in `folder`; return the exit status."""
    started, chance = time.monotonic(), random.Random(options.seed)
    undisturbed = record(folder / "undisturbed")
    faults = list(faults_of(undisturbed.calls))
    losses = list(losses_of(undisturbed.calls, chance))
    if options.sample:
        faults, losses = map(chance.sample, (faults, losses), options.sample)
    delays = list(slow.trials(options.slow, chance))
    trials = chance.sample([*faults, *losses, *delays], len(faults) + len(losses) + len(delays))
    tasks = [(folder / str(number), trial, undisturbed) for number, trial in enumerate(trials)]
    failed, results = 0, Counter[str]()
    # unlike those of a `Pool`, these processes may start workers
    with ProcessPoolExecutor(options.parallel, get_context("fork")) as pool:
        for done in as_completed([pool.submit(attempt, task) for task in tasks]):
            trial, result, error = done.result()
            results[result] += 1
            if error:
                failed += 1
                print(f"FAILED: {trial}: {error}", flush=True)
            if (count := results.total()) % 100 == 0:
                print(f"{count} of {len(trials)} trials", dict(results), flush=True)
    calls = len({replace(fault, error=0) for fault in faults})
    print(
        f"{len(faults)} failures of {calls} calls, {len(losses)} power losses and {len(delays)} "
        f"runs with slow calls in {time.monotonic() - started:.0f} s: {failed} lost something"
    )
    print(", ".join(f"{count} {result}" for result, count in sorted(results.items())))
    return 1 if failed or results[NOT_REACHED] > 1 + len(faults) // 50 else 0


def record(folder: Path) -> Undisturbed:
    """Run undisturbed and return what happened."""
    for number in range(TRIES):
        folder = folder.with_name(f"undisturbed-{number}")
        folder.mkdir()
        ended = start(folder, CALLS_ROOT=str(folder), CALLS_LOG=f"{folder}.calls")
        if not (ended.error or ended.printed):  # a busy machine may send the record too late
            break
    else:
        raise DurabilityError(f"undisturbed: {ended}")
    undisturbed = Undisturbed(
        [*read_calls(Path(f"{folder}.calls"))],
        ended.hash,
        scalars(folder / "run"),
        start(folder / "early stopping", slow.train).hash,
    )
    check_end(folder, ended, undisturbed)
    return undisturbed


def faults_of(calls: Sequence[Call]) -> Iterator[Fault]:
    """Yield each error of each call."""
    counts = Counter[tuple[int, str, str]]()
    for call in calls:
        key = call.is_worker, call.name, VARYING.sub("*", call.path)
        counts[key] += 1
        for error in (*ERRORS, *([SHORT_WRITE] if call.name in {"write", "pwrite"} else [])):
            yield Fault(*key, counts[key], error)


def losses_of(calls: Sequence[Call], chance: random.Random) -> Iterator[PowerLoss]:
    """Yield power losses right after each sync, and anywhere between it and the next one."""
    syncs = [number for number, call in enumerate(calls, 1) if call.is_sync]
    for sync, following in zip(syncs, [*syncs[1:], len(calls) + 1], strict=True):
        yield PowerLoss(sync, "all", 0)
        for loss in [*LOSSES[1:-1], *["some"] * MIXTURES]:
            yield PowerLoss(chance.randrange(sync, following), loss, chance.randrange(2**32))


def attempt(task: tuple[Path, Trial, Undisturbed]) -> tuple[Any, str, str]:
    """Return the trial, its result in a few words, and what it lost, if anything."""
    folder, trial, undisturbed = task
    try:
        if isinstance(trial, slow.SlowCalls):
            result = delay(folder, trial, undisturbed)
        else:
            result = fail(folder, trial, undisturbed) if isinstance(trial, Fault) else lose(*task)
    except DurabilityError as error:
        return trial, "failed", str(error)
    except Exception:  # noqa: BLE001  the other trials go on
        return trial, "failed", traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return trial, result, ""


def fail(folder: Path, trial: Fault, undisturbed: Undisturbed) -> str:
    """Run with a fault, then resume. Raises `DurabilityError`."""
    log = folder.with_suffix(".calls")
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        log.unlink(missing_ok=True)
        target = f"{trial.error} {trial.is_worker} {trial.when} {trial.call} {trial.pattern}"
        ended = start(folder, CALLS_ROOT=str(folder), CALLS_LOG=str(log), CALLS_FAULT=target)
        if [*read_calls(log)]:
            break
    else:
        return NOT_REACHED
    if not ended.error:
        check_end(folder, ended, undisturbed)
        result = "went on with a warning" if ended.printed else "went on"
    elif "\n" in ended.error or not ended.error.startswith(
        ("SnapshotError: ", "RecordError: ", "StorageError: ")
    ):
        raise DurabilityError(f"the error is not clear: {ended.error}\n{ended.printed}")
    else:
        result = "ended with an error"
    resume(folder, undisturbed, -1)
    return result


def lose(folder: Path, trial: Any, undisturbed: Undisturbed) -> str:
    """Make the directories that a power loss may leave, then resume. Raises `DurabilityError`."""
    root = replay(undisturbed.calls[: trial.calls])
    root.write(folder, trial.loss, random.Random(trial.seed))
    resume(folder, undisturbed, undisturbed.reported(trial.calls))
    return "power lost"


def delay(folder: Path, trial: slow.SlowCalls, undisturbed: Undisturbed) -> str:
    """Run with slow calls; if it is killed, resume. Raises `DurabilityError`."""
    folder.mkdir()
    snapshots = slow.Snapshots(folder / "run", trial)
    ended = start(folder, partial(slow.train, trial=trial), snapshots.look)
    is_killed = ended.status == signal.SIGKILL
    if is_killed:
        ended = start(folder, slow.train, snapshots.look)
    if snapshots.lost or ended.error or ended.hash != undisturbed.slow_hash:
        raise DurabilityError(f"{snapshots.lost}, {ended}")
    for path in list_snapshots(folder / "run"):
        if (path / NAME).exists() and (reason := fault(path)):
            raise DurabilityError(reason)
    return "killed, and resumed" if is_killed else "slow"


def resume(folder: Path, undisturbed: Undisturbed, reported: int) -> None:
    """Start a run again. Raises `DurabilityError` unless it ends as if undisturbed.

    It must resume from the newest valid snapshot, which has at least the `reported` step.
    """
    newest = [newest_valid(folder / "run"), newest_valid(folder / "remote")]
    if max(newest) < reported:
        raise DurabilityError(f"the newest snapshots have steps {newest}, {reported} was reported")
    ended = start(folder)
    if ended.error:
        raise DurabilityError(f"it did not resume: {ended.error}\n{ended.printed}")
    events = read_events(folder / "run")
    starts = [event for event in events if event["event"] in {"started", "resumed"}]
    if (step := starts[-1]["step"]) != max(0, *newest):
        raise DurabilityError(f"resumed at step {step}, the newest snapshots have {newest}")
    check_end(folder, ended, undisturbed)


def check_end(folder: Path, ended: Ended, undisturbed: Undisturbed) -> None:
    """Raise `DurabilityError` unless a run ended like the undisturbed one, here and in the copy."""
    if ended.hash != undisturbed.hash:
        raise DurabilityError(f"expected hash {undisturbed.hash}, got {ended.hash}")
    for name in ("run", "remote"):
        # Only a warning says that a part of the record was not sent.
        is_complete = name == "run" or not ended.printed
        if is_complete and (steps := scalars(folder / name)) != undisturbed.scalars:
            raise DurabilityError(
                f"{name} records {steps}, expected {undisturbed.scalars}; {ended.printed}"
            )
        # A run that was complete when it was resumed removes no more old ones.
        faults = {
            step_of(path): fault(path)
            for path in list_snapshots(folder / name)
            if (path / NAME).exists()
        }
        if any(faults.values()) or len(faults) < KEPT or STEPS not in faults:
            raise DurabilityError(f"{name} has snapshots {faults}; {ended.printed}")


def newest_valid(directory: Path) -> int:
    """Return the step of the newest snapshot that `samestep snapshots check` finds valid, or -1."""
    if not directory.is_dir():  # the power was lost before it was made
        return -1
    snapshots = LocalSnapshots(directory)
    for name in reversed(snapshots.names):
        with suppress(SnapshotError), snapshots.verified(name) as path:
            return step_of(path) or 0
    return -1


def scalars(directory: Path) -> dict[int, Any]:
    """Return the values of each step. Raises `DurabilityError` if there are two of a step."""
    values: dict[int, Any] = {}
    record = directory / FILE_NAME
    if directory.name == "remote":  # which has the events in chunks
        record = directory.with_suffix(".jsonl")
        source, content = open_source(f"file://{directory}"), b""
        while lines := source.read(len(content)):
            content += lines
        record.write_bytes(content)
    for event in read_history(record):
        if event["event"] == "scalars":
            if event["step"] in values:
                raise DurabilityError(f"step {event['step']} is recorded twice in {directory}")
            values[event["step"]] = event["values"]
    return values


def start(
    folder: Path,
    run: Callable[[Path], str] = train,
    look: Callable[[int], object] = lambda _: None,
    **environment: str,
) -> Ended:
    """Run or resume in a new process, which is forked with torch imported.

    `look` is called with its process ID again and again.
    """
    output = folder.with_suffix(".output")
    if not (pid := os.fork()):
        for name in ("CALLS_ROOT", "CALLS_LOG", "CALLS_FAULT"):
            os.environ.pop(name, None)
        os.environ.update(environment, CALLS_WORKER=str(os.getpid()))
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        ctypes.CDLL(None).calls_configure()
        try:
            result = {"hash": run(folder)}
        except SamestepError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        except BaseException:  # noqa: BLE001
            result = {"error": traceback.format_exc()}
        os.environ.pop("CALLS_ROOT", None)
        ctypes.CDLL(None).calls_configure()
        folder.with_suffix(".result").write_text(json.dumps(result))
        sys.stderr.flush()
        os._exit(0)
    deadline = time.monotonic() + LIMIT_SECONDS
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        look(pid)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ended("", f"it still ran after {LIMIT_SECONDS} s", output.read_text())
        time.sleep(0.002)
    if ended[1]:
        return Ended("", f"it ended with status {ended[1]}", output.read_text(), ended[1])
    result = json.loads(folder.with_suffix(".result").read_text())
    lines = output.read_text().splitlines()
    warnings = "\n".join(line for line in lines if not USUAL.match(line))
    return Ended(result.get("hash", ""), result.get("error", ""), warnings)
