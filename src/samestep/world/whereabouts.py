"""What a worker does now, for those who may wait for it in vain."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from samestep.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


class Whereabouts:
    """Where a worker is: plain attributes, because a step sets them many times. Of a worker alone nobody reads them.

    `step` and the `part` of it; what the worker `waits` for, "" while for nobody; `since` when, in
    seconds of the monotonic clock.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.step = 0
        self.part = "starting"
        self.waits = ""
        self.since = time.monotonic()

    def at(self, part: str) -> None:
        """Say what the worker does from now on."""
        self.part, self.since = part, time.monotonic()

    @contextmanager
    def doing(self, part: str) -> Iterator[None]:
        """Say that the worker does something inside of what it did before."""
        before = self.part
        self.at(part)
        yield
        self.at(before)

    def waiting(self, what: str) -> Self:
        """Return a context in which the worker waits for the others."""
        self.waits, self.since = what, time.monotonic()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.waits, self.since = "", time.monotonic()

    def explain(self, what: str, reason: str, *, late: bool) -> WorldError:
        """Return the error of a wait in vain, with what is known of those who did not come in time (`late`), or are gone."""
        return no_answer(self.rank, what, reason)

    def tell_failure(self, error: BaseException) -> None:
        """Tell the other workers that this one fails, so that all end."""

    def end(self) -> None:
        """Say that all workers have come to the end of the run: from now on each may go when it likes."""

    def close(self) -> None:
        """Tell nobody any more."""


def no_answer(rank: int, what: str, reason: str, told: str | None = None) -> WorldError:
    """Return the error of worker `rank` whose call was not answered, for `reason`, with what others `told` of it."""
    why = told or "usually another worker failed: look for the first error of the run"
    return WorldError(f"worker {rank} got no answer from the others while {what}; {why} ({reason})")
