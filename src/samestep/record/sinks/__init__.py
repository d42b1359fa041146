"""The protocol of sinks, which receive a run's record outside of its directory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol, cast

from samestep.config import is_url
from samestep.errors import ConfigError, RecordError
from samestep.record.cursor import Cursor, Destination
from samestep.record.events import parse_events
from samestep.record.source import Source
from samestep.storage import Storage

# class and required package by name; samestep's extras have the sinks' names
NAMED: Final = {
    "tensorboard": ("samestep.record.sinks.tensorboard:TensorBoardSink", "tensorboard"),
    "mlflow": ("samestep.record.sinks.trackers:MlflowSink", "mlflow"),
    "wandb": ("samestep.record.sinks.trackers:WandbSink", "wandb"),
}
PAUSE_SECONDS: Final = 0.5
# errors that a retry would not change
EVENT_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError)


class Sink(Protocol):
    """Receives every event of a record, in order.

    A user's class, named as module:Class, is called with the run's directory. Exceptions are
    reported, and the call is repeated after a pause. A `ValueError`, `TypeError`, `LookupError` or
    `AttributeError` rejects the event itself, which is then skipped and counted. After a kill,
    the events since the last `flush` are sent again.
    """

    def take(self, event: Mapping[str, Any]) -> None:
        """Receive an event. An image event is also received here, before `image`."""

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        """Receive an image: its event, and the content of its file."""

    def flush(self) -> None:
        """Return once everything received is safe."""

    def close(self) -> None:
        """Release resources; no call follows."""


def open_sink(name: str, directory: Path) -> Sink:
    """Return a sink for the run in `directory`, by name or as module:Class.

    Raises `ConfigError` if its class or package is missing.
    """
    return _find_class(NAMED[name][0] if name in NAMED else name)(directory)


def check_sinks(names: Iterable[str]) -> None:
    """Raise `ConfigError` for sinks that can never work."""
    for name in names:
        if is_url(name):
            Storage(name).open()
        elif name not in NAMED:
            _find_class(name)
        elif find_spec(NAMED[name][1]) is None:
            raise package_error(name)


def package_error(name: str) -> ConfigError:
    """Return the error for a sink whose package is missing."""
    return ConfigError(
        f'sinks={name!r} requires the package {NAMED[name][1]}: pip install "samestep[{name}]"'
    )


def _find_class(name: str) -> Callable[[Path], Sink]:
    return _import("sinks", "module:Class", "a class that takes the run's directory", name)


def find_function(name: str) -> Callable[[Path], object]:
    """Return the function of the option `transfer`. Raises `ConfigError` if it is missing."""
    return _import("transfer", "module:function", "a function that takes a file's path", name)


def _import(option: str, form: str, description: str, name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":") if ":" in name else name.rpartition(".")
    if (folder := str(Path.cwd())) not in sys.path:  # only python -m searches it
        sys.path.append(folder)
    try:
        found: Any = reduce(getattr, path.split("."), import_module(module))
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"`
        expected = f"{option} must name an importable {form}"
        raise ConfigError(f"{expected}, got {name!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{option} must name {description}, got {name!r}, which is a {kind}")
    return cast("Callable[..., Any]", found)


class SinkAdapter(Destination):
    """Passes each event to a sink once; after a failure it continues with the failed event."""

    pause_seconds = PAUSE_SECONDS

    def __init__(self, name: str, directory: Path, source: Source, cursor: Cursor) -> None:
        super().__init__(name, directory, source, cursor)
        self._sink: Sink
        self._completed = 0  # successful calls for the current lines

    def open(self) -> int:
        """Open the sink, and return the offset after the last flushed event."""
        self._sink = open_sink(self.name, self._directory)
        return self._cursor.offset(self.name)

    def send(self, offset: int, lines: bytes) -> None:
        """Pass each event of the lines, and each image that they name, and flush the sink."""
        for call in islice(self._calls(lines), self._completed, None):
            try:
                call()
            except EVENT_ERRORS as error:
                self._drop(error)
            self._completed += 1
        self._sink.flush()
        self._completed = 0
        self._cursor.save(self.name, offset + len(lines))

    def _calls(self, lines: bytes) -> Iterator[Callable[[], None]]:
        for event in parse_events(lines):
            yield partial(self._sink.take, event)
            if event.get("event") == "image":
                yield partial(self._send_image, event)

    def _send_image(self, event: Mapping[str, Any]) -> None:
        try:
            data = self._source.read_image(str(event.get("path")))
        except RecordError as error:  # the file was removed
            self._drop(error)
        else:
            self._sink.image(event, data)

    def _drop(self, error: Exception) -> None:
        if not self.dropped:
            message = "sink %s cannot store an event (%s: %s); such events are skipped and counted"
            kind = type(error).__name__
            logging.getLogger("samestep").warning(message, self.name, kind, error)
        self.dropped += 1

    def close(self) -> None:
        self._sink.close()
