"""The read model of runs: what their records tell, as the page, the report and the plot show it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from samestep.config import is_url
from samestep.errors import RecordError
from samestep.record.events import parse_events
from samestep.record.source import RunLocation, Source
from samestep.watch.curves import Request
from samestep.watch.run_state import RunState
from samestep.watch.summary import row, summary

if TYPE_CHECKING:
    from samestep.watch.run_state import Image

EVENTS_AT_A_TIME: Final = 256  # taken while nobody else may look
TAIL_BYTES: Final = 1024


class View:
    """One run, as far as its record was read. `refresh` may be called beside everything else, by one thread at a time.

    `id` tells it from the others, `name` is what people call it.
    """

    # the page's word
    def __init__(self, source: Source, id: str = ".", name: str | None = None) -> None:  # noqa: A002
        self.id = id
        self.name = name or Path(source.location).name or source.location
        self.source = source
        self._lock = Lock()
        self._version: object = None
        self._is_read = True  # up to `_version`
        self._began_anew = False  # with `_version`
        self._forget()

    def _forget(self) -> None:
        self._run = RunState()
        self._offset = 0
        self._tail = b""  # the last bytes that were read, to know the record by
        self._was_read = False  # once, as far as it was there
        self._seen: float | None = None  # when something new came since

    def refresh(self) -> bool:
        """Read all that is new, and tell whether there was anything. Raises `RecordError` when the record cannot be read now."""
        is_new = False
        while self.advance():
            is_new = True
        return is_new

    def advance(self) -> bool:
        """Read the next part of what is new, some MB at most, and tell whether there was anything. Raises `RecordError`.

        A record that was replaced by another, or cut, is read anew.
        """
        if self._is_read:
            version = self.source.version()
            if version == self._version:
                return False
            self._version, self._is_read, self._began_anew = version, False, False
        data = self._next()
        if not data:
            self._is_read = self._was_read = True
            return False
        events = parse_events(data)
        while batch := list(islice(events, EVENTS_AT_A_TIME)):
            with self._lock:
                for event in batch:
                    self._run.take(event)
        if self._was_read:
            self._seen = time.time()
        self._offset += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        return True

    def _next(self) -> bytes:
        try:
            data = self._again()
        except RecordError:
            if not self._offset:
                raise
            data = b""
        if data.startswith(self._tail):
            # a line that is longer than what is read at a time
            return data[len(self._tail) :] or self.source.read(self._offset)
        if self._began_anew:  # parts that contradict each other would have it begin anew for ever
            with suppress(RecordError):
                return self.source.read(self._offset)
            return b""
        data, self._began_anew = self.source.read(0), True
        with self._lock:
            self._forget()
        return data

    def _again(self) -> bytes:
        """Read the last bytes that were read once more, and what the file that holds their end has beyond; they may lie in several."""
        data = b""
        while len(data) < len(self._tail) and (
            more := self.source.read(self._offset - len(self._tail) + len(data))
        ):
            data += more
        return data

    def row(self) -> dict[str, Any]:
        """Return what the list of runs tells of this one."""
        with self._lock:
            return {"id": self.id, "name": self.name, **row(self._run, time.time(), self._seen)}

    def summary(self) -> dict[str, Any]:
        """Return where the run stands: progress, names of scalars, images, workers, time by part, events, configuration."""
        with self._lock:
            return {"id": self.id, "name": self.name, **summary(self._run, time.time(), self._seen)}

    def has_curve(self, name: str) -> bool:
        """Tell whether there are points of a scalar."""
        return name in self._run.curves

    def curve(self, name: str, request: Request | None = None, **options: Any) -> dict[str, Any]:
        """Return what is drawn of a scalar: x, value, low, high, smooth, points, exact. Raises `KeyError` where there is no such scalar.

        `options` are those of `Request`, in its place.
        """
        request = request or Request(**options)
        with self._lock:
            points = self._run.curves[name].points(request.smooth)
        return points.answer(request)

    def timing(
        self, start: float | None = None, end: float | None = None, points: int = 500
    ) -> dict[str, Any]:
        """Return seconds a step by part and by worker, from step `start` to `end`: means over at most `points` spans of steps."""
        with self._lock:
            steps = self._run.timings.steps()
        return steps.answer(start, end, points)

    def image(self, number: int) -> Image:
        """Return an image's event. Raises `KeyError` where there is none of that number."""
        return self._run.images[number]


class Views(Mapping[str, View]):
    """The runs at or below some places, by id; `scan` looks for new ones."""

    def __init__(self, *locations: str | Path) -> None:
        self._labels = _labels([str(location) for location in locations])
        self._views: dict[str, dict[str, View]] = {location: {} for location in self._labels}
        self._places = {location: RunLocation(location) for location in self._labels}

    def __getitem__(self, id: str) -> View:  # noqa: A002
        for views in self._views.values():
            if id in views:
                return views[id]
        raise KeyError(id)

    def __iter__(self) -> Iterator[str]:
        return iter([run for views in self._views.values() for run in views])

    def __len__(self) -> int:
        return sum(map(len, self._views.values()))

    @property
    def locations(self) -> list[str]:
        """The places."""
        return list(self._labels)

    def at(self, location: str) -> list[View]:
        """Return the runs at or below one of the locations."""
        return list(self._views[location].values())

    def scan(self, location: str) -> bool:
        """Look for runs that came to one of the locations, or went, and tell whether there were any. Raises `RecordError`."""
        label, place, before = self._labels[location], self._places[location], self._views[location]
        names = {_id(label, name): name for name in place.find()}
        views = {
            run: before.get(run) or View(place.source(name), run, _name(location, run))
            for run, name in names.items()
        }
        self._views[location] = views
        return views.keys() != before.keys()


def open_views(*locations: str | Path) -> Views:
    """Return the runs at or below folders or URLs. Raises `RecordError` where one cannot be read, `ConfigError` for a bad URL.

    Of one location ids are as `samestep.record.source.find_runs` tells them; of several, the
    location's name comes before them.
    """
    views = Views(*locations)
    for location in views.locations:
        views.scan(location)
    return views


def _labels(locations: list[str]) -> dict[str, str]:
    """Return what comes before the ids of each location's runs: nothing of a single one, else names that differ."""
    if len(set(locations)) == 1:
        return {locations[0]: ""}
    labels: dict[str, str] = {}
    for location in dict.fromkeys(locations):
        label, count = _name(location, "."), 1
        while label in labels.values():
            count += 1
            label = f"{_name(location, '.')}-{count}"
        labels[location] = label
    return labels


def _id(label: str, name: str) -> str:
    if not label:
        return name
    return label if name == "." else f"{label}/{name}"


def _name(location: str, id: str) -> str:  # noqa: A002
    if id != ".":
        return id
    return (Path(location) if is_url(location) else Path(location).absolute()).name or location
