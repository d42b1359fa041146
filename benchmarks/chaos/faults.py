"""Faults that are injected into a run.

Each returns the seconds until the run continued, which are until the end of the next step, and
raises `ChaosError` if the run did not react as it should. Of faults that last, they are counted
from their end.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.chaos.machines import Disk
from benchmarks.chaos.target import STARTS, ChaosError, Target, flip_byte, hot_copies
from samestep.snapshot.read import list_snapshots

MOST_WORKERS = 4
LONGEST_CUT_SECONDS = 10.0
SLOW_WRITE_SECONDS = 0.3


@dataclass
class Scene:
    """A run, its disk (None for one that cannot be disturbed), and random choices.

    At most `most_workers` run at a time, and faults last at most `longest` seconds.
    """

    target: Target
    disk: Disk | None
    chance: random.Random
    most_workers: int = MOST_WORKERS
    longest: float = LONGEST_CUT_SECONDS

    def workers(self) -> list[int]:
        """Choose a number of workers for each host: not the run's current ones, if possible."""
        hosts = len(self.target.hosts)
        largest = self.most_workers - hosts + 1
        choices = [
            list(counts)
            for counts in product(range(1, largest + 1), repeat=hosts)
            if sum(counts) <= self.most_workers and list(counts) != self.target.workers
        ]
        return self.chance.choice(choices or [self.target.workers])

    def duration(self, longest: float = LONGEST_CUT_SECONDS) -> float:
        """Choose how long a fault lasts."""
        longest = min(longest, self.longest)
        return self.chance.uniform(min(1.0, longest / 2), longest)


Fault = Callable[[Scene], float]


def kill_worker(scene: Scene) -> float:
    """Kill a worker with SIGKILL."""
    return _strike(scene, signal.SIGKILL)


def stop_worker(scene: Scene) -> float:
    """Stop a worker with SIGSTOP, so that the others wait for it."""
    return _strike(scene, signal.SIGSTOP)


def kill_twice(scene: Scene) -> float:
    """Kill a worker, and another one during the restart; measure from the second one."""
    since = _send(scene, signal.SIGKILL)
    scene.target.wait_for({"restarting"}, since)
    time.sleep(scene.chance.uniform(0.0, 0.3))
    return _strike(scene, signal.SIGKILL)


def kill_launchers(scene: Scene) -> float:
    """Kill all launchers with SIGKILL, and resume the run with other numbers of workers."""
    since = time.time()
    scene.target.end(signal.SIGKILL)
    return _resume(scene, since)


def resize(scene: Scene) -> float:
    """Stop the run with SIGTERM, and resume it with other numbers of workers."""
    since = time.time()
    scene.target.end(signal.SIGTERM)
    scene.target.wait_for({"stopped"}, since)
    return _resume(scene, since)


def damage_snapshot(scene: Scene) -> float:
    """Kill the launchers and damage the newest snapshot, so that the previous one is used."""

    def damage(file: Path) -> None:
        flip_byte(file, scene.chance.randrange(file.stat().st_size))

    return _spoil(scene, damage)


def truncate_snapshot(scene: Scene) -> float:
    """Do the same with a snapshot whose end is missing."""
    return _spoil(
        scene, lambda file: os.truncate(file, scene.chance.randrange(file.stat().st_size))
    )


