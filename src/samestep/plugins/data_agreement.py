"""Comparison of the workers' data sets, whose digests travel with the losses of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.data.agreement import DataCheck
from samestep.plugin import RunPlugin


class DataAgreement(RunPlugin):
    """Sends what a `DataCheck` has to compare, and compares what all workers sent."""

    def __init__(self, check: DataCheck) -> None:
        self._check = check

    def note(self) -> dict[str, Any]:
        return self._check.pending

    def receive(self, step: int, notes: Sequence[Mapping[str, Any]]) -> None:
        """Raise `DataError` if the workers' data differ."""
        if any(notes):
            self._check.compare_notes(notes)
