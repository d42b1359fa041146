"""The runs at some locations: find them, follow their records, and announce changes."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from samestep.config import is_url
from samestep.errors import ConfigError, RecordError
from samestep.host import printable
from samestep.masking import mask_urls
from samestep.record.source import MAX_FOLDERS, RunLocation
from samestep.watch.view import FEWEST_ROWS, MOST_BYTES, MOST_ROWS, View

logger = logging.getLogger("samestep")

# of the command-line argument `locations`
LOCATIONS: Final[dict[str, Any]] = {
    "metavar": "LOCATION",
    "nargs": "+",
    "help": "a run's folder, a folder of runs, or the URL of either",
}
MESSAGE_SECONDS: Final = 0.75  # between messages, so updates arrive within a second
KEEP_ALIVE_SECONDS: Final = 15.0
JOIN_SECONDS: Final = 1.0
MOST_SUBSCRIBERS: Final = 100


class Views(Mapping[str, View]):
    """The runs at or below some locations, by id; `scan` finds new ones."""

    def __init__(self, *locations: str | Path) -> None:
        self._prefixes = _prefixes([str(location) for location in locations])
        self._views: dict[str, dict[str, View]] = {location: {} for location in self._prefixes}
        self._most_rows = MOST_ROWS
        self._places = {location: RunLocation(location) for location in self._prefixes}

    def __getitem__(self, id: str) -> View:  # noqa: A002
        return ChainMap(*self._views.values())[id]

    def __iter__(self) -> Iterator[str]:
        return iter([run for views in self._views.values() for run in views])

    def __len__(self) -> int:
        return sum(map(len, self._views.values()))

    @property
    def locations(self) -> list[str]:
        """The locations, without duplicates."""
        return list(self._prefixes)

    def at(self, location: str) -> list[View]:
        """Return the runs at or below one of the locations."""
        return list(self._views[location].values())

    def bound(self) -> None:
        """Thin what all runs hold, if together they hold too many bytes."""
        views = [view for views in self._views.copy().values() for view in views.values()]
        while sum(view.bytes_held for view in views) > MOST_BYTES and self._most_rows > FEWEST_ROWS:
            self._most_rows //= 2
            for view in views:
                view.thin(self._most_rows)

    def scan(self, location: str) -> bool:
        """Update the runs at a location; return whether that changed any.

        Raises `RecordError` if the location cannot be read, or has too many folders to search all.
        """
        prefix, before = self._prefixes[location], self._views[location]
        views = {}
        for path in self._places[location].find():
            run = "/".join(part for part in (prefix, path) if part and part != ".") or "."
            name = _name(location) if run == "." else run
            if (view := before.get(run)) is None:
                view = View(self._places[location].source(path), run, name)
                view.thin(self._most_rows)
            views[run] = view
        self._views[location] = views
        if self._places[location].is_cut:
            raise RecordError(
                f"{location} has more than {MAX_FOLDERS} folders, so not all runs are shown; "
                "pass a folder with fewer"
            )
        return views.keys() != before.keys()


def open_views(*locations: str | Path) -> Views:
    """Return the runs at or below folders or URLs.

    An id is the path of a run below its location, after the location's name if there are several.
    Raises `RecordError` if a location cannot be read, `ConfigError` for an invalid URL.
    """
    views = Views(*locations)
    for location in views.locations:
        try:
            views.scan(location)
        except RecordError as error:
            if not views.at(location):
                raise
            logger.warning("%s", error)
    return views


def read_all(views: Views) -> list[View]:
    """Read the records of all runs, and return those that can be read; warn of the others."""
    read = []
    for view in views.values():
        try:
            view.refresh()
            read.append(view)
        except Exception as error:  # noqa: BLE001  one run's fault must not affect the others
            text = f"skipped {view.source.location}: {type(error).__name__}: {error}"
            logger.warning("%s", printable(text))
    return read


def check_locations(locations: Iterable[str]) -> None:
    """Raise `ConfigError` unless every location is a folder or a URL."""
    for location in locations:
        if not is_url(location) and not Path(location).is_dir():
            raise ConfigError(
                f"expected a run's folder, a folder of runs, or a URL, got {location}; "
                "if the run has not started yet, pass its parent folder"
            )


def _prefixes(locations: list[str]) -> dict[str, str]:
    """Return the prefix of each location's ids: empty for a single one, else unique names."""
    if len(set(locations)) == 1:
        return {locations[0]: ""}
    prefixes: dict[str, str] = {}
    for location in dict.fromkeys(locations):
        prefix, count = _name(location), 1
        while prefix in prefixes.values():
            count += 1
            prefix = f"{_name(location)}-{count}"
        prefixes[location] = prefix
    return prefixes


def _name(location: str) -> str:
    return (
        Path(mask_urls(location)) if is_url(location) else Path(location).absolute()
    ).name or location


@dataclass(frozen=True)
class PollInterval:
    """Seconds between polls: `shortest` while there is news, increasing to `longest` without."""

    shortest: float
    longest: float

    def delay(self, idle: float) -> float:
        """Return the seconds until the next poll, `idle` seconds after the last news."""
        return min(self.longest, max(self.shortest, idle / 10))


# a folder of 1,000 runs would otherwise take half of a core
LOCAL: Final = PollInterval(shortest=0.2, longest=1.0)
LOCAL_SCAN: Final = PollInterval(shortest=1.0, longest=5.0)
# every poll is at least one request, which may cost money
REMOTE: Final = PollInterval(shortest=1.0, longest=60.0)
REMOTE_SCAN: Final = PollInterval(shortest=1.0, longest=10.0)


