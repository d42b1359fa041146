"""Follows records while they grow, and tells those who listen which runs changed."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from samestep.config import is_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from samestep.watch.view import View, Views

TELL_SECONDS: Final = 0.75  # between two messages, so that what is new is there within a second
KEEP_ALIVE_SECONDS: Final = 15.0
ENDING_SECONDS: Final = 1.0
MOST_LISTENERS: Final = 100


@dataclass(frozen=True)
class Rhythm:
    """How often something is looked at: after `shortest` seconds while there is news, and at rest up to `longest`."""

    shortest: float
    longest: float

    def pause(self, rest: float) -> float:
        """Return the seconds until the next look, `rest` after the last news."""
        return min(self.longest, max(self.shortest, rest / 10))


LOCAL: Final = Rhythm(shortest=0.2, longest=0.2)
LOCAL_SCAN: Final = Rhythm(shortest=1.0, longest=1.0)
# Every look is a request or more, which may cost money.
REMOTE: Final = Rhythm(shortest=1.0, longest=60.0)
REMOTE_SCAN: Final = Rhythm(shortest=1.0, longest=10.0)


class Follower(threading.Thread):
    """Reads what is new of the runs at one location, some MB of each in turn.

    `tell` is called with the ids of those that changed, and with none when it is another place than
    before that cannot be read.
    """

    def __init__(self, views: Views, location: str, tell: Callable[[set[str]], None]) -> None:
        # a storage may not answer for long
        super().__init__(name=f"following {location}", daemon=True)
        self._views, self._location, self._tell = views, location, tell
        self._rhythm, self._scan_rhythm = (
            (REMOTE, REMOTE_SCAN) if is_url(location) else (LOCAL, LOCAL_SCAN)
        )
        self._ended = threading.Event()
        self.faults: dict[str, str] = {}  # why a place cannot be read now
        # when a place is looked at next, and when it was last found changed
        self._due: dict[str, tuple[float, float]] = {}

    def end(self) -> None:
        """Stop soon."""
        self._ended.set()

    def run(self) -> None:
        while not self._ended.is_set():
            self._when_due("", self._scan_rhythm, self._scan)
            changed = {
                view.id
                for view in self._views.at(self._location)
                if not self._ended.is_set() and self._look(view)
            }
            if changed:
                self._tell(changed)
            self._ended.wait(0.001 if changed else self._rhythm.shortest)

    def _scan(self) -> bool:
        """Look for runs that came or went, and tell whether there were any."""
        before = {view.id for view in self._views.at(self._location)}
        is_new = self._try(self._location, lambda: self._views.scan(self._location))
        if changed := before ^ {view.id for view in self._views.at(self._location)}:
            self._tell(changed)
        return is_new

    def _look(self, view: View) -> bool:
        """Read the next part of a run's record where it is due, and tell whether there was something new."""
        return self._when_due(
            view.id, self._rhythm, lambda: self._try(view.source.location, view.advance)
        )

    def _when_due(self, key: str, rhythm: Rhythm, look: Callable[[], bool]) -> bool:
        """Look if it is time to, and tell whether there was something new."""
        now = time.monotonic()
        due, changed = self._due.get(key, (now, now))
        if now < due:
            return False
        is_new = look()
        if is_new:
            changed = now
        self._due[key] = now + (0.0 if is_new else rhythm.pause(now - changed)), changed
        return is_new

    def _try(self, place: str, action: Callable[[], bool]) -> bool:
        """Return whether something is new; what fails is said once, and tried again when its turn comes."""
        try:
            is_new = action()
        except Exception as error:  # noqa: BLE001  one run's fault is none of the others'
            fault = f"{type(error).__name__}: {error}"
            if self.faults.get(place) != fault:
                self.faults[place] = fault
                self._tell(set())
                logging.getLogger("samestep").warning(
                    "%s cannot be read now, and is tried again: %s", place, fault
                )
            return False
        if self.faults.pop(place, None) is not None:
            self._tell(set())
        return is_new


class Listener:
    """Who is told of changes: what was not told yet, and an event to wake for it."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self.woken = asyncio.Event()

    def add(self, ids: Iterable[str]) -> None:
        """Add runs that changed."""
        self._ids.update(ids)
        self.woken.set()

    def take(self) -> list[str]:
        """Return the runs that changed since the last call."""
        ids, self._ids = sorted(self._ids), set()
        self.woken.clear()
        return ids


class Changes:
    """Tells listeners which runs changed: each hears of a run once, however often it changed since the last message."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._listeners: set[Listener] = set()
        self._followers: list[Follower] = []
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        """Follow all locations. Called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._followers = [
            Follower(self._views, location, self._tell_soon) for location in self._views.locations
        ]
        for follower in self._followers:
            follower.start()

    def end(self) -> None:
        """Have followers and all who listen end. May be called from a signal handler."""
        for follower in self._followers:
            follower.end()
        self._call(self._end)

    async def wait(self) -> None:
        """Wait for followers to end; one that a storage holds up ends with the process."""
        for follower in self._followers:
            await asyncio.to_thread(follower.join, ENDING_SECONDS)

    @property
    def faults(self) -> dict[str, str]:
        """Why places cannot be read now, by place."""
        return {
            place: fault
            for follower in self._followers
            for place, fault in dict(follower.faults).items()
        }

    @property
    def is_full(self) -> bool:
        """Whether no more may listen."""
        return len(self._listeners) >= MOST_LISTENERS

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until all ends; who reads slowly gets fewer."""
        listener = Listener()
        self._listeners.add(listener)
        try:
            yield b"retry: 1000\n\n"
            while not self._ended.is_set():
                if not await _is_set(listener.woken, KEEP_ALIVE_SECONDS):
                    yield b": still here\n\n"
                elif not self._ended.is_set():
                    yield b"data: " + json.dumps({"ids": listener.take()}).encode() + b"\n\n"
                    await _is_set(self._ended, TELL_SECONDS)
        finally:
            self._listeners.discard(listener)

    def _tell_soon(self, ids: set[str]) -> None:
        self._call(partial(self._tell, ids))

    def _call(self, action: Callable[[], None]) -> None:
        """Call something in the event loop, from anywhere."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            if self._loop is not None:
                self._loop.call_soon_threadsafe(action)

    def _tell(self, ids: Iterable[str]) -> None:
        for listener in self._listeners:
            listener.add(ids)

    def _end(self) -> None:
        self._ended.set()
        self._tell(())


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    """Tell whether an event is set within some seconds."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True
