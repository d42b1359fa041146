"""The one place that composes everything above."""

from samestep.run.run import Run, init

__all__ = ["Run", "init"]
