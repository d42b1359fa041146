"""Faults that are injected into a run.

Each returns the seconds until the run continued, which are until the end of the next step, and
raises `ChaosError` if the run did not react as it should.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.target import STARTS, ChaosError, Target, flip_byte, hot_copies
from samestep.snapshot.read import list_snapshots

MOST_WORKERS = 4


def kill_worker(target: Target, chance: random.Random) -> float:
    """Kill a worker with SIGKILL."""
    return _strike(target, chance, signal.SIGKILL)


def stop_worker(target: Target, chance: random.Random) -> float:
    """Stop a worker with SIGSTOP, so that the others wait for it."""
    return _strike(target, chance, signal.SIGSTOP)


def kill_twice(target: Target, chance: random.Random) -> float:
    """Kill a worker, and another one during the restart; measure from the second one."""
    since = _send(target, chance, signal.SIGKILL)
    target.wait_for({"restarting"}, since)
    time.sleep(chance.uniform(0.0, 0.3))
    return _strike(target, chance, signal.SIGKILL)


def kill_launcher(target: Target, chance: random.Random) -> float:
    """Kill the launcher with SIGKILL, and resume the run with another number of workers."""
    since = time.time()
    target.end(signal.SIGKILL)
    return _resume(target, chance, since)


def resize(target: Target, chance: random.Random) -> float:
    """Stop the run with SIGTERM, and resume it with another number of workers."""
    since = time.time()
    target.end(signal.SIGTERM)
    target.wait_for({"stopped"}, since)
    return _resume(target, chance, since)


def damage_snapshot(target: Target, chance: random.Random) -> float:
    """Kill the launcher and damage the newest snapshot, so that the previous one is used."""
    target.wait_until(lambda: len(_complete(target)) > 1, "the run has fewer than two snapshots")
    since = time.time()
    target.end(signal.SIGKILL)
    path = _complete(target)[-1]
    file = max(path.glob("tensors-*"), key=lambda file: file.stat().st_size)
    flip_byte(file, chance.randrange(file.stat().st_size))
    seconds = _resume(target, chance, since)
    target.wait_for({"snapshot_rejected"}, since, path=str(path))
    return seconds


def damage_hot_copies(target: Target, chance: random.Random) -> float:
    """Damage all copies in memory and kill a worker, so that the newest snapshot is used."""
    since = time.time()
    for pid in target.pids():
        os.kill(pid, signal.SIGSTOP)  # so that they make no new copy
    for file in hot_copies(target.launcher.pid):
        size = file.stat().st_size
        # another byte each time: a second flip would repair a copy that was not replaced since
        flip_byte(file, size // 2 + chance.randrange(size // 4))
    seconds = _strike(target, chance, signal.SIGKILL)
    target.wait_for({"in_memory_snapshot_rejected"}, since)
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
    verb = "stopped" if number == signal.SIGSTOP else "killed"
    target.wait_for({"restarting"}, since, reason=f"{verb} by {number.name}")
    return _seconds_to_next_step(target, since)


def _send(target: Target, chance: random.Random, number: signal.Signals) -> float:
    """Send a signal to a worker; return the time, in seconds of `time.time`."""
    sent_at: list[float] = []

    def send() -> bool:
        # During a restart the old workers are gone and the record does not name the new ones yet.
        sent_at[:] = [time.time()]
        with suppress(ProcessLookupError):
            os.kill(chance.choice(target.pids()), number)
            return True
        return False

    target.wait_until(send, "the run has no workers")
    return sent_at[0]


def _resume(target: Target, chance: random.Random, since: float) -> float:
    others = [number for number in range(1, MOST_WORKERS + 1) if number != target.workers]
    target.start(chance.choice(others))
    workers = len(target.wait_for(STARTS, since)["workers"])
    if workers != target.workers:
        raise ChaosError(f"expected the run to resume with {target.workers} workers, got {workers}")
    return _seconds_to_next_step(target, since)


def _seconds_to_next_step(target: Target, since: float) -> float:
    resumed = target.wait_for(STARTS, since)
    return float(target.wait_for({"scalars"}, resumed["time"])["time"]) - since


def _complete(target: Target) -> list[Path]:
    return [path for path in list_snapshots(target.directory) if (path / "manifest.json").exists()]
