"""The run: composes data, communication, steps, evaluation, snapshots and the record."""

from samestep.run.run import Run, init

__all__ = ["Run", "init"]