def damage_hot_copies(scene: Scene) -> float:
    """Damage all copies in memory and kill a worker, so that the newest snapshot is used."""
    target, since = scene.target, time.time()
    for pid in target.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # so that they make no new copy
    for file in (file for launcher in target.launchers for file in hot_copies(launcher.pid)):
        size = file.stat().st_size
        # another byte each time: a second flip would repair a copy that was not replaced since
        flip_byte(file, size // 2 + scene.chance.randrange(size // 4))
    seconds = _strike(scene, signal.SIGKILL)
    target.wait_for({"in_memory_snapshot_rejected"}, since)
    return seconds


def slow_disk(scene: Scene) -> float:
    """Let the disk stall for seconds, once or again and again; nothing restarts."""
    assert scene.disk is not None  # noqa: S101  see `faults_for`
    before = scene.target.starts()
    end = time.monotonic() + scene.duration(scene.target.timeout / 2)
    stalls = scene.chance.random() < 0.5
    while (left := end - time.monotonic()) > 0:
        scene.disk.stall()
        time.sleep(left if stalls else min(left, SLOW_WRITE_SECONDS))
        scene.disk.recover()
        time.sleep(scene.chance.uniform(0.0, SLOW_WRITE_SECONDS))
    return _continued(scene, before, time.time())


def full_disk(scene: Scene) -> float:
    """Leave no space on the disk, which ends the run; then free it, and start the run again."""
    assert scene.disk is not None  # noqa: S101  see `faults_for`
    disk, target = scene.disk, scene.target

    def has_ended() -> bool:
        disk.fill()  # again and again, because the run removes old snapshots
        return not target.running()

    target.wait_until(has_ended, "the run did not end", has_exited=True)
    target.end(status=1)
    disk.free()
    return _resume(scene, time.time())


def cut_link(scene: Scene) -> float:
    """Disconnect a host from the network for seconds; nothing restarts."""
    host = scene.chance.choice(scene.target.hosts)
    before = scene.target.starts()
    host.plug(into=False)
    time.sleep(scene.duration())
    host.plug(into=True)
    return _continued(scene, before, time.time())


def kill_host(scene: Scene) -> float:
    """Kill the launcher of the second host, and start it again; the first one continues."""
    return _kill_host(scene, 1)


def kill_first_host(scene: Scene) -> float:
    """Kill the first host's launcher with the coordinator; start it again, the other one waits."""
    return _kill_host(scene, 0)


# The shares of faults after which the launchers live on come first.
SURVIVED = {kill_worker: 12, kill_twice: 3, stop_worker: 4, damage_hot_copies: 3}
DISK_SURVIVED = {slow_disk: 4}
NETWORK_SURVIVED = {cut_link: 8}
ENDING = {kill_launchers: 3, resize: 4, damage_snapshot: 3, truncate_snapshot: 2}
DISK_ENDING = {full_disk: 2}
NETWORK_ENDING = {kill_host: 4, kill_first_host: 3}


def faults_for(hosts: int, *, disk: bool) -> tuple[dict[Fault, int], dict[Fault, int]]:
    """Return the shares of faults that launchers survive, and of those that they do not."""
    survived: dict[Fault, int] = {**SURVIVED}
    ending: dict[Fault, int] = {**ENDING}
    if disk:
        survived, ending = {**survived, **DISK_SURVIVED}, {**ending, **DISK_ENDING}
    if hosts > 1:
        survived, ending = {**survived, **NETWORK_SURVIVED}, {**ending, **NETWORK_ENDING}
    return survived, ending


def _strike(scene: Scene, number: signal.Signals) -> float:
    since = _send(scene, number)
    verb = "stopped" if number == signal.SIGSTOP else "killed"
    scene.target.wait_for({"restarting"}, since, reason=f"{verb} by {number.name}")
    return _seconds_to_next_step(scene.target, since)


def _send(scene: Scene, number: signal.Signals) -> float:
    """Send a signal to a worker; return the time, in seconds of `time.time`."""
    sent_at: list[float] = []

    def send() -> bool:
        # During a restart the old workers are gone and the record does not name the new ones yet.
        sent_at[:] = [time.time()]
        with suppress(ProcessLookupError):
            os.kill(scene.chance.choice(scene.target.pids()), number)
            return True
        return False

    scene.target.wait_until(send, "the run has no workers")
    return sent_at[0]


def _spoil(scene: Scene, spoil: Callable[[Path], None]) -> float:
    target = scene.target
    target.wait_until(lambda: len(_complete(target)) > 1, "the run has fewer than two snapshots")
    since = time.time()
    target.end(signal.SIGKILL)
    path = _complete(target)[-1]
    spoil(max(path.glob("tensors-*"), key=lambda file: file.stat().st_size))
    seconds = _resume(scene, since)
    target.wait_for({"snapshot_rejected"}, since, path=str(path))
    return seconds


def _kill_host(scene: Scene, number: int) -> float:
    target, since = scene.target, time.time()
    launcher, pids = target.launchers[number], target.pids()
    first = sum(target.workers[:number])
    launcher.kill()
    launcher.wait()
    target.wait_for_exit(pids[first : first + target.workers[number]])
    target.start_host(number)
    return _seconds_to_next_step(target, since)


def _resume(scene: Scene, since: float) -> float:
    target = scene.target
    target.start(scene.workers())
    workers = len(target.wait_for(STARTS, since)["workers"])
    if workers != sum(target.workers):
        raise ChaosError(f"expected the run to resume with {target.workers} workers, got {workers}")
    return _seconds_to_next_step(target, since)


def _continued(scene: Scene, starts: int, since: float) -> float:
    """Return the seconds until the next step of a run whose workers were not restarted."""
    ended = float(scene.target.wait_for({"scalars"}, since)["time"])
    if scene.target.starts() != starts:
        raise ChaosError(f"workers were restarted; {scene.target.last_output()}")
    return ended - since


def _seconds_to_next_step(target: Target, since: float) -> float:
    resumed = target.wait_for(STARTS, since)
    return float(target.wait_for({"scalars"}, resumed["time"])["time"]) - since


def _complete(target: Target) -> list[Path]:
    return [path for path in list_snapshots(target.directory) if (path / "manifest.json").exists()]
