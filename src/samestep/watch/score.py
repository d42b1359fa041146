"""The score of a run: what `run.snapshot(score=…)` got, and the scalar whose values these are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from samestep.watch.curves import Curve

NAME: Final = "snapshot score"  # if no scalar has its values


class Score:
    """What the snapshots of a run got as `score=`, of which the highest are kept.

    A script gives numbers without a name. Theirs is that of the scalar that had the same values at
    all of these snapshots, or the same with the other sign: then the lowest are the best.
    """

    def __init__(self) -> None:
        self.curve = Curve()
        self._newest: tuple[float, float] | None = None  # step and score
        # steps and scores that no scalar had when the snapshot was complete; it may log them later
        self._waiting: list[tuple[float, float]] = []
        self._fitting: list[tuple[str, int]] = []  # names and signs that fit all others

    def add(self, step: float, time: float, score: float, curves: Mapping[str, Curve]) -> None:
        """Add the score of a snapshot; `curves` are those of all scalars, by name."""
        if (step, score) == self._newest:  # saved again, as at the end of a run
            return
        self._newest = step, score
        self.curve.append((step, False), time, score)
        self._waiting.append(self._newest)
        self._find(curves)

    def discard_after(self, last: tuple[float, bool]) -> None:
        """Remove all scores after a position."""
        self.curve.discard_after(last)
        self._waiting = [one for one in self._waiting if one[0] <= last[0]]
        self._newest = None

    def scalar(self, curves: Mapping[str, Curve]) -> tuple[str, str] | None:
        """Return the score's name, and whether its best value is the "highest" or the "lowest".

        None if no snapshot had a score. Of several scalars, the one with the fewest points is it:
        evaluations are rarer than steps.
        """
        if not len(self.curve):
            return None
        self._find(curves)
        fitting = [(name, sign) for name, sign in self._fitting if name in curves]
        if not fitting or len(self._waiting) > 1:
            return NAME, "highest"
        name, sign = min(fitting, key=lambda one: (len(curves[one[0]]), -one[1]))
        return name, "highest" if sign > 0 else "lowest"

    def _find(self, curves: Mapping[str, Curve]) -> None:
        waiting, self._waiting = self._waiting, []
        for step, score in waiting:
            known = self._fitting or [(name, sign) for name in curves for sign in (1, -1)]
            fitting = [
                (name, sign)
                for name, sign in known
                if name in curves and curves[name].has(step, sign * score)
            ]
            self._fitting = fitting or self._fitting
            if not fitting:
                self._waiting = [*self._waiting[-1:], (step, score)]
