"""Workers that are killed at every change of the file system during a save."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from samestep.errors import SnapshotError
from samestep.snapshot import SnapshotWriter, list_snapshots, load, part
from samestep.snapshot.commit import CommitProtocol
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import fault
from tests.snapshot.exact import exact
from tests.snapshot.saving import NO_INFO, find_newest, save_once, small_state
from tests.workers import run_workers, try_workers

if TYPE_CHECKING:
    from collections.abc import Callable

TOUCHING = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}


class Death:
    """Count changes of the file system, and kill this process just before number `point`."""

    def __init__(self, point: int | None, sign: Path) -> None:
        self.count = 0
        self._point = point
        self._sign = sign
        part.SEGMENT_BYTES = 256
        CommitProtocol.raise_if_given_up = self._before(CommitProtocol.raise_if_given_up)
        os.fsync = self._before(os.fsync)
        Path.write_bytes = self._in_the_middle_of(Path.write_bytes)
        sys.addaudithook(lambda event, _: self._pass() if event in TOUCHING else None)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any) -> Any:
            self._pass()
            return function(*args)

        return dying

    def _in_the_middle_of(
        self, write: Callable[[Path, bytes], int]
    ) -> Callable[[Path, bytes], int]:
        def dying(path: Path, data: bytes) -> int:
            write(path, data[: len(data) // 2])
            self._pass()
            return write(path, data)

        return dying

    def _pass(self) -> None:
        self.count += 1
        if self.count - 1 == self._point:
            self._sign.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _wait_or_give_up(writer: SnapshotWriter, sign: Path) -> None:
    """Wait until a save is done; give up once the sign of a dead worker exists."""
    CommitProtocol.raise_if_given_up = lambda _: None
    while not writer.pending.done():
        if sign.exists():
            writer._given_up.set()
        time.sleep(0.001)
    writer.wait(tidy_seconds=20.0)


def _save_twice(
    directory: Path, workers: int, victim: int, point: int | None, keep_last: int
) -> int:
    """Save steps 1 and 2; the victim dies in the second. Return how many points there were."""
    rank = int(os.environ["RANK"])
    writer = SnapshotWriter(
        directory,
        rank=rank,
        workers=workers,
        attempt="first",
        keep_last=keep_last,
        keep_best=0,
        report=lambda *_, **__: None,
    )
    writer.save(1, small_state(1), {}, NO_INFO)
    writer.wait(tidy_seconds=20.0)
    sign = directory.with_suffix(".dead")
    if rank != victim:
        writer.save(2, small_state(2), {}, NO_INFO)
        _wait_or_give_up(writer, sign)
        return 0
    death = Death(point, sign)
    writer.save(2, small_state(2), {}, NO_INFO)
    writer.wait(tidy_seconds=20.0)
    return death.count


def newest_after(directory: Path) -> str:
    """Return the newest complete snapshot, after checking it and that no others are complete."""
    rejected = {}
    newest = find_newest(directory, lambda _, path, reason: rejected.update({path: reason}))
    assert newest is not None
    assert exact(load(newest).state) == exact(small_state(int(newest.name[-1])))
    assert set(rejected) == {str(path) for path in list_snapshots(directory) if path > newest}
    for path in list_snapshots(directory):
        assert fault(path) is None or not (path / NAME).exists()
    return newest.name


@pytest.mark.parametrize(
    ("keep_last", "first"),
    [
        (3, 0),
        pytest.param(3, 1, marks=pytest.mark.long),
        pytest.param(1, 0, marks=pytest.mark.long),
        pytest.param(1, 1, marks=pytest.mark.long),
    ],
)
def test_a_save_that_is_killed_anywhere_is_never_taken_for_whole(tmp_path, keep_last, first):
    (points,) = run_workers(_save_twice, 1, tmp_path / "undisturbed", 1, 0, None, keep_last)
    newest = []
    for point in range(first, points, 2):
        directory = tmp_path / str(point)
        (outcome,) = try_workers(_save_twice, 1, directory, 1, 0, point, keep_last)
        assert outcome.exitcode == -signal.SIGKILL
        newest.append(newest_after(directory))
        save_once(directory, 2, small_state(2), attempt="second")
        assert newest_after(directory) == "step-00000002"
        assert len(list((directory / "step-00000002").iterdir())) == 2
    commit = newest.index("step-00000002")
    assert 5 < commit < len(newest) - 1
    assert newest == ["step-00000001"] * commit + ["step-00000002"] * (len(newest) - commit)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_one_of_two_workers_may_be_killed_anywhere(tmp_path, victim):
    points = run_workers(_save_twice, 2, tmp_path / "undisturbed", 2, victim, None, 3)[victim]
    for point in range(0, points, 2):
        directory = tmp_path / str(point)
        outcomes = try_workers(_save_twice, 2, directory, 2, victim, point, 3)
        # the number of polls differs from run to run
        assert outcomes[victim].exitcode in {-signal.SIGKILL, 0}
        newest = newest_after(directory)
        if newest == "step-00000001":
            assert outcomes[victim].exitcode == -signal.SIGKILL
            assert isinstance(outcomes[1 - victim].error, SnapshotError)
