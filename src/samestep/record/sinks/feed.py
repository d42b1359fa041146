"""A sink, fed with a run's events and images one by one."""

from __future__ import annotations

import logging
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import RecordError
from samestep.record.events import parse_events
from samestep.record.sinks.base import open_sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from samestep.record.forwarded import Forwarded
    from samestep.record.sinks.base import Sink
    from samestep.record.source import Source

PAUSE_SECONDS: Final = 0.5
# what another try would not change
OF_THE_EVENT: Final = (ValueError, TypeError, LookupError, AttributeError)


class Feed:
    """Gives each event to a sink once; after a failure it goes on with the event that failed."""

    def __init__(self, name: str, directory: Path, source: Source, forwarded: Forwarded) -> None:
        self.name, self.pause_seconds, self.dropped = name, PAUSE_SECONDS, 0
        self._directory, self._source, self._forwarded = directory, source, forwarded
        self._sink: Sink
        self._called = 0  # of the calls that the lines which are sent next ask for

    def begin(self) -> int:
        """Open the sink, and go on after what was safe there."""
        self._sink = open_sink(self.name, self._directory)
        return self._forwarded.offset(self.name)

    def send(self, offset: int, lines: bytes) -> None:
        """Give it each event of the lines, and each image that they name."""
        for call in islice(self._calls(lines), self._called, None):
            try:
                call()
            except OF_THE_EVENT as error:
                self._leave_out(error)
            self._called += 1
        self._sink.flush()
        self._called = 0
        self._forwarded.keep(self.name, offset + len(lines))

    def _calls(self, lines: bytes) -> Iterator[Callable[[], None]]:
        for event in parse_events(lines):
            yield partial(self._sink.take, event)
            if event.get("event") == "image":
                yield partial(self._give_image, event)

    def _give_image(self, event: Mapping[str, Any]) -> None:
        try:
            data = self._source.read_image(str(event.get("path")))
        except RecordError as error:  # somebody removed it
            self._leave_out(error)
        else:
            self._sink.image(event, data)

    def _leave_out(self, error: Exception) -> None:
        if not self.dropped:
            text = "the sink %s cannot take an event: %s: %s; such ones are left out and counted"
            logging.getLogger("samestep").warning(text, self.name, type(error).__name__, error)
        self.dropped += 1

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()