class Follower(threading.Thread):
    """Reads new events of the runs at one location, a few MB of each in turn.

    Calls `notify` with the ids of runs that changed, and with an empty set when `faults` changed.
    """

    def __init__(self, views: Views, location: str, notify: Callable[[set[str]], None]) -> None:
        # daemon: a storage may take long to respond
        super().__init__(name=f"following {location}", daemon=True)
        self._views, self._location, self._notify = views, location, notify
        intervals = (REMOTE, REMOTE_SCAN) if is_url(location) else (LOCAL, LOCAL_SCAN)
        self._interval, self._scan_interval = intervals
        self._stopped = threading.Event()
        self.faults: dict[str, str] = {}  # by location: why it cannot be read now
        self._due: dict[str, tuple[float, float]] = {}  # by run: next poll, last news

    def stop(self) -> None:
        """Stop before the next poll."""
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            self._poll_if_due("", self._scan_interval, self._scan)
            changed = False
            for view in self._views.at(self._location):
                if not self._stopped.is_set() and self._poll(view):
                    changed = True
                    self._notify({view.id})  # a round over many long records takes a while
            if changed:
                self._views.bound()
            self._stopped.wait(0.001 if changed else self._interval.shortest)

    def _scan(self) -> bool:
        """Find new and removed runs, and return whether there were any."""
        before = {view.id for view in self._views.at(self._location)}
        masked = mask_urls(self._location)
        is_new = self._try(masked, lambda: self._views.scan(self._location))
        after = {view.id for view in self._views.at(self._location)}
        if changed := before ^ after:
            locations = {view.source.location for view in self._views.at(self._location)}
            for gone in self.faults.keys() - locations - {masked}:
                del self.faults[gone]
            self._notify(changed)
        return is_new

    def _poll(self, view: View) -> bool:
        read = partial(self._try, view.source.location, view.advance)
        return self._poll_if_due(view.id, self._interval, read)

    def _poll_if_due(self, key: str, interval: PollInterval, poll: Callable[[], bool]) -> bool:
        now = time.monotonic()
        due, changed = self._due.get(key, (now, now))
        if now < due:
            return False
        if is_new := poll():
            changed = now
        self._due[key] = now + (0.0 if is_new else interval.delay(now - changed)), changed
        return is_new

    def _try(self, location: str, action: Callable[[], bool]) -> bool:
        """Return the result of an action. If it fails, log that once and return false."""
        try:
            is_new = action()
        except Exception as error:  # noqa: BLE001  one run's fault must not affect the others
            fault = f"{type(error).__name__}: {error}"
            if self.faults.get(location) != fault:
                self.faults[location] = fault
                self._notify(set())
                text = f"cannot read {location}, will try again: {fault}"
                logger.warning("%s", printable(text))
            return False
        if self.faults.pop(location, None) is not None:
            self._notify(set())
        return is_new


class Changes:
    """Announces changed runs: a message names a run once, even if it changed several times."""

    def __init__(self, views: Views) -> None:
        self._views = views
        # an event for news, and the ids of runs that changed since the last message
        self._subscribers: list[tuple[asyncio.Event, set[str]]] = []
        self._followers: list[Follower] = []
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Follow all locations. Call this in the event loop."""
        self._loop = asyncio.get_running_loop()
        notify = partial(self._call_soon, self.publish)
        for location in self._views.locations:
            self._followers.append(Follower(self._views, location, notify))
            self._followers[-1].start()

    def stop(self) -> None:
        """Stop all followers and streams. May be called from a signal handler."""
        for follower in self._followers:
            follower.stop()
        self._call_soon(self._stop)

    async def join(self) -> None:
        """Wait for followers to stop; one that waits for a storage ends with the process."""
        for follower in self._followers:
            await asyncio.to_thread(follower.join, JOIN_SECONDS)

    @property
    def faults(self) -> dict[str, str]:
        """Why locations cannot be read now, by location."""
        copies = [dict(follower.faults) for follower in self._followers]
        return {location: fault for faults in copies for location, fault in faults.items()}

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another subscriber."""
        return len(self._subscribers) >= MOST_SUBSCRIBERS

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until `stop`; slow readers get fewer messages."""
        has_news, changed = subscriber = asyncio.Event(), set[str]()
        self._subscribers.append(subscriber)
        try:
            yield b"retry: 1000\n\n"
            while not self._stopped.is_set():
                if not await _is_set(has_news, KEEP_ALIVE_SECONDS):
                    yield b": keep-alive\n\n"
                elif not self._stopped.is_set():
                    message = json.dumps({"ids": sorted(changed)})
                    changed.clear()
                    has_news.clear()
                    yield f"data: {message}\n\n".encode()
                    await _is_set(self._stopped, MESSAGE_SECONDS)
        finally:
            self._subscribers.remove(subscriber)

    def _call_soon(self, action: Callable[..., None], *arguments: object) -> None:
        """Call an action in the event loop, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, so there are no subscribers left
            if self._loop is not None:
                self._loop.call_soon_threadsafe(action, *arguments)

    def publish(self, ids: Iterable[str]) -> None:
        """Announce that some runs changed. Call this in the event loop."""
        for has_news, changed in self._subscribers:
            changed.update(ids)
            has_news.set()

    def _stop(self) -> None:
        self._stopped.set()
        self.publish(())


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    """Return whether an event is set within some seconds."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True
