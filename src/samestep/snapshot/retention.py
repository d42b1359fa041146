"""Which snapshots stay: the newest, and those of the highest score."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

from samestep.snapshot.files import sync
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import fault, inspect, list_snapshots, step_of


class Retention:
    """Removes snapshots of a run's directory beyond the `keep_last` newest whole ones and the `keep_best` of the highest score."""

    def __init__(self, directory: Path, keep_last: int, keep_best: int) -> None:
        self._directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best
        # their bytes were compared with their checksums, or written, by this process
        self._checked: set[Path] = set()

    def apply(self, written: Path) -> list[Path]:
        """Remove what need not stay now that `written` is whole, and return it.

        Later steps than `written` are another history's and left alone, so are links. Earlier
        directories without a manifest are leftovers. A damaged snapshot counts for nothing, and
        goes with the whole ones of its age.
        """
        self._checked.add(written)
        steps = {
            path: step
            for path in list_snapshots(self._directory)
            if (step := step_of(path)) is not None and not path.is_symlink()
        }
        candidates = [path for path in reversed(steps) if steps[path] <= steps[written]]
        scores = {path: inspect(path).score for path in candidates if fault(path, inspect) is None}
        staying, horizon = choose(scores, self._keep_last, self._keep_best, self._is_whole)
        old = [path for path in candidates if path != written and path not in staying]
        removed = [path for path in old if steps[path] < horizon or not (path / NAME).exists()]
        for path in removed:
            remove(path)
        return removed

    def _is_whole(self, path: Path) -> bool:
        if path not in self._checked and fault(path) is None:
            self._checked.add(path)
        return path in self._checked


def choose(
    scores: Mapping[Path, float | None],
    keep_last: int,
    keep_best: int,
    is_whole: Callable[[Path], bool] = lambda _: True,
) -> tuple[set[Path], int]:
    """Return which snapshots stay, of those in `scores`, and the step before which all others may go.

    `scores` are those of snapshots that seem whole; `is_whole` is asked of one after the other,
    until there are enough.
    """
    steps = {path: step_of(path) or 0 for path in scores}
    scored = [
        (score, steps[path], path)
        for path, score in scores.items()
        if score is not None and not math.isnan(score)
    ]
    newest = list(
        islice(filter(is_whole, sorted(steps, key=steps.__getitem__, reverse=True)), keep_last)
    )
    best = islice(
        filter(is_whole, (path for _, _, path in sorted(scored, reverse=True))), keep_best
    )
    return {*newest, *best}, steps[newest[-1]] if len(newest) == keep_last else 0


def remove(path: Path) -> None:
    """Remove a snapshot. Its manifest goes first, so that it is never taken for whole."""
    (path / NAME).unlink(missing_ok=True)
    sync(path)
    shutil.rmtree(path)
