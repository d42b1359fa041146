"""The faults. Each happens to a run, returns when the run goes on, and raises `ChaosError` where it did not happen as it should."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from benchmarks.chaos.target import STARTS, ChaosError, flip_byte, hot_copies
from samestep.snapshot.read import list_snapshots

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from benchmarks.chaos.target import Target

MOST_WORKERS = 4


def kill_worker(target: Target, chance: random.Random) -> float:
    """Kill a worker with signal 9; return the seconds until the end of the next step."""
    return _strike(target, chance, signal.SIGKILL)


def stop_worker(target: Target, chance: random.Random) -> float:
    """Stop a worker, for which the others then wait; return the seconds until the end of the next step."""
    return _strike(target, chance, signal.SIGSTOP)


def kill_twice(target: Target, chance: random.Random) -> float:
    """Kill a worker, and another while they start again; return the seconds from the second to the end of the next step."""
    since = _send(target, chance, signal.SIGKILL)
    target.wait_for("restarting", since)
    time.sleep(chance.uniform(0.0, 0.3))
    return _strike(target, chance, signal.SIGKILL)


def kill_launcher(target: Target, chance: random.Random) -> float:
    """Kill the launcher with signal 9, and give the command again with another number of workers; return the seconds this took."""
    since = time.time()
    target.end(signal.SIGKILL)
    return _start_again(target, chance, since)


def resize(target: Target, chance: random.Random) -> float:
    """Ask the run to stop, and give the command again with another number of workers; return the seconds this took."""
    since = time.time()
    target.end(signal.SIGTERM)
    target.wait_for("stopped", since)
    return _start_again(target, chance, since)


def damage_snapshot(target: Target, chance: random.Random) -> float:
    """Kill the launcher and damage the newest snapshot: the one before it must count. Returns the seconds until the next step's end."""
    target.wait_until(lambda: len(_whole(target)) > 1, "the run took no snapshots")
    since = time.time()
    target.end(signal.SIGKILL)
    path = _whole(target)[-1]
    file = max(path.glob("tensors-*"), key=lambda file: file.stat().st_size)
    flip_byte(file, chance.randrange(file.stat().st_size))
    seconds = _start_again(target, chance, since)
    target.wait_for("snapshot_rejected", since, path=str(path))
    return seconds


def damage_hot_copies(target: Target, chance: random.Random) -> float:
    """Damage all copies in memory, and kill a worker: the newest snapshot must count. Returns the seconds until the next step's end."""
    pids = target.pids()
    since = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that no new copy comes in between
    for file in hot_copies(target.launcher):
        flip_byte(file, file.stat().st_size // 2)
    seconds = _strike(target, chance, signal.SIGKILL)
    target.wait_for("in_memory_snapshot_rejected", since)
    return seconds


FAULTS = {
    kill_worker: 12,
    kill_twice: 3,
    stop_worker: 4,
    kill_launcher: 3,
    resize: 4,
    damage_snapshot: 3,
    damage_hot_copies: 3,
}


def _strike(target: Target, chance: random.Random, number: signal.Signals) -> float:
    since = _send(target, chance, number)
    target.wait_for(
        "restarting",
        since,
        reason=f"{'stopped' if number == signal.SIGSTOP else 'killed'} by {number.name}",
    )
    return _seconds_to_next_step(target, since)


def _send(target: Target, chance: random.Random, number: signal.Signals) -> float:
    """Send a signal to a worker that is there, and return when, in seconds of `time.time`."""
    for _ in range(1000):
        pids = target.pids()
        since = time.time()
        with suppress(ProcessLookupError):
            os.kill(chance.choice(pids), number)
            return since
        # the workers of the last start are gone, and the next have not told their names yet
        time.sleep(0.01)
    raise ChaosError("the run has no workers")


def _start_again(target: Target, chance: random.Random, since: float) -> float:
    workers = chance.choice(
        [number for number in range(1, MOST_WORKERS + 1) if number != target.workers]
    )
    target.start(workers)
    if len(target.wait_for(STARTS, since)["workers"]) != workers:
        raise ChaosError(f"the run did not resume with {workers} workers")
    return _seconds_to_next_step(target, since)


def _seconds_to_next_step(target: Target, since: float) -> float:
    resumed = target.wait_for(STARTS, since)
    return float(target.wait_for("scalars", resumed["time"])["time"]) - since


def _whole(target: Target) -> list[Path]:
    return [path for path in list_snapshots(target.directory) if (path / "manifest.json").exists()]
