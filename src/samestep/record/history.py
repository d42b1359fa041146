"""The events of a record that count: a run that was killed and taken up again made some of its steps twice."""

from __future__ import annotations

import math
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from samestep.record.events import read_events

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

Place: TypeAlias = tuple[float, bool]

STARTS: Final = ("started", "resumed")
OF_A_STEP: Final = ("scalars", "timing", "image")


def read_history(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a run's directory or of its events file, in order, without those that a later start made void.

    A start that resumes from a step makes void the scalars, timing and images of the steps after
    it, which are made again; one from the beginning makes void all of them. What was logged between
    two steps (`between`) after as many as were resumed from stays. Events that tell of attempts
    themselves (`started`, `snapshot`, `failed`, ...) always stay. Reads twice and holds no events.
    Raises `RecordError` when there is no record at `path`.
    """
    # the number of its event, and the last place whose events stand
    starts: list[tuple[int, Place]] = []
    count = 0
    for count, event in enumerate(read_events(path), start=1):
        if event.get("event") in STARTS:
            starts.append((count, last_standing(event)))
    # Of each start and all after it together; the first comes last, to be taken off when it was
    # passed.
    limits = list(
        accumulate(reversed(starts), lambda later, start: (start[0], min(start[1], later[1])))
    )
    # what was added since belongs to the next reading
    for number, event in enumerate(islice(read_events(path), count), start=1):
        while limits and limits[-1][0] <= number:
            limits.pop()
        if not limits or event.get("event") not in OF_A_STEP or place_of(event) <= limits[-1][1]:
            yield event


def place_of(event: dict[str, Any]) -> Place:
    """Return where in a run an event stands: after so many steps, and whether within the next."""
    return _step(event), not event.get("between")


def last_standing(start: dict[str, Any]) -> Place:
    """Return the last place whose events a start lets stand."""
    return (_step(start) if start["event"] == "resumed" else -math.inf), False


def _step(event: dict[str, Any]) -> float:
    """Return an event's step; of one that tells none, which no run writes, a step before all others."""
    step = event.get("step")
    return step if isinstance(step, (int, float)) else -math.inf
